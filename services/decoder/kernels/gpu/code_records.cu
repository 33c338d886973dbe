// code_records: latent records in eight bits. A thread block a record, a warp a tile, and one for the roped numbers.
//
// The definition is the twin, kernels/record_code.py, and the bytes are the same: scales are powers of two, so dividing is
// exact, and rounding to e4m3 is bit arithmetic, for cards without an instruction for it too.
//
// Compile-time: LATENT (multiple of 128), ROPED, ELEMENT (of what comes: 0 float32, 1 bfloat16, 2 float16).

#define CODED 1
#include "elements.cuh"
#include "coded_records.cuh"

struct CodeRecordsParams {
  const void* record;  // [records, LATENT + ROPED]
  char* coded;         // [records, RECORD_BYTES]
};

constexpr i32 TILES = LATENT / TILE;
constexpr i32 THREADS = (TILES + 1) * 32;
constexpr u32 NONE = 0x7fc00000;  // no number, as a scale: then no code of the tile is one
constexpr u32 LEAST_EXPONENT = 27;

// Of a tile whose largest number has these bits, without its sign.
__device__ __forceinline__ u32 scale_bits(u32 most) {
  if (most >= 0x7f800000) return NONE;
  const u32 exponent = (most + 0x1fffff) >> 23;  // carried, if it is more than 1.75 times a power of two
  return max(exponent, LEAST_EXPONENT + 8) - 8 << 23;
}

// The nearest e4m3, of two as near the even one; `number` is a number, at most 448.
__device__ __forceinline__ u32 code_of(float number) {
  const u32 bits = __float_as_uint(number), size = bits & 0x7fffffff, sign = bits >> 24 & 0x80;
  // Without a leading one, multiples of 2^-9: what is left of a sum with 2^14.
  if (size < 0x3c800000) return sign | __float_as_uint(__uint_as_float(size) + 16384.0f) - 0x46800000;
  return sign | (size + 0x7ffff + (size >> 20 & 1) >> 20) - (127 - 7 << 3);
}

// The nearest bfloat16.
__device__ __forceinline__ u16 short_of(float number) {
  const u32 bits = __float_as_uint(number);
  if ((bits & 0x7fffffff) > 0x7f800000) return 0x7fc0;
  return bits + 0x7fff + (bits >> 16 & 1) >> 16;
}

extern "C" __global__ void __launch_bounds__(THREADS) code_records(const __grid_constant__ CodeRecordsParams p) {
  wait_for_previous();
  let_next_begin();
  const i32 warp = threadIdx.x / 32, inside = threadIdx.x % 32;
  const i64 first = (i64)blockIdx.x * (LATENT + ROPED);
  char* own = p.coded + (i64)blockIdx.x * RECORD_BYTES;
  if (warp < TILES) {
    float number[4];
    u32 most = 0;
#pragma unroll
    for (i32 i = 0; i < 4; ++i) {
      number[i] = load(p.record, first + warp * TILE + inside * 4 + i);
      most = max(most, __float_as_uint(number[i]) & 0x7fffffff);
    }
    most = __reduce_max_sync(~0u, most);
    const u32 scale = scale_bits(most);
    const float factor = __uint_as_float(0x7f000000 - scale);  // 1 / scale
    u32 codes = 0;
#pragma unroll
    for (i32 i = 0; i < 4; ++i) codes |= code_of(number[i] * factor) << i * 8;
    ((u32*)own)[warp * 32 + inside] = scale == NONE ? 0x7f7f7f7f : codes;
    if (inside == 0) ((u32*)(own + LATENT))[warp] = scale;
    return;
  }
  for (i32 i = TILES + inside; i < SCALE_BYTES / 4; i += 32) ((u32*)(own + LATENT))[i] = 0;
  for (i32 i = inside; i < (RECORD_BYTES - ROPED_AT) / 2; i += 32)
    ((u16*)(own + ROPED_AT))[i] = i < ROPED ? short_of(load(p.record, first + LATENT + i)) : 0;
}
