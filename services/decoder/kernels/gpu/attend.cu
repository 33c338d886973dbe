// attend: one query a row over the blocks its lanes chose, read from hot slots, for 16-bit types.
//
// The definition is the twin, kernels/attend.py (attend_slots). Knows slots and positions, no row's history.
// The warps of a thread block share the tokens of an item (attend_params.cuh) in tiles of 16. Each has DEPTH tiles
// under way to its own ring in shared memory, those of the next item among them, so that bytes flow while parts
// meet; and keeps its own running softmax. Queries stand in columns: scores = keys * queries and sums = values^T *
// weights, so that one matrix instruction serves 16 tokens or dims and 8 query heads.
// Tokens that are not seen are never read: their keys and values are zeros, whatever their slots hold.
//
// Compile-time: HEAD_DIM, GROUP_SIZE, BLOCK_TOKENS, ELEMENT (1 bfloat16, 2 float16), WARPS, DEPTH, WINDOW.

#include "elements.cuh"
#include "tensor_cores.cuh"
#include "parts.cuh"
#include "tokens.cuh"
#include "attend_params.cuh"

constexpr i32 TILE = 16;                               // tokens
constexpr i32 VECTORS = HEAD_DIM / 8;                  // 16-byte pieces of a key
constexpr i32 TOKEN_BYTES = (2 * VECTORS + 1) * 16;    // in shared memory; odd, so that 8 tokens lie in 8 banks
constexpr i32 TILE_BYTES = TILE * TOKEN_BYTES;
constexpr i32 COPIES = TILE * 2 * VECTORS / 32;        // 16-byte copies of one thread for a tile
constexpr i32 STEPS = HEAD_DIM / 16;                   // matrix products along a key
constexpr i32 COLUMNS = (GROUP_SIZE + 7) / 8;          // groups of 8 query heads
using Own = Part<GROUP_SIZE, HEAD_DIM>;
static_assert(HEAD_DIM % 16 == 0, "a key must be whole matrix steps");

// What a lane of the warp looks up ahead of a tile: one token of it, and what tells whether that is seen.
struct Ahead {
  Token token;
  i32 item, head, length = 0;
};

// A warp's walk over its tiles: `count` of the thread block's first item, as many of the next, and so on.
struct Walk {
  const AttendParams& p;
  const i32 count;
  i32 item, tile = 0;
  Place place;

  __device__ __forceinline__ Walk(const AttendParams& p, i32 count)
      : p(p), count(count), item(blockIdx.x), place(p, item) {}

  __device__ __forceinline__ Ahead next() {
    Ahead ahead;
    ahead.item = item, ahead.head = place.head;
    if (item < p.items) {
      ahead.token = place.token((tile * WARPS + threadIdx.x / 32) * TILE + threadIdx.x % TILE);
      ahead.length = p.length[place.row];
    }
    if (++tile == count) {
      tile = 0, item += gridDim.x;
      place = Place(p, item);
    }
    return ahead;
  }
};

// Starts copying a tile, of which each lane of the warp has looked one token up; returns which are seen, as bits.
__device__ __forceinline__ u32 fetch(const AttendParams& p, const Ahead& ahead, i32 real_items, u32 to) {
  const i32 inside = threadIdx.x % 32;
  const bool seen = ahead.item < real_items && is_seen(ahead.token, ahead.length);
  const u32 all = __ballot_sync(~0u, seen) & 0xffff;
  if (all) {
    const i64 mine = seen ? key_of(p, ahead.token, ahead.head) : -1;
    const i32 to_value = (p.heads - 1) * HEAD_DIM * ELEMENT_BYTES;  // between a key's end and its value
#pragma unroll
    for (i32 n = 0; n < COPIES; ++n) {
      const i32 piece = n * 32 + inside, of = piece / (2 * VECTORS), vector = piece % (2 * VECTORS);
      const i64 key = __shfl_sync(~0u, mine, of);
      const i64 from = key < 0 ? 0 : key + vector * 16 + (vector < VECTORS ? 0 : to_value);
      copy_16(to + of * TOKEN_BYTES + vector * 16, (const char*)p.pool + from, key >= 0);
    }
  }
  return all;
}

struct Softmax {
  float top[COLUMNS][2], weight[COLUMNS][2];  // of query heads 8c + 2t and the next
  float sum[COLUMNS][STEPS][4];               // rows: dims; columns: query heads

  __device__ __forceinline__ Softmax() {
#pragma unroll
    for (i32 c = 0; c < COLUMNS; ++c) {
      top[c][0] = top[c][1] = LOWEST, weight[c][0] = weight[c][1] = 0;
#pragma unroll
      for (i32 m = 0; m < STEPS; ++m)
#pragma unroll
        for (i32 i = 0; i < 4; ++i) sum[c][m][i] = 0;
    }
  }

