// pick_tokens: of each query's scored tokens the TOP_K best, ascending; of equals the first.
//
// The definition is the twin, kernels/choose_tokens.py, but for the order. A thread block serves one query. A query
// that sees no more than TOP_K tokens takes every one; nothing was scored for it.
//
// Compile-time: TOP_K, THREADS (a power of two).

constexpr i32 PICKED = TOP_K;
#include "pick.cuh"

struct PickParams {
  const u32* scores;     // [queries, pitch]
  const i32* length;     // [queries] tokens that each query sees; null: query i sees first + i + 1
  const i32* real_rows;  // [1] queries that are not padding; null: all
  i32* chosen;           // out [queries, width] tokens, -1 = none; padding is left alone
  i32 first, pitch;
  i32 width;             // at most TOP_K, and less only where no query sees more than `width` tokens
};

extern "C" __global__ void __launch_bounds__(THREADS) pick_tokens(const __grid_constant__ PickParams p) {
  bins[threadIdx.x] = int4{0, 0, 0, 0};
  wait_for_previous();
  let_next_begin();
  const i32 query = blockIdx.x;
  if (p.real_rows && query >= *p.real_rows) return;
  const i32 seen = p.length ? p.length[query] : p.first + query + 1;
  i32* out = p.chosen + (i64)query * p.width;
  if (seen > TOP_K) {
    pick(p.scores + (i64)query * p.pitch, seen, out);
    return;
  }
#pragma unroll 1
  for (i32 j = threadIdx.x; j < p.width; j += THREADS) out[j] = j < seen ? j : -1;
}
