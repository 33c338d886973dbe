// swiglu: silu(gate) * up of each row, out of one product that holds both. One thread, eight neighbours.
//
// The definition is the twin, kernels/linear.py (swiglu); this rounds where it rounds. Knows rows of numbers only.
//
// Compile-time: ELEMENT (1 bfloat16, 2 float16), THREADS.

#include "elements.cuh"

struct SwigluParams {
  const int4* both;  // [rows, 2 * size]: the gate, then up
  int4* out;         // [rows, size]
  u32 pieces;        // 16-byte pieces of `out`
  u32 row;           // pieces of a row of `out`
};

extern "C" __global__ void __launch_bounds__(THREADS) swiglu(const __grid_constant__ SwigluParams p) {
  const u32 at = blockIdx.x * THREADS + threadIdx.x;
  if (at >= p.pieces) return;
  const size_t from = at + (size_t)(at / p.row) * p.row;
  int4 gate = p.both[from];
  const int4 up = p.both[from + p.row];
  u32* own = (u32*)&gate;
  const u32* other = (const u32*)&up;
#pragma unroll
  for (i32 i = 0; i < 4; ++i) {
    const float2 x = unpack(own[i]), by = unpack(other[i]);
    // A float's last bits do not outlive the rounding: the quick exponential and division do.
    const float2 silu = unpack(pack(__fdividef(x.x, 1.0f + __expf(-x.x)), __fdividef(x.y, 1.0f + __expf(-x.y))));
    own[i] = pack(silu.x * by.x, silu.y * by.y);
  }
  p.out[at] = gate;
}
