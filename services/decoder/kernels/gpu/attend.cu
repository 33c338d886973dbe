// attend: one query a row over the blocks its lanes chose, read from hot slots, for 16-bit types.
//
// The definition is the twin, kernels/attend.py (attend_slots). Knows slots and positions, no row's history.
// A thread block serves one split of one unit (a KV head of a lane) and the GROUP_SIZE query heads that share it.
// Its warps work on their own: each takes tiles of 16 tokens in turn, has DEPTH of them under way to its own part
// of shared memory, and keeps its own running softmax. Queries stand in columns: scores = keys * queries and
// sums = values^T * weights, so that one matrix instruction serves 16 tokens or dims and 8 query heads.
// Tokens that are not seen are never read: their keys and values are zeros, whatever their slots hold.
//
// Compile-time: HEAD_DIM, GROUP_SIZE, BLOCK_TOKENS, ELEMENT (1 bfloat16, 2 float16), WARPS, DEPTH, CLUSTER.

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
constexpr i32 WARP_BYTES = DEPTH * TILE_BYTES > (i32)sizeof(Own) ? DEPTH * TILE_BYTES : (i32)sizeof(Own);
static_assert(HEAD_DIM % 16 == 0, "a key must be whole matrix steps");

// Starts copying a tile, of which each lane of the warp brings one token; returns which tokens are seen, as bits.
__device__ __forceinline__ u32 fetch(
    const AttendParams& p, const Place& place, const Token& token, bool seen, u32 tile) {
  const i32 inside = threadIdx.x % 32;
  const u32 all = __ballot_sync(~0u, seen) & 0xffff;
  if (all) {
    const i64 mine = seen ? place.key(p, token) : -1;
    const i32 to_value = (p.heads - 1) * HEAD_DIM * ELEMENT_BYTES;  // between a key's end and its value
#pragma unroll
    for (i32 n = 0; n < COPIES; ++n) {
      const i32 piece = n * 32 + inside, of = piece / (2 * VECTORS), vector = piece % (2 * VECTORS);
      const i64 key = __shfl_sync(~0u, mine, of);
      const i64 from = key < 0 ? 0 : key + vector * 16 + (vector < VECTORS ? 0 : to_value);
      copy_16(tile + of * TOKEN_BYTES + vector * 16, (const char*)p.pool + from, key >= 0);
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

extern "C" __global__ void __launch_bounds__(WARPS * 32) attend(const __grid_constant__ AttendParams p) {
  extern __shared__ __align__(16) char shared[];  // a piece of WARP_BYTES for each warp, then the block's part
  const Place place(p);
  const i32 warp = threadIdx.x / 32, inside = threadIdx.x % 32;
  const i32 tiles = (place.tokens + TILE - 1) / TILE, count = max(0, (tiles - warp + WARPS - 1) / WARPS);
  char* piece = shared + warp * WARP_BYTES;
  const u32 ring = shared_address(piece);
  wait_for_previous();
  let_next_begin();

  // Everything that the first copies depend on is read at once.
  const auto token = [&](i32 n) { return Token(place.slots, place.selected, place.tokens, (n * WARPS + warp) * TILE + inside % TILE); };
  Token ahead[DEPTH];
#pragma unroll
  for (i32 d = 0; d < DEPTH; ++d) ahead[d] = token(d);
  const i32 length = p.length[place.row];
  const bool real = place.row < *p.real_rows;
  u32 query[COLUMNS][STEPS][2];
#pragma unroll
  for (i32 c = 0; c < COLUMNS; ++c)
#pragma unroll
    for (i32 k = 0; k < STEPS * 2; ++k) {
      const i32 head = c * 8 + inside / 4;
      const u32* from = (const u32*)((const u16*)p.query + place.query + head * HEAD_DIM) + k * 4 + inside % 4;
      query[c][k / 2][k % 2] = head < GROUP_SIZE ? *from : 0;
    }
  u32 seen[DEPTH];
#pragma unroll
  for (i32 d = 0; d < DEPTH; ++d) {
    seen[d] = fetch(p, place, ahead[d], real && ahead[d].seen(length), ring + d * TILE_BYTES);
    close_group();
  }
  if (!real) return;

  Softmax softmax;
  for (i32 n = 0; n < count; ++n) {
    const u32 tile = ring + n % DEPTH * TILE_BYTES;
    const Token next = token(n + DEPTH);
    wait_groups<DEPTH - 1>();
    __syncwarp();
    if (seen[0]) softmax.add(query, tile, seen[0], p.scaling * 1.44269504f);  // log2(e)
    __syncwarp();
#pragma unroll
    for (i32 d = 0; d < DEPTH - 1; ++d) seen[d] = seen[d + 1];
    seen[DEPTH - 1] = fetch(p, place, next, next.seen(length), tile);
    close_group();
  }
  wait_groups<0>();
  softmax.write(*(Own*)piece);
  Own& own = *(Own*)(shared + WARPS * WARP_BYTES);
  merge_warps<WARPS, GROUP_SIZE, HEAD_DIM, WARPS * 32>(shared, WARP_BYTES, [&](i32 row, i32 dim, const Merged& merged) {
    *(float4*)&own.sum[row][dim] = merged.sum;
    if (dim == 0) own.top[row] = merged.top, own.weight[row] = merged.weight;
  });
  finish<WARPS * 32>(p, place, own);
}
