// replay: the fetches of another layer's resolve, done again with this layer's bytes. Copies, and nothing else.
//
// The definition is the twin, kernels/replay.py. The grid is small and does not depend on the batch: with few
// lanes several thread blocks share one, with many each takes several in turn.
//
// Compile-time: BLOCK_BYTES (multiple of 16), THREADS, DEPTH (loads of a thread in flight), SKIP_IO (benchmark
// probe: no bytes move).

#include "fetch.cuh"

struct ReplayParams {
  const i32* source;  // [lanes, top_k] blocks in the arena
  const i32* target;  // [lanes, top_k] pool slots
  const i32* count;   // [lanes] fetches; 0 for padding
  const int4* arena;  // this layer's blocks in host memory
  int4* pool;         // this layer's hot slots
  u64* counters;      // [6] as resolve's; misses and fetched bytes are added to
  u64* waited_until;  // [1] end of the waiting that is counted already; null = time is not counted
  i32 lanes, top_k;
};

constexpr i32 CHUNKS = BLOCK_BYTES / 16;  // 16-byte pieces of a block

extern "C" __global__ void __launch_bounds__(THREADS) replay(const __grid_constant__ ReplayParams p) {
  wait_for_previous();
  let_next_begin();
  const u64 begun = nanoseconds();
  const i32 sharers = max(1, (i32)gridDim.x / p.lanes);  // thread blocks of one lane
  const i32 part = (i32)blockIdx.x / p.lanes;
  if (part >= sharers) return;
  bool waited = false;
  for (i32 lane = (i32)blockIdx.x % p.lanes; lane < p.lanes; lane += gridDim.x) {
    const i32 count = p.count[lane];
    const i32* source = p.source + (size_t)lane * p.top_k;
    const i32* target = p.target + (size_t)lane * p.top_k;
    const i32 total = SKIP_IO ? 0 : count * CHUNKS, workers = sharers * THREADS;
    for (i32 base = part * THREADS + threadIdx.x; base < total; base += DEPTH * workers) {
      int4 piece[DEPTH];
#pragma unroll
      for (i32 d = 0; d < DEPTH; ++d) {
        const i32 c = base + d * workers;
        if (c < total) piece[d] = load_host(p.arena + (size_t)source[c / CHUNKS] * CHUNKS + c % CHUNKS);
      }
#pragma unroll
      for (i32 d = 0; d < DEPTH; ++d) {
        const i32 c = base + d * workers;
        if (c < total) p.pool[(size_t)target[c / CHUNKS] * CHUNKS + c % CHUNKS] = piece[d];
      }
    }
    waited = waited || count > 0;
    if (part == 0 && threadIdx.x == 0 && count > 0) {
      atomicAdd(&p.counters[MISSES], (u64)count);
      atomicAdd(&p.counters[FETCHED_BYTES], (u64)count * BLOCK_BYTES);
    }
  }
  if (threadIdx.x == 0 && waited && p.waited_until) count_wait(p.counters, p.waited_until, begun);
}
