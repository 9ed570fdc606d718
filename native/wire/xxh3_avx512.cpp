// xxh3 for CPUs with AVX512.
#if defined(__x86_64__)
#if defined(__clang__)
#include <immintrin.h>
#include <stdlib.h>
#include <string.h>
#pragma clang attribute push(__attribute__((target("avx512f"))), apply_to = function)
#else
#pragma GCC target("avx512f")
// The compiler's own "undefined" vector trips its own warning in every intrinsic without a mask.
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#include <immintrin.h>
#endif

#define XXH_VECTOR XXH_AVX512
#define DFKV_XXH3_BACKEND kXxh3Avx512
#include "wire/xxh3_backend.inc"

#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif
