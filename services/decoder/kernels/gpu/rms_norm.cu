// rms_norm: RMSNorm of each row, with a residual sum before it where there is one. One thread block a row.
//
// The definition is the twin, kernels/norm.py; this rounds where it rounds. Knows rows of numbers only.
//
// Compile-time: ELEMENT (1 bfloat16, 2 float16), THREADS (multiple of 32), VECTORS (16-byte loads of a thread;
// THREADS * VECTORS * 8 >= size).

#include "elements.cuh"

struct NormParams {
  const int4* x;       // [rows, size]
  const int4* delta;   // [rows, size] or null
  const int4* weight;  // [size]
  int4* total;         // out [rows, size]: x + delta; unused without delta
  int4* out;           // [rows, size]
  i32 size;            // a multiple of 8
  float eps;
};

constexpr i32 WARPS = THREADS / 32;

__shared__ float warp_sums[WARPS];

extern "C" __global__ void __launch_bounds__(THREADS) rms_norm(const __grid_constant__ NormParams p) {
  let_next_begin();
  const i32 pieces = p.size / 8;
  const i64 row = (i64)blockIdx.x * pieces;
  int4 weight[VECTORS], x[VECTORS];
#pragma unroll
  for (i32 v = 0; v < VECTORS; ++v) {
    const i32 at = v * THREADS + threadIdx.x;
    weight[v] = at < pieces ? p.weight[at] : int4{0, 0, 0, 0};
  }
  wait_for_previous();
  int4 delta[VECTORS];
#pragma unroll
  for (i32 v = 0; v < VECTORS; ++v) {
    const i32 at = v * THREADS + threadIdx.x;
    x[v] = at < pieces ? p.x[row + at] : int4{0, 0, 0, 0};
    delta[v] = at < pieces && p.delta ? p.delta[row + at] : int4{0, 0, 0, 0};
  }
  float squares = 0;
#pragma unroll
  for (i32 v = 0; v < VECTORS; ++v) {
    u32* own = (u32*)&x[v];
    const u32* other = (const u32*)&delta[v];
#pragma unroll
    for (i32 i = 0; i < 4; ++i) {
      float2 wide = unpack(own[i]);
      if (p.delta) {
        const float2 more = unpack(other[i]);
        own[i] = pack(wide.x + more.x, wide.y + more.y);
        wide = unpack(own[i]);
      }
      squares = fmaf(wide.x, wide.x, fmaf(wide.y, wide.y, squares));
    }
    const i32 at = v * THREADS + threadIdx.x;
    if (p.delta && at < pieces) p.total[row + at] = x[v];
  }
#pragma unroll
  for (i32 step = 16; step; step /= 2) squares += __shfl_xor_sync(~0u, squares, step);
  if (threadIdx.x % 32 == 0) warp_sums[threadIdx.x / 32] = squares;
  __syncthreads();
  float sum = 0;
#pragma unroll
  for (i32 w = 0; w < WARPS; ++w) sum += warp_sums[w];
  const float scale = rsqrtf(sum / (float)p.size + p.eps);
#pragma unroll
  for (i32 v = 0; v < VECTORS; ++v) {
    u32* own = (u32*)&x[v];
    const u32* by = (const u32*)&weight[v];
#pragma unroll
    for (i32 i = 0; i < 4; ++i) {
      const float2 wide = unpack(own[i]), factor = unpack(by[i]);
      const float2 scaled = unpack(pack(wide.x * scale, wide.y * scale));
      own[i] = pack(scaled.x * factor.x, scaled.y * factor.y);
    }
    const i32 at = v * THREADS + threadIdx.x;
    if (at < pieces) p.out[row + at] = x[v];
  }
}
