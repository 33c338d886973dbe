// How the parts of one softmax meet.
//
// A part has seen some of the tokens. For each of its rows (queries) it holds the highest score, in powers of
// two; the weight, the sum of exp2(score - highest); and the sum of the values under those weights. Parts are
// always merged in the same order: the result depends on how the tokens were split, never on what ended first.
// Warps meet in shared memory, thread blocks of a cluster in each other's (each merges a slice of the output), all
// others in global memory, where whichever ends last merges.

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

// Calls use(row, dim, merged) for every fourth dim of the warps' parts. The whole thread block calls it, and may
// write to the parts again when it returns.
template <i32 PARTS, i32 ROWS, i32 DIM, i32 THREADS, typename Use>
__device__ __forceinline__ void merge_warps(const Part<ROWS, DIM>* parts, Use use) {
  __syncthreads();
  for (i32 i = threadIdx.x; i < ROWS * DIM / 4; i += THREADS) {
    const i32 row = i / (DIM / 4), dim = i % (DIM / 4) * 4;
    Batch<PARTS> batch;
#pragma unroll
    for (i32 n = 0; n < PARTS; ++n) {
      batch.top[n] = parts[n].top[row], batch.weight[n] = parts[n].weight[row];
      batch.sum[n] = *(const float4*)&parts[n].sum[row][dim];
    }
    Merged merged;
    merged.add(batch);
    use(row, dim, merged);
  }
  __syncthreads();
}

// Where the parts that several thread blocks have of the same rows and dims meet.
template <i32 ROWS, i32 DIM>
struct Meeting {
  float* sums;    // [parts][ROWS][DIM]
  float2* stats;  // [parts][ROWS] top and weight
  u32* arrived;   // zero between launches
  i32 parts;

  __device__ __forceinline__ void put(i32 part, i32 row, i32 dim, const Merged& merged) const {
    *(float4*)&sums[((i64)part * ROWS + row) * DIM + dim] = merged.sum;
    stats[part * ROWS + row] = {merged.top, merged.weight};
  }

  // Once the thread block has put its part and met (__syncthreads), all of it calls this; the last to do so calls
  // use(row, dim, merged) for the four dims from `first` on, the next four, and so on until `last`, in floats.
  template <i32 THREADS, typename Use>
  __device__ __forceinline__ void close(i32 first, i32 last, Use use) const {
    constexpr i32 AT_ONCE = 8;
    __shared__ bool is_last;
    if (threadIdx.x == 0) {
      u32 before;  // whoever reads the count also sees what those who raised it have put
      asm volatile("atom.add.acq_rel.gpu.global.u32 %0, [%1], 1;" : "=r"(before) : "l"(arrived) : "memory");
      is_last = before == (u32)parts - 1;
      if (is_last) *arrived = 0;
    }
    __syncthreads();
    if (!is_last) return;
    for (i32 i = first + threadIdx.x * 4; i < last; i += THREADS * 4) {
      const i32 row = i / DIM, dim = i % DIM;
      Merged merged;
      for (i32 base = 0; base < parts; base += AT_ONCE) {
        Batch<AT_ONCE> batch;
#pragma unroll
        for (i32 n = 0; n < AT_ONCE; ++n) {
          const i32 part = min(base + n, parts - 1);
          const float2 stat = __ldcg(&stats[part * ROWS + row]);
          batch.top[n] = base + n < parts ? stat.x : LOWEST;
          batch.weight[n] = base + n < parts ? stat.y : 0;
          batch.sum[n] = __ldcg((const float4*)&sums[((i64)part * ROWS + row) * DIM + dim]);
        }
        merged.add(batch);
      }
      use(row, dim, merged);
    }
  }
};
