// attend_latent for float32 and for sizes that fill no matrix product: plain multiply-adds, right rather than fast.
//
// The definition is the twin, kernels/attend_latent.py. A thread block serves one head of one row: the scores of all
// its tokens, their softmax, then each thread some of the output's numbers. Tokens that are not seen are never read.
//
// Compile-time: LATENT, ROPED, CODED (1: records are in eight bits), BLOCK_TOKENS, ELEMENT (of all else: 0 float32,
// 1 bfloat16, 2 float16), WARPS.

#include "elements.cuh"
#include "coded_records.cuh"
#include "tokens.cuh"
#include "attend_latent_params.cuh"

constexpr i32 THREADS = WARPS * 32;
constexpr i32 RECORD = LATENT + ROPED;
constexpr float UNSEEN = -3.0e38f;
static_assert(LATENT % 4 == 0, "the output is written four numbers at a time");

extern "C" __global__ void __launch_bounds__(THREADS) attend_latent_plain(const __grid_constant__ AttendLatentParams p) {
  extern __shared__ float score[];  // [top_k * BLOCK_TOKENS]
  __shared__ float query[RECORD], best[WARPS], weights[WARPS];
  wait_for_previous();
  let_next_begin();
  const i32 row = blockIdx.x / p.heads, warp = threadIdx.x / 32, inside = threadIdx.x % 32;
  if (row >= *p.real_rows) return;
  const i32 length = p.length[row], tokens = p.top_k * BLOCK_TOKENS;
  const i32* slots = p.slots + (i64)row * p.top_k;
  const i32* selected = p.selected + (i64)row * p.top_k;
  for (i32 i = threadIdx.x; i < RECORD; i += THREADS) query[i] = load(p.query, (i64)blockIdx.x * RECORD + i);
  __syncthreads();

  float highest = UNSEEN;
#pragma unroll 1
  for (i32 i = warp; i < tokens; i += WARPS) {
    const Token token(slots, selected, tokens, i);
    float sum = UNSEEN;
    if (token.seen(length)) {
      sum = 0;
#pragma unroll 4
      for (i32 d = inside; d < RECORD; d += 32) sum = fmaf(query[d], number_in(p.pool, token.record(), d), sum);
#pragma unroll
      for (i32 step = 16; step; step /= 2) sum += __shfl_xor_sync(~0u, sum, step);
      sum *= p.scaling;
    }
    highest = fmaxf(highest, sum);
    if (inside == 0) score[i] = sum;
  }
  if (inside == 0) best[warp] = highest;
  __syncthreads();
#pragma unroll
  for (i32 w = 0; w < WARPS; ++w) highest = fmaxf(highest, best[w]);

  float weight = 0;
#pragma unroll 1
  for (i32 i = threadIdx.x; i < tokens; i += THREADS) {
    score[i] = score[i] > UNSEEN ? expf(score[i] - highest) : 0;
    weight += score[i];
  }
#pragma unroll
  for (i32 step = 16; step; step /= 2) weight += __shfl_xor_sync(~0u, weight, step);
  if (inside == 0) weights[warp] = weight;
  __syncthreads();
  weight = 0;
#pragma unroll
  for (i32 w = 0; w < WARPS; ++w) weight += weights[w];

  if (p.lse && threadIdx.x == 0) p.lse[blockIdx.x] = weight > 0 ? highest + logf(weight) : NOTHING;
  const float share = weight > 0 ? 1 / weight : 0;
#pragma unroll 1
  for (i32 d = threadIdx.x * 4; d < LATENT; d += THREADS * 4) {
    float4 sum = {0, 0, 0, 0};
#pragma unroll 1
    for (i32 i = 0; i < tokens; ++i) {
      if (score[i] == 0) continue;
      const i64 record = Token(slots, selected, tokens, i).record();
      const auto number = [&](i32 i) { return number_in(p.pool, record, d + i); };
      sum.x = fmaf(score[i], number(0), sum.x), sum.y = fmaf(score[i], number(1), sum.y);
      sum.z = fmaf(score[i], number(2), sum.z), sum.w = fmaf(score[i], number(3), sum.w);
    }
    store_4(p.out, (i64)blockIdx.x * LATENT + d, {sum.x * share, sum.y * share, sum.z * share, sum.w * share});
  }
}
