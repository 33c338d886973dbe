// fill_bounds: the bounds of every block that a run of a prompt touches, from all its keys.
//
// The definition is the twin, kernels/bounds.py (fill_bounds). Knows one layer's keys, no records.
// A thread makes the two bounds of one 16-byte piece of one head in one block.
//
// Compile-time: KV_HEADS, HEAD_BYTES (of one head, multiple of 16), BLOCK_TOKENS, ELEMENT (0 float32, 1 bfloat16,
// 2 float16), THREADS.

#include "widest.cuh"

struct FillBoundsParams {
  const char* key;   // [tokens, KV_HEADS, HEAD_BYTES], tokens key_stride bytes apart
  const i64* block;  // [blocks] where each block's bounds lie
  int4* bounds;      // [all blocks, KV_HEADS, 2, HEAD_BYTES]
  i64 key_stride;
  i32 tokens, blocks;
};

constexpr i32 HEAD = HEAD_BYTES / 16;
static_assert(HEAD * 16 == HEAD_BYTES, "a head must be whole 16-byte pieces");

extern "C" __global__ void __launch_bounds__(THREADS) fill_bounds(const __grid_constant__ FillBoundsParams p) {
  const i32 at = (i32)blockIdx.x * THREADS + threadIdx.x, number = at / (KV_HEADS * HEAD), in_row = at % (KV_HEADS * HEAD);
  if (number >= p.blocks) return;
  const i32 first = number * BLOCK_TOKENS, count = min(BLOCK_TOKENS, p.tokens - first);
  const char* from = p.key + first * p.key_stride + in_row * 16;
  int4 up = *(const int4*)from, down = minus(up);
#pragma unroll 4
  for (i32 token = 1; token < count; ++token) {
    const int4 key = *(const int4*)(from + token * p.key_stride);
    up = larger(up, key), down = larger(down, minus(key));
  }
  int4* to = p.bounds + ((p.block[number] * KV_HEADS + in_row / HEAD) * 2) * HEAD + in_row % HEAD;
  to[0] = up, to[HEAD] = down;
}
