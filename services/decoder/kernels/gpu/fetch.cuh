// What resolve and replay share: reading host memory, and the figures of a layer.

enum Counter { CHOSEN, HITS, MISSES, EVICTIONS, FETCHED_BYTES, NANOSECONDS };

// Host memory through the bus: volatile, so that nothing an earlier launch wrote is served from a cache line.
__device__ __forceinline__ int4 load_host(const int4* from) {
  int4 value;
  asm volatile("ld.volatile.global.v4.s32 {%0,%1,%2,%3}, [%4];"
               : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
               : "l"(from));
  return value;
}

__device__ __forceinline__ u64 nanoseconds() {
  u64 now;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
  return now;
}

// Adds the time since `begun` to NANOSECONDS, without what other thread blocks have counted of it already: the
// waits of a launch overlap, and the launch is late by their union. `waited_until` is where the counted time ends.
__device__ __forceinline__ void count_wait(u64* counters, u64* waited_until, u64 begun) {
  const u64 ended = nanoseconds(), counted = atomicMax(waited_until, ended);
  if (ended > counted) atomicAdd(&counters[NANOSECONDS], ended - max(begun, counted));
}
