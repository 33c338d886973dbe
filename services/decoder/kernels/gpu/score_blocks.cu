// score_blocks: how well each block answers each head of a query: by its best token's index key.
//
// The definition is the twin, kernels/choose_blocks.py. A warp scores a block for all heads of a query, TEAM threads
// a token; neighbouring warps take neighbouring queries, which in prefill share the keys. A query's own block is its
// best without being looked at; a query that sees no more than TOP_K blocks is not scored. Decode and prefill add up
// in the same order.
//
// Compile-time: HEADS, DIM (of whole 16-byte pieces), BLOCK_TOKENS, BLOCKS_PER_PAGE, TOP_K, ELEMENT (0 float32,
// 1 bfloat16, 2 float16), WARPS.

#include "elements.cuh"
#include "sort_key.cuh"

struct ScoreBlocksParams {
  const void* query;  // [queries, HEADS, DIM]
  const char* keys;   // [device pages, BLOCKS_PER_PAGE, BLOCK_TOKENS, DIM] index keys, which all heads share
  const i32* pages;   // [table rows, max_pages] device pages; in prefill [max_pages] of the one row
  const i32* seats;   // [queries] row of the tables; null in prefill
  const i32* length;  // [queries] tokens that each query sees; null in prefill, where query i sees first + i + 1
  u32* scores;        // out [queries, HEADS, pitch] keys of pick.cuh, up to each query's own block
  i32 queries, blocks, max_pages, first, pitch;  // blocks: that any query sees
};

constexpr i32 VECTOR = 16 / ELEMENT_BYTES;  // elements of a 16-byte piece
constexpr i32 VECTORS = DIM / VECTOR;
constexpr i32 TEAM = 4;                     // threads of one token, so that a load touches few cache lines
constexpr i32 TEAMS = 32 / TEAM;
constexpr float LOWEST = -3.0e38f;
static_assert(VECTORS * VECTOR == DIM, "a key must be whole 16-byte pieces");

__device__ __forceinline__ float at(const void* numbers, i64 i) {
  if (ELEMENT == 0) return ((const float*)numbers)[i];
  return unpack(((const u16*)numbers)[i]).x;
}

__device__ __forceinline__ void load(float (&to)[VECTOR], const char* from) {
  const uint4 piece = *(const uint4*)from;
  const u32 words[4] = {piece.x, piece.y, piece.z, piece.w};
#pragma unroll
  for (i32 w = 0; w < 4; ++w) {
    if (ELEMENT == 0) {
      to[w] = __uint_as_float(words[w]);
    } else {
      const float2 both = unpack(words[w]);
      to[2 * w % VECTOR] = both.x, to[(2 * w + 1) % VECTOR] = both.y;
    }
  }
}

extern "C" __global__ void __launch_bounds__(WARPS * 32) score_blocks(const __grid_constant__ ScoreBlocksParams p) {
  extern __shared__ float4 shared[];  // [WARPS, HEADS, DIM]: each warp's query
  wait_for_previous();
  let_next_begin();
  const i32 warp = threadIdx.x / 32, inside = threadIdx.x % 32;
  float* heads = (float*)shared + warp * HEADS * DIM;
  const i64 items = (i64)p.queries * p.blocks;
  i32 known = -1;  // whose heads they are
#pragma unroll 1
  for (i64 item = (i64)blockIdx.x * WARPS + warp; item < items; item += (i64)gridDim.x * WARPS) {
    const i32 query = (i32)(item % p.queries), block = (i32)(item / p.queries);
    const i32 own = (p.length ? p.length[query] - 1 : p.first + query) / BLOCK_TOKENS;
    if (own < TOP_K || block > own) continue;
    u32* scores = p.scores + (i64)query * HEADS * p.pitch + block;
    if (block == own) {
      if (inside < HEADS) scores[(i64)inside * p.pitch] = ~0u;
      continue;
    }
    if (known != query) {
      known = query;
      __syncwarp();
      for (i32 i = inside; i < HEADS * DIM; i += 32) heads[i] = at(p.query, (i64)query * HEADS * DIM + i);
      __syncwarp();
    }
    const i32* pages = p.pages + (p.seats ? (i64)p.seats[query] * p.max_pages : 0);
    const i64 place = (i64)pages[block / BLOCKS_PER_PAGE] * BLOCKS_PER_PAGE + block % BLOCKS_PER_PAGE;
    float best[HEADS];
#pragma unroll
    for (i32 h = 0; h < HEADS; ++h) best[h] = LOWEST;
#pragma unroll 1
    for (i32 base = 0; base < BLOCK_TOKENS; base += TEAMS) {
      const i32 token = base + inside / TEAM;
      const char* key = p.keys + (place * BLOCK_TOKENS + token) * DIM * ELEMENT_BYTES;
      float sum[HEADS] = {};
#pragma unroll 4
      for (i32 v = token < BLOCK_TOKENS ? inside % TEAM : VECTORS; v < VECTORS; v += TEAM) {
        float number[VECTOR];
        load(number, key + v * 16);
#pragma unroll
        for (i32 h = 0; h < HEADS; ++h)
#pragma unroll
          for (i32 n = 0; n < VECTOR; n += 4) {
            const float4 w = *(const float4*)&heads[h * DIM + v * VECTOR + n];
            sum[h] = fmaf(w.x, number[n], sum[h]), sum[h] = fmaf(w.y, number[n + 1], sum[h]);
            sum[h] = fmaf(w.z, number[n + 2], sum[h]), sum[h] = fmaf(w.w, number[n + 3], sum[h]);
          }
      }
#pragma unroll
      for (i32 h = 0; h < HEADS; ++h) {
#pragma unroll
        for (i32 step = TEAM / 2; step; step /= 2) sum[h] += __shfl_xor_sync(~0u, sum[h], step);
        if (token < BLOCK_TOKENS) best[h] = fmaxf(best[h], sum[h]);
      }
    }
#pragma unroll
    for (i32 h = 0; h < HEADS; ++h) {
#pragma unroll
      for (i32 step = 16; step >= TEAM; step /= 2) best[h] = fmaxf(best[h], __shfl_xor_sync(~0u, best[h], step));
      if (inside == 0) scores[(i64)h * p.pitch] = to_key(best[h]);
    }
  }
}
