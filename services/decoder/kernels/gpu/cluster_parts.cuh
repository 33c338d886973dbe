// How the parts of the thread blocks of a cluster meet: each block merges a slice of the output, which it reads from
// the shared memory of all. CLUSTER must be defined before; 1 where there are none (before sm_90).

__device__ __forceinline__ void meet_cluster() {
#if __CUDA_ARCH__ >= 900
  if (CLUSTER > 1) {
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
    return;
  }
#endif
  __syncthreads();
}

// 4 or 1 floats at `address` of the shared memory of the cluster's block `rank`.
__device__ __forceinline__ float4 load_4_of(i32 rank, u32 address) {
  float4 got = {0, 0, 0, 0};
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "{.reg .u32 there; mapa.shared::cluster.u32 there, %4, %5; ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [there];}"
      : "=f"(got.x), "=f"(got.y), "=f"(got.z), "=f"(got.w)
      : "r"(address), "r"(rank)
      : "memory");
#endif
  return got;
}

__device__ __forceinline__ float load_of(i32 rank, u32 address) {
  float got = 0;
#if __CUDA_ARCH__ >= 900
  asm volatile("{.reg .u32 there; mapa.shared::cluster.u32 there, %1, %2; ld.shared::cluster.f32 %0, [there];}"
               : "=f"(got)
               : "r"(address), "r"(rank)
               : "memory");
#endif
  return got;
}

// Calls use(row, dim, merged) for the four dims from `first` on, the next four, and so on until `last`, counted in
// floats. The whole cluster calls it, each block with its slice, and may write to its part when it returns.
template <i32 ROWS, i32 DIM, i32 THREADS, typename Use>
__device__ __forceinline__ void merge_cluster(const Part<ROWS, DIM>& own, i32 first, i32 last, Use use) {
  meet_cluster();
  for (i32 i = first + threadIdx.x * 4; i < last; i += THREADS * 4) {
    const i32 row = i / DIM, dim = i % DIM;
    const float *sum = &own.sum[row][dim], *top = &own.top[row], *weight = &own.weight[row];
    Merged merged;
    if (CLUSTER == 1) {
      merged.top = *top, merged.weight = *weight, merged.sum = *(const float4*)sum;
    } else {
      Batch<CLUSTER> batch;
#pragma unroll
      for (i32 n = 0; n < CLUSTER; ++n) {
        batch.top[n] = load_of(n, shared_address(top)), batch.weight[n] = load_of(n, shared_address(weight));
        batch.sum[n] = load_4_of(n, shared_address(sum));
      }
      merged.add(batch);
    }
    use(row, dim, merged);
  }
  meet_cluster();
}
