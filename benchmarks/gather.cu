// The roof beside resolve: the same records, source and destination known beforehand, nothing decided.
struct GatherParams {
  const int* source;       // [records] block in the arena
  const int* destination;  // [records] block in the pool
  const int4* arena;
  int4* pool;
  int records;
};

extern "C" __global__ void __launch_bounds__(THREADS) gather(const __grid_constant__ GatherParams p) {
  wait_for_previous();
  let_next_begin();
  constexpr int CHUNKS = BLOCK_BYTES / 16;
  const long long total = (long long)p.records * CHUNKS;
  const long long workers = (long long)gridDim.x * THREADS;
  for (long long base = (long long)blockIdx.x * THREADS + threadIdx.x; base < total; base += DEPTH * workers) {
    int4 piece[DEPTH];
#pragma unroll
    for (int d = 0; d < DEPTH; ++d) {
      const long long c = base + d * workers;
      if (c < total) {
        const int4* from = p.arena + (long long)p.source[c / CHUNKS] * CHUNKS + c % CHUNKS;
        asm volatile("ld.volatile.global.v4.s32 {%0,%1,%2,%3}, [%4];"
                     : "=r"(piece[d].x), "=r"(piece[d].y), "=r"(piece[d].z), "=r"(piece[d].w)
                     : "l"(from));
      }
    }
#pragma unroll
    for (int d = 0; d < DEPTH; ++d) {
      const long long c = base + d * workers;
      if (c < total) p.pool[(long long)p.destination[c / CHUNKS] * CHUNKS + c % CHUNKS] = piece[d];
    }
  }
}
