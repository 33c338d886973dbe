// attend for float32: the same as attend.cu with plain multiply-adds, right rather than fast.
//
// The definition is the twin, kernels/attend.py (attend_slots). LANES threads of a warp hold one token; a warp
// takes STRIDE tokens at a time. Tokens that are not seen are never read.
//
// Compile-time: HEAD_DIM, GROUP_SIZE, BLOCK_TOKENS, ELEMENT (0), WARPS, WINDOW.

#include "elements.cuh"
#include "parts.cuh"
#include "tokens.cuh"
#include "attend_params.cuh"

constexpr i32 VECTORS = HEAD_DIM / 4;  // 16-byte loads of one key
__device__ constexpr i32 power_of_two(i32 n) { return n <= 1 ? 1 : 2 * power_of_two((n + 1) / 2); }
constexpr i32 LANES = power_of_two(VECTORS) < 32 ? power_of_two(VECTORS) : 32;  // threads of one token
constexpr i32 LOADS = (VECTORS + LANES - 1) / LANES;                           // of each of them
constexpr i32 STRIDE = 32 / LANES;                                             // tokens of a warp at a time
using Own = Part<GROUP_SIZE, HEAD_DIM>;
static_assert(ELEMENT == 0 && HEAD_DIM % 4 == 0, "a key must be whole 16-byte loads of float32");

__device__ __forceinline__ void load(float4 (&to)[LOADS], const float* from, i32 part) {
#pragma unroll
  for (i32 l = 0; l < LOADS; ++l) {
    const i32 v = l * LANES + part;
    to[l] = v < VECTORS ? *(const float4*)(from + v * 4) : float4{0, 0, 0, 0};
  }
}

struct Softmax {
  float4 sum[GROUP_SIZE][LOADS] = {};
  float top[GROUP_SIZE], weight[GROUP_SIZE] = {};

  __device__ __forceinline__ Softmax() {
#pragma unroll
    for (i32 g = 0; g < GROUP_SIZE; ++g) top[g] = LOWEST;
  }

  // Takes in the token of LANES neighbouring threads. `scale` is in powers of two.
  __device__ __forceinline__ void add(
      const float4 (&query)[GROUP_SIZE][LOADS], const float4 (&key)[LOADS], const float4 (&value)[LOADS], float scale) {
    const u32 together = LANES == 32 ? ~0u : ((1u << LANES % 32) - 1) << threadIdx.x % 32 / LANES * LANES;
#pragma unroll
    for (i32 g = 0; g < GROUP_SIZE; ++g) {
      float score = 0;
#pragma unroll
      for (i32 l = 0; l < LOADS; ++l) {
        score += query[g][l].x * key[l].x + query[g][l].y * key[l].y;
        score += query[g][l].z * key[l].z + query[g][l].w * key[l].w;
      }
#pragma unroll
      for (i32 step = LANES / 2; step; step /= 2) score += __shfl_xor_sync(together, score, step);
      score *= scale;
      const float highest = fmaxf(top[g], score), fade = exp2f(top[g] - highest), mine = exp2f(score - highest);
      top[g] = highest;
      weight[g] = weight[g] * fade + mine;
#pragma unroll
      for (i32 l = 0; l < LOADS; ++l) {
        sum[g][l].x = sum[g][l].x * fade + value[l].x * mine;
        sum[g][l].y = sum[g][l].y * fade + value[l].y * mine;
        sum[g][l].z = sum[g][l].z * fade + value[l].z * mine;
        sum[g][l].w = sum[g][l].w * fade + value[l].w * mine;
      }
    }
  }

  __device__ __forceinline__ void write(Own& to) const {
    const i32 part = threadIdx.x % LANES;
#pragma unroll
    for (i32 g = 0; g < GROUP_SIZE; ++g) {
      if (part == 0) to.top[g] = top[g], to.weight[g] = weight[g];
#pragma unroll
      for (i32 l = 0; l < LOADS; ++l)
        if (l * LANES + part < VECTORS) *(float4*)&to.sum[g][(l * LANES + part) * 4] = sum[g][l];
    }
  }
};

extern "C" __global__ void __launch_bounds__(WARPS * 32) attend_plain(const __grid_constant__ AttendParams p) {
  extern __shared__ __align__(16) char shared[];  // a part for every token that is worked on at once
  Own* parts = (Own*)shared;
  const i32 walker = threadIdx.x / LANES, part = threadIdx.x % LANES;
  wait_for_previous();
  let_next_begin();
  const i32 real_items = p.real_items();
  for (i32 item = blockIdx.x; item < real_items; item += gridDim.x) {
    const Place place(p, item);
    const i32 length = p.length[place.row];
    float4 query[GROUP_SIZE][LOADS];
#pragma unroll
    for (i32 g = 0; g < GROUP_SIZE; ++g) load(query[g], (const float*)p.query + query_of(place.unit) + g * HEAD_DIM, part);
    Softmax softmax;
    for (i32 i = walker; i < place.tokens; i += WARPS * STRIDE) {
      const Token token = place.token(i);
      if (!is_seen(token, length)) continue;
      const float* from = (const float*)((const char*)p.pool + key_of(p, token, place.head));
      float4 key[LOADS], value[LOADS];
      load(key, from, part);
      load(value, from + p.heads * HEAD_DIM, part);
      softmax.add(query, key, value, p.scaling * 1.44269504f);  // log2(e)
    }
    softmax.write(parts[walker]);
    finish<WARPS * STRIDE, WARPS * 32>(p, item, parts);
  }
}
