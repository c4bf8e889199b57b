// Products (products.cpp) without vectors that a processor may lack.
#include "products.h"

namespace ds::products::plain {
#if defined(DS_PRODUCT_SETS)
#define DS_DOT 1
#else
#define DS_DOT 0
#endif
#include "tiles.h"
#undef DS_DOT
}  // namespace ds::products::plain
