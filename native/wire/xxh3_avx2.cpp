// xxh3 for CPUs with AVX2.
#if defined(__x86_64__)
#if defined(__clang__)
#include <immintrin.h>
#include <stdlib.h>
#include <string.h>
#pragma clang attribute push(__attribute__((target("avx2"))), apply_to = function)
#else
#pragma GCC target("avx2")
#include <immintrin.h>
#endif

#define XXH_VECTOR XXH_AVX2
#define DFKV_XXH3_BACKEND kXxh3Avx2
#include "wire/xxh3_backend.inc"

#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif
