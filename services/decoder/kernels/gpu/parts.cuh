// How the parts of one softmax meet.
//
// A part has seen some of the tokens. For each of its rows (queries) it holds the highest score, in powers of
// two; the weight, the sum of exp2(score - highest); and the sum of the values under those weights. Parts are
// always merged in the same order: the result depends on how the tokens were split, never on what ended first.
// First the warps of a thread block meet, then the thread blocks of a cluster, each of which merges a slice of
// the output, then the clusters of a unit, through global memory: whichever of them ends last does that.
// CLUSTER, the thread blocks of a cluster, must be defined before; 1 where there are none (before sm_90).

constexpr float LOWEST = -3.0e38f;  // the score of nothing; infinity minus itself would be no number

template <i32 ROWS, i32 DIM>
struct alignas(16) Part {
  float sum[ROWS][DIM + 4];  // + 4: neighbouring rows lie in other banks
  float top[ROWS], weight[ROWS];
};

template <i32 N>
struct Batch {  // the same row and four dims of N parts
  float top[N], weight[N];
  float4 sum[N];
};

struct Merged {
  float top = LOWEST, weight = 0;
  float4 sum = {0, 0, 0, 0};

  template <i32 N>
  __device__ __forceinline__ void add(const Batch<N>& parts) {
    float highest = top;
#pragma unroll
    for (i32 n = 0; n < N; ++n) highest = fmaxf(highest, parts.top[n]);
    const float fade = exp2f(top - highest);
    top = highest, weight *= fade;
    sum = {sum.x * fade, sum.y * fade, sum.z * fade, sum.w * fade};
#pragma unroll
    for (i32 n = 0; n < N; ++n) {
      const float scale = exp2f(parts.top[n] - highest);
      weight += parts.weight[n] * scale;
      sum.x += parts.sum[n].x * scale;
      sum.y += parts.sum[n].y * scale;
      sum.z += parts.sum[n].z * scale;
      sum.w += parts.sum[n].w * scale;
    }
  }

  __device__ __forceinline__ float4 mean() const {
    const float share = 1 / weight;
    return {sum.x * share, sum.y * share, sum.z * share, sum.w * share};
  }
};

// Calls use(row, dim, merged) for every fourth dim of the parts, which lie `stride` bytes apart in shared memory.
template <i32 PARTS, i32 ROWS, i32 DIM, i32 THREADS, typename Use>
__device__ __forceinline__ void merge_warps(const char* parts, i32 stride, Use use) {
  __syncthreads();
  for (i32 i = threadIdx.x; i < ROWS * DIM / 4; i += THREADS) {
    const i32 row = i / (DIM / 4), dim = i % (DIM / 4) * 4;
    Batch<PARTS> batch;
#pragma unroll
    for (i32 n = 0; n < PARTS; ++n) {
      const Part<ROWS, DIM>& part = *(const Part<ROWS, DIM>*)(parts + n * stride);
      batch.top[n] = part.top[row], batch.weight[n] = part.weight[row];
      batch.sum[n] = *(const float4*)&part.sum[row][dim];
    }
    Merged merged;
    merged.add(batch);
    use(row, dim, merged);
  }
}

__device__ __forceinline__ void meet_cluster() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
}

__device__ __forceinline__ float4 load_4_of(u32 rank, u32 address) {
  float4 got = {0, 0, 0, 0};
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "{.reg .u32 there; mapa.shared::cluster.u32 there, %4, %5; ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [there];}"
      : "=f"(got.x), "=f"(got.y), "=f"(got.z), "=f"(got.w)
      : "r"(address), "r"(rank));
#endif
  return got;
}

__device__ __forceinline__ float load_of(u32 rank, u32 address) {
  float got = 0;
#if __CUDA_ARCH__ >= 900
  asm volatile("{.reg .u32 there; mapa.shared::cluster.u32 there, %1, %2; ld.shared::cluster.f32 %0, [there];}"
               : "=f"(got)
               : "r"(address), "r"(rank));
#endif
  return got;
}

// Merges the parts of a unit's `splits` thread blocks, CLUSTER of them a cluster; consecutive blocks are a unit.
// use(row, dim, merged) is called once for every fourth dim, by one thread of one of the blocks.
//   sums     [splits / CLUSTER][ROWS][DIM] of this unit
//   stats    [splits][ROWS] tops and weights of this unit
//   arrived  [CLUSTER] of this unit, zero between launches
template <i32 ROWS, i32 DIM, i32 THREADS, typename Use>
__device__ __forceinline__ void merge_blocks(
    const Part<ROWS, DIM>& own, float* sums, float2* stats, u32* arrived, i32 splits, Use use) {
  constexpr i32 SLICE = (ROWS * DIM / 4 + CLUSTER - 1) / CLUSTER, AT_ONCE = 8;
  const i32 rank = blockIdx.x % CLUSTER, group = blockIdx.x % splits / CLUSTER, groups = splits / CLUSTER;
  const i32 first = rank * SLICE, last = min(ROWS * DIM / 4, first + SLICE);
  if (CLUSTER > 1) meet_cluster();
  else __syncthreads();
  for (i32 i = first + threadIdx.x; i < last; i += THREADS) {
    const i32 row = i / (DIM / 4), dim = i % (DIM / 4) * 4;
    Merged merged;
    if (CLUSTER == 1) {
      merged.top = own.top[row], merged.weight = own.weight[row], merged.sum = *(const float4*)&own.sum[row][dim];
    } else {
      const u32 sum = shared_address(&own.sum[row][dim]), top = shared_address(&own.top[row]);
      const u32 weight = shared_address(&own.weight[row]);
      Batch<CLUSTER> batch;
#pragma unroll
      for (i32 n = 0; n < CLUSTER; ++n) {
        batch.top[n] = load_of(n, top), batch.weight[n] = load_of(n, weight), batch.sum[n] = load_4_of(n, sum);
      }
      merged.add(batch);
    }
    if (groups == 1) {
      use(row, dim, merged);
    } else {
      *(float4*)&sums[((i64)group * ROWS + row) * DIM + dim] = merged.sum;
      if (dim == 0 || i == first) stats[(group * CLUSTER + rank) * ROWS + row] = {merged.top, merged.weight};
    }
  }
  if (CLUSTER > 1) meet_cluster();  // nobody may leave while others read its part
  if (groups == 1) return;

  __shared__ bool is_last;
  __syncthreads();
  if (threadIdx.x == 0) {
    __threadfence();
    is_last = atomicAdd(&arrived[rank], 1) == (u32)groups - 1;
    if (is_last) arrived[rank] = 0;
    __threadfence();
  }
  __syncthreads();
  if (!is_last) return;
  for (i32 i = first + threadIdx.x; i < last; i += THREADS) {
    const i32 row = i / (DIM / 4), dim = i % (DIM / 4) * 4;
    Merged merged;
    for (i32 base = 0; base < groups; base += AT_ONCE) {
      Batch<AT_ONCE> batch;
#pragma unroll
      for (i32 n = 0; n < AT_ONCE; ++n) {
        const i32 part = min(base + n, groups - 1);
        const float2 stat = __ldcg(&stats[(part * CLUSTER + rank) * ROWS + row]);
        batch.top[n] = base + n < groups ? stat.x : LOWEST;
        batch.weight[n] = base + n < groups ? stat.y : 0;
        batch.sum[n] = __ldcg((const float4*)&sums[((i64)part * ROWS + row) * DIM + dim]);
      }
      merged.add(batch);
    }
    use(row, dim, merged);
  }
}