  // Takes in a tile. `scale` is in powers of two.
  __device__ __forceinline__ void add(const u32 (&query)[COLUMNS][STEPS][2], u32 tile, u32 seen, float scale) {
    const i32 inside = threadIdx.x % 32;
    float score[COLUMNS][2][4] = {};  // even and odd steps: two chains of products
    const u32 keys = tile + inside % 16 * TOKEN_BYTES + inside / 16 * 16;
#pragma unroll
    for (i32 k = 0; k < STEPS; ++k) {
      u32 a[4];
      load_matrices(a, keys + k * 32);
#pragma unroll
      for (i32 c = 0; c < COLUMNS; ++c) multiply(score[c][k % 2], a, query[c][k]);
    }
    u32 weights[COLUMNS][2];
    const bool is_seen[2] = {(seen >> inside / 4 & 1) != 0, (seen >> (8 + inside / 4) & 1) != 0};
#pragma unroll
    for (i32 c = 0; c < COLUMNS; ++c) {
      float s[4], fade[2];
#pragma unroll
      for (i32 i = 0; i < 4; ++i) s[i] = is_seen[i / 2] ? (score[c][0][i] + score[c][1][i]) * scale : LOWEST;
#pragma unroll
      for (i32 j = 0; j < 2; ++j) {
        float highest = fmaxf(s[j], s[2 + j]);
#pragma unroll
        for (i32 step = 4; step < 32; step *= 2) highest = fmaxf(highest, __shfl_xor_sync(~0u, highest, step));
        highest = fmaxf(highest, top[c][j]);
        fade[j] = exp2f(top[c][j] - highest);
        top[c][j] = highest;
        s[j] = is_seen[0] ? exp2f(s[j] - highest) : 0;
        s[2 + j] = is_seen[1] ? exp2f(s[2 + j] - highest) : 0;
        weight[c][j] = weight[c][j] * fade[j] + (s[j] + s[2 + j]);
      }
      weights[c][0] = transpose(pack(s[0], s[1]));
      weights[c][1] = transpose(pack(s[2], s[3]));
#pragma unroll
      for (i32 m = 0; m < STEPS; ++m)
#pragma unroll
        for (i32 i = 0; i < 4; ++i) sum[c][m][i] *= fade[i % 2];
    }
    const u32 values = tile + (inside / 16 * 8 + inside % 8) * TOKEN_BYTES + (VECTORS + inside / 8 % 2) * 16;
#pragma unroll
    for (i32 m = 0; m < STEPS; ++m) {
      u32 a[4];
      load_matrices_transposed(a, values + m * 32);
#pragma unroll
      for (i32 c = 0; c < COLUMNS; ++c) multiply(sum[c][m], a, weights[c]);
    }
  }

  __device__ __forceinline__ void write(Own& part) {
    const i32 inside = threadIdx.x % 32;
#pragma unroll
    for (i32 c = 0; c < COLUMNS; ++c)
#pragma unroll
      for (i32 j = 0; j < 2; ++j) {
        const i32 query = c * 8 + inside % 4 * 2 + j;
        float total = weight[c][j];
#pragma unroll
        for (i32 step = 4; step < 32; step *= 2) total += __shfl_xor_sync(~0u, total, step);
        if (query >= GROUP_SIZE) continue;
        if (inside < 4) part.top[query] = top[c][j], part.weight[query] = total;
#pragma unroll
        for (i32 m = 0; m < STEPS; ++m) {
          part.sum[query][m * 16 + inside / 4] = sum[c][m][j];
          part.sum[query][m * 16 + 8 + inside / 4] = sum[c][m][2 + j];
        }
      }
  }
};

// The unit's queries as matrix columns, 16 dims a step; no query is zeros.
__device__ __forceinline__ void load_queries(const AttendParams& p, i32 unit, u32 (&query)[COLUMNS][STEPS][2]) {
  const i32 inside = threadIdx.x % 32;
#pragma unroll
  for (i32 c = 0; c < COLUMNS; ++c)
#pragma unroll
    for (i32 k = 0; k < STEPS * 2; ++k) {
      const i32 head = c * 8 + inside / 4;
      const u32* from = (const u32*)((const u16*)p.query + query_of(unit) + head * HEAD_DIM) + k * 4 + inside % 4;
      query[c][k / 2][k % 2] = head < GROUP_SIZE ? *from : 0;
    }
}

extern "C" __global__ void __launch_bounds__(WARPS * 32) attend(const __grid_constant__ AttendParams p) {
  extern __shared__ __align__(16) char shared[];  // every warp's ring, then every warp's part
  const i32 warp = threadIdx.x / 32;
  const u32 ring = shared_address(shared) + warp * DEPTH * TILE_BYTES;
  Own* parts = (Own*)(shared + WARPS * DEPTH * TILE_BYTES);
  const i32 count = (p.share() * BLOCK_TOKENS + WARPS * TILE - 1) / (WARPS * TILE);
  Walk walk(p, count);
  wait_for_previous();
  let_next_begin();

  // Everything that the first copies depend on is read at once.
  const i32 real_items = p.real_items();
  Ahead ahead[DEPTH];
#pragma unroll
  for (i32 d = 0; d < DEPTH; ++d) ahead[d] = walk.next();
  u32 query[COLUMNS][STEPS][2];
  load_queries(p, blockIdx.x / p.splits, query);
  u32 seen[DEPTH];  // of the tiles under way, oldest first
#pragma unroll
  for (i32 d = 0; d < DEPTH; ++d) {
    seen[d] = fetch(p, ahead[d], real_items, ring + d * TILE_BYTES);
    close_group();
  }

  i32 stage = 0;
  for (i32 item = blockIdx.x; item < real_items; item += gridDim.x) {
    Softmax softmax;
    for (i32 n = 0; n < count; ++n) {
      const u32 tile = ring + stage * TILE_BYTES;
      const Ahead next = walk.next();
      wait_groups<DEPTH - 1>();
      __syncwarp();
      if (seen[0]) softmax.add(query, tile, seen[0], p.scaling * 1.44269504f);  // log2(e)
      __syncwarp();
#pragma unroll
      for (i32 d = 0; d < DEPTH - 1; ++d) seen[d] = seen[d + 1];
      seen[DEPTH - 1] = fetch(p, next, real_items, tile);
      close_group();
      stage = stage == DEPTH - 1 ? 0 : stage + 1;
    }
    if (item + gridDim.x < real_items) load_queries(p, (item + gridDim.x) / p.splits, query);
    softmax.write(parts[warp]);
    finish<WARPS, WARPS * 32>(p, item, parts);
  }
}
