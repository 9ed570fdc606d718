// xxh3 for the instruction set that the whole library is compiled for.
#define DFKV_XXH3_BACKEND kXxh3Baseline
#include "wire/xxh3_backend.inc"
