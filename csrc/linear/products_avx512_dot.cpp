// Products (products.cpp) with AVX-512 with VNNI and BF16.
#include "products.h"

#if defined(DS_PRODUCT_SETS)
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("arch=x86-64-v4,avx512vnni,avx512bf16"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("arch=x86-64-v4,avx512vnni,avx512bf16,prefer-vector-width=512")
#endif
namespace ds::products::avx512_dot {
#define DS_DOT 4
#include "tiles.h"
#undef DS_DOT
}  // namespace ds::products::avx512_dot
#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#endif
