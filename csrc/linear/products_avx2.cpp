// Products (products.cpp) with AVX2.
#include "products.h"

#if defined(DS_PRODUCT_SETS)
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("arch=x86-64-v3"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("arch=x86-64-v3")
#endif
namespace ds::products::avx2 {
#define DS_DOT 2
#include "tiles.h"
#undef DS_DOT
}  // namespace ds::products::avx2
#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#endif
