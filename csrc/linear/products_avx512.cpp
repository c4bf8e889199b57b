// Products (products.cpp) with AVX-512.
#include "products.h"

#if defined(DS_PRODUCT_SETS)
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("arch=x86-64-v4"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("arch=x86-64-v4,prefer-vector-width=512")
#endif
namespace ds::products::avx512 {
#define DS_DOT 3
#include "tiles.h"
#undef DS_DOT
}  // namespace ds::products::avx512
#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#endif
