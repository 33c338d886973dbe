// rope: query and key out of a fused projection, normed a head where weights are given, turned to their
// positions. One launch; LANES threads a head.
//
// The definition is the twin, kernels/rope.py; this rounds where it rounds. Knows heads and tables of cosines.
//
// Compile-time: ELEMENT (1 bfloat16, 2 float16), HEAD_DIM (multiple of 16, at most 512), THREADS.

#include "elements.cuh"

struct RopeParams {
  const u16* qkv;        // [rows, row_stride], of it (heads + 2 kv_heads) * HEAD_DIM
  const u16* cos;        // [positions, HEAD_DIM]
  const u16* sin;        // [positions, HEAD_DIM]
  const void* position;  // [rows] int32, or int64 if wide_position
  const u16* q_norm;     // [HEAD_DIM] or null
  const u16* k_norm;     // [HEAD_DIM] or null
  u16* query;            // out [rows, heads, HEAD_DIM]
  u16* key;              // out [rows, kv_heads, HEAD_DIM]
  i32 rows, heads, kv_heads, row_stride, wide_position;
  float eps;
};

__device__ constexpr i32 power_of_two(i32 n) { return n <= 1 ? 1 : 2 * power_of_two((n + 1) / 2); }
constexpr i32 HALF = HEAD_DIM / 2;
constexpr i32 PIECES = HALF / 8;  // 16-byte pieces of half a head
constexpr i32 LANES = power_of_two(PIECES);
static_assert(HEAD_DIM % 16 == 0 && LANES <= 32, "half a head must be whole 16-byte pieces, at most 32");

__device__ __forceinline__ float2 rounded(float low, float high) { return unpack(pack(low, high)); }

// a * cos + b * sin, products and sum rounded.
__device__ __forceinline__ u32 turn(float2 a, float2 cos, float2 b, float2 sin) {
  const float2 left = rounded(a.x * cos.x, a.y * cos.y), right = rounded(b.x * sin.x, b.y * sin.y);
  return pack(left.x + right.x, left.y + right.y);
}

extern "C" __global__ void __launch_bounds__(THREADS) rope(const __grid_constant__ RopeParams p) {
  let_next_begin();
  const i32 unit = (blockIdx.x * THREADS + threadIdx.x) / LANES, piece = threadIdx.x % LANES;
  const i32 every = p.heads + p.kv_heads, row = unit / every, head = unit % every;
  const bool works = row < p.rows && piece < PIECES;
  const u16* norm = head < p.heads ? p.q_norm : p.k_norm;
  const int4 none = {0, 0, 0, 0};
  int4 factor[2] = {none, none}, x[2] = {none, none}, cos[2], sin[2];
#pragma unroll
  for (i32 half = 0; half < 2; ++half)
    if (works && norm) factor[half] = *(const int4*)(norm + half * HALF + piece * 8);
  wait_for_previous();
  i64 position = 0;
  if (works) position = p.wide_position ? ((const i64*)p.position)[row] : ((const i32*)p.position)[row];
#pragma unroll
  for (i32 half = 0; half < 2; ++half) {
    const i32 at = half * HALF + piece * 8;
    if (works) x[half] = *(const int4*)(p.qkv + (i64)row * p.row_stride + head * HEAD_DIM + at);
    cos[half] = works ? *(const int4*)(p.cos + position * HEAD_DIM + at) : none;
    sin[half] = works ? *(const int4*)(p.sin + position * HEAD_DIM + at) : none;
  }
  u32 (&words)[2][4] = (u32(&)[2][4])x;
  const u32 (&factors)[2][4] = (const u32(&)[2][4])factor;
  const u32 (&c)[2][4] = (const u32(&)[2][4])cos;
  const u32 (&s)[2][4] = (const u32(&)[2][4])sin;
  float squares = 0;
#pragma unroll
  for (i32 half = 0; half < 2; ++half)
#pragma unroll
    for (i32 i = 0; i < 4; ++i) {
      const float2 wide = unpack(words[half][i]);
      squares = fmaf(wide.x, wide.x, fmaf(wide.y, wide.y, squares));
    }
#pragma unroll
  for (i32 step = LANES / 2; step; step /= 2) squares += __shfl_xor_sync(~0u, squares, step);
  const float scale = rsqrtf(squares / (float)HEAD_DIM + p.eps);
  if (!works) return;
  int4 turned[2];
  u32 (&out)[2][4] = (u32(&)[2][4])turned;
#pragma unroll
  for (i32 i = 0; i < 4; ++i) {
    float2 low = unpack(words[0][i]), high = unpack(words[1][i]);
    if (norm) {
      const float2 by_low = unpack(factors[0][i]), by_high = unpack(factors[1][i]);
      low = rounded(low.x * scale, low.y * scale), high = rounded(high.x * scale, high.y * scale);
      low = rounded(low.x * by_low.x, low.y * by_low.y), high = rounded(high.x * by_high.x, high.y * by_high.y);
    }
    out[0][i] = turn(low, unpack(c[0][i]), float2{-high.x, -high.y}, unpack(s[0][i]));
    out[1][i] = turn(high, unpack(c[1][i]), low, unpack(s[1][i]));
  }
  u16* to = head < p.heads ? p.query + ((i64)row * p.heads + head) * HEAD_DIM
                           : p.key + ((i64)row * p.kv_heads + head - p.heads) * HEAD_DIM;
#pragma unroll
  for (i32 half = 0; half < 2; ++half) *(int4*)(to + half * HALF + piece * 8) = turned[half];
}
