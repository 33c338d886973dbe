// score_tokens: DSA's scores of tokens, for 16-bit types: the sum over heads of weight * relu(query . key).
//
// The definition is the twin, kernels/choose_tokens.py (score_tokens). Knows index queries and keys, not who attends
// to what. Every warp holds the keys of KEYS tokens in registers and multiplies the heads of one query after the
// other with them. A score is added up in the same order whatever else is in the launch.
//
// Keys and queries pass into the matrix products eight neighbouring numbers a thread: the products run over the
// numbers in another sequence than memory has, the same for both sides, which saves every shuffle.
//
// Coded keys become float16 on the way, exactly; a key's scale is multiplied with its score.
//
// Compile-time: CODED (1: coded_keys.cuh), DIM (multiple of 32), HEADS (multiple of 16), TOP_K, PAGE_TOKENS, ELEMENT (1 bfloat16, 2 float16),
// WARPS, KEYS (of a warp, multiple of 8).

#include "elements.cuh"
#include "tensor_cores.cuh"

constexpr i32 THREADS = WARPS * 32;
constexpr i32 TILE = WARPS * KEYS;
#include "token_items.cuh"
#include "sort_key.cuh"
#include "coded_keys.cuh"

constexpr i32 SPANS = DIM / 32;         // stretches of 32 numbers: 8 of each of 4 threads
constexpr i32 COLUMNS = KEYS / 8;       // groups of 8 tokens of a warp
constexpr i32 ROW = DIM * 2 + 64;       // bytes of a head in shared memory: neighbours lie in other banks
static_assert(SPANS * 32 == DIM && HEADS % 16 == 0 && COLUMNS * 8 == KEYS, "whole matrix products");

extern "C" __global__ void __launch_bounds__(THREADS) score_tokens(const __grid_constant__ ScoreParams p) {
  __shared__ __align__(16) char heads[HEADS * ROW];
  __shared__ float weight[HEADS];
  wait_for_previous();
  let_next_begin();
  const i32 warp = threadIdx.x / 32, inside = threadIdx.x % 32, g = inside / 4, t = inside % 4;
  Walk walk(p);
  const i64 items = walk.items();
  i64 item = items * blockIdx.x / gridDim.x;
  const i64 last = items * (blockIdx.x + 1) / gridDim.x;
  if (item < last) walk.go_to(item);
  i32 query = -1, tile = -1;  // what shared memory and registers hold
  uint4 key[COLUMNS][SPANS];
  float scale[COLUMNS][2];  // of the tokens whose scores this thread adds up
#pragma unroll 1
  for (; item < last; ++item, walk.go_on()) {
    if (!walk.is_scored()) continue;
    const bool other_query = walk.query != query;
    if (walk.tile != tile || (other_query && p.seats)) {
      const i32 known = walk.known();
#pragma unroll
      for (i32 n = 0; n < COLUMNS; ++n) {
        const i32 token = walk.tile * TILE + warp * KEYS + n * 8 + g;
        const char* from = (const char*)p.entries + (token < known ? walk.entry(token) : 0) * ENTRY_BYTES;
#pragma unroll
        for (i32 s = 0; s < SPANS; ++s) {
          key[n][s] = {0, 0, 0, 0};
          if (token >= known) continue;
          if (CODED) {
            const uint2 eight = *(const uint2*)(from + s * 32 + t * 8);
            const auto two = [](u32 word, i32 at) { return widen(word >> at & 0xff, word >> at + 8 & 0xff); };
            key[n][s] = {two(eight.x, 0), two(eight.x, 16), two(eight.y, 0), two(eight.y, 16)};
          } else {
            key[n][s] = *(const uint4*)(from + s * 64 + t * 16);
          }
        }
        const float own = CODED && token < known ? scale_of(from) : 1;
#pragma unroll
        for (i32 i = 0; i < 2; ++i) scale[n][i] = __shfl_sync(~0u, own, (t * 2 + i) * 4);
      }
    }
    if (other_query) {
      __syncthreads();
      const char* from = (const char*)p.query + (i64)walk.query * HEADS * DIM * 2;
#pragma unroll 1
      for (i32 i = threadIdx.x; i < HEADS * DIM / 8; i += THREADS)
        *(uint4*)(heads + i / (DIM / 8) * ROW + i % (DIM / 8) * 16) = *(const uint4*)(from + i * 16);
      for (i32 i = threadIdx.x; i < HEADS; i += THREADS) weight[i] = p.weight[(i64)walk.query * HEADS + i];
      __syncthreads();
    }
    query = walk.query, tile = walk.tile;

    float sum[COLUMNS][2] = {};
#pragma unroll 1
    for (i32 m = 0; m < HEADS; m += 16) {
      float product[COLUMNS][4] = {};
#pragma unroll
      for (i32 s = 0; s < SPANS; ++s) {
        const uint4 low = *(const uint4*)(heads + (m + g) * ROW + s * 64 + t * 16);
        const uint4 high = *(const uint4*)(heads + (m + 8 + g) * ROW + s * 64 + t * 16);
#pragma unroll
        for (i32 n = 0; n < COLUMNS; ++n) {
          multiply(product[n], {low.x, high.x, low.y, high.y}, {key[n][s].x, key[n][s].y});
          multiply(product[n], {low.z, high.z, low.w, high.w}, {key[n][s].z, key[n][s].w});
        }
      }
      const float first = weight[m + g], second = weight[m + 8 + g];
#pragma unroll
      for (i32 n = 0; n < COLUMNS; ++n)
#pragma unroll
        for (i32 i = 0; i < 2; ++i)
          sum[n][i] += first * fmaxf(product[n][i], 0.f) + second * fmaxf(product[n][2 + i], 0.f);
    }
    const i32 seen = walk.seen_by(query);
    u32* scores = p.scores + (i64)query * p.pitch;
#pragma unroll
    for (i32 n = 0; n < COLUMNS; ++n)
#pragma unroll
      for (i32 i = 0; i < 2; ++i) {
#pragma unroll
        for (i32 step = 4; step < 32; step *= 2) sum[n][i] += __shfl_xor_sync(~0u, sum[n][i], step);
        const i32 token = tile * TILE + warp * KEYS + n * 8 + t * 2 + i;
        if (g == 0 && token < seen) scores[token] = to_key(sum[n][i] * scale[n][i]);
      }
  }
}
