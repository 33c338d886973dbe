// score_tokens for float32 and for sizes that fill no matrix product: plain multiply-adds, right rather than fast.
//
// The definition is the twin, kernels/choose_tokens.py (score_tokens). A thread scores one token.
//
// Compile-time: CODED (1: coded_keys.cuh), DIM (of whole 16-byte pieces), HEADS, TOP_K, PAGE_TOKENS, ELEMENT (0 float32, 1 bfloat16, 2 float16),
// THREADS.

#include "elements.cuh"

constexpr i32 TILE = THREADS;
#include "token_items.cuh"
#include "sort_key.cuh"
#include "coded_keys.cuh"

__device__ __forceinline__ float at(const void* numbers, i64 i) {
  if (ELEMENT == 0) return ((const float*)numbers)[i];
  return unpack(((const u16*)numbers)[i]).x;
}

extern "C" __global__ void __launch_bounds__(THREADS) score_tokens_plain(const __grid_constant__ ScoreParams p) {
  extern __shared__ float heads[];  // [HEADS, DIM]
  wait_for_previous();
  let_next_begin();
  Walk walk(p);
  const i64 items = walk.items();
  i64 item = items * blockIdx.x / gridDim.x;
  const i64 last = items * (blockIdx.x + 1) / gridDim.x;
  if (item < last) walk.go_to(item);
  i32 query = -1;
#pragma unroll 1
  for (; item < last; ++item, walk.go_on()) {
    if (!walk.is_scored()) continue;
    if (walk.query != query) {
      query = walk.query;
      __syncthreads();
      for (i32 i = threadIdx.x; i < HEADS * DIM; i += THREADS) heads[i] = at(p.query, (i64)query * HEADS * DIM + i);
      __syncthreads();
    }
    const i32 token = walk.tile * TILE + threadIdx.x;
    if (token >= walk.seen_by(query)) continue;
    const char* entry = (const char*)p.entries + walk.entry(token) * ENTRY_BYTES;
    const auto number = [&](i32 d) {
      if (CODED) return unpack(widen(((const unsigned char*)entry)[d], 0)).x;
      return at(entry, d);
    };
    float sum = 0;
#pragma unroll 1
    for (i32 head = 0; head < HEADS; ++head) {
      float product = 0;
#pragma unroll 4
      for (i32 d = 0; d < DIM; ++d) product = fmaf(heads[head * DIM + d], number(d), product);
      sum = fmaf(p.weight[(i64)query * HEADS + head], fmaxf(product, 0.f), sum);
    }
    p.scores[(i64)query * p.pitch + token] = to_key(CODED ? sum * scale_of(entry) : sum);
  }
}
