// attend_latent: one query a row over the tokens it chose, where all heads share one latent record (MLA), from hot
// slots, for 16-bit types.
//
// The definition is the twin, kernels/attend_latent.py. Knows slots and positions, no row's history. A record is its
// own key; its first LATENT numbers are its value. A thread block serves one split of HEAD_TILE heads of a row.
// Chunks of TOKENS tokens pass through shared memory; for each, the warps share out
//   scores   HEAD_WARPS shares of the heads, SLICES of a key's length, the rest of the warps by tokens
//   softmax  a few threads a head, which also add up the slices and keep the head's running maximum and weight
//   sums     every warp its own stretch of LATENT, for all heads
// Tokens that are not seen are never read: their records are zeros, whatever their slots hold. Records in eight bits
// come as they are, and each chunk is widened in shared memory before it is used.
//
// Compile-time: LATENT, ROPED, CODED (1: records are in eight bits), HEAD_TILE, BLOCK_TOKENS, ELEMENT (1 bfloat16, 2 float16), TOKENS, DEPTH (chunks under
// way), WARPS, HEAD_WARPS, SLICES, CLUSTER.

#include "elements.cuh"
#include "coded_records.cuh"
#include "tensor_cores.cuh"
#include "parts.cuh"
#include "cluster_parts.cuh"
#include "tokens.cuh"
#include "attend_latent_params.cuh"

constexpr i32 THREADS = WARPS * 32;
constexpr i32 RECORD = LATENT + ROPED;
constexpr i32 VECTORS = RECORD / 8;                          // 16-byte pieces of a record as it is used,
constexpr i32 PIECES = RECORD_BYTES / 16;                    // and as it comes
constexpr i32 STRIDE = (VECTORS / 2 * 2 + 1) * 16;           // of records in shared memory: 8 of them in 8 banks
constexpr i32 COMING_STRIDE = CODED ? RECORD_BYTES : STRIDE;
constexpr i32 COMING_BYTES = TOKENS * COMING_STRIDE;
constexpr i32 WIDE_BYTES = CODED ? TOKENS * STRIDE : 16;      // of a chunk in eight bits, as it is used
constexpr i32 WARP_TOKENS = TOKENS / WARPS;                  // that a warp brings
constexpr i32 TOKEN_WARPS = WARPS / (HEAD_WARPS * SLICES);
constexpr i32 HEAD_TILES = HEAD_TILE / 16;
constexpr i32 SCORE_HEADS = HEAD_TILES / HEAD_WARPS;         // groups of 16 heads of a warp's scores
constexpr i32 SCORE_TOKENS = TOKENS / TOKEN_WARPS / 8;       // groups of 8 tokens of them
constexpr i32 SCORE_STEPS = RECORD / 16 / SLICES;            // matrix products along its slice of a key
constexpr i32 SUM_DIMS = LATENT / WARPS / 8;                 // groups of 8 dims of a warp's sums
constexpr i32 SCORE_ROW = TOKENS + 4;                        // floats
constexpr i32 WEIGHT_ROW = TOKENS * 2 + 16;                  // bytes
constexpr i32 SHARERS = THREADS / HEAD_TILE;                 // threads of one head's softmax
constexpr i32 FOURS = TOKENS / (SHARERS * 4);                // groups of 4 tokens of each
using Own = Part<HEAD_TILE, LATENT>;
static_assert(VECTORS % 2 == 0 && PIECES * 16 == RECORD_BYTES, "records must be whole copies");
static_assert(!CODED || ROPED % 8 == 0, "what is turned must be whole copies");
static_assert(SCORE_TOKENS % 2 == 0 && SUM_DIMS % 2 == 0 && FOURS > 0 && SCORE_HEADS > 0, "too many warps");
static_assert(RECORD / 16 % SLICES == 0, "slices must be whole matrix steps");

struct Shared {  // sits in dynamic shared memory; the block's part lies over the queries and chunks in the end
  char query[HEAD_TILE * STRIDE];
  char coming[DEPTH][COMING_BYTES];
  float score[SLICES][HEAD_TILE][SCORE_ROW];
  char weight[HEAD_TILE * WEIGHT_ROW];
  float fade[HEAD_TILE], top[HEAD_TILE], total[HEAD_TILE];
  bool seen[DEPTH][TOKENS];
  __align__(16) char wide[WIDE_BYTES];
};
static_assert(sizeof(Own) <= HEAD_TILE * STRIDE + DEPTH * COMING_BYTES, "the part must fit over queries and chunks");

// The scores of a chunk, slice by slice.
__device__ __forceinline__ void score_chunk(Shared& shared, u32 chunk) {
  const i32 warp = threadIdx.x / 32, inside = threadIdx.x % 32;
  const i32 slice = warp % SLICES, heads = warp / SLICES % HEAD_WARPS * SCORE_HEADS * 16;
  const i32 tokens = warp / (SLICES * HEAD_WARPS) * SCORE_TOKENS * 8;
  const u32 along = slice * SCORE_STEPS * 32;
  const u32 a_row = shared_address(shared.query) + (heads + inside % 16) * STRIDE + along + inside / 16 * 16;
  const u32 b_row = chunk + (tokens + inside / 16 * 8 + inside % 8) * STRIDE + along + inside / 8 % 2 * 16;
  float score[SCORE_HEADS][SCORE_TOKENS][4] = {};
#pragma unroll
  for (i32 k = 0; k < SCORE_STEPS; ++k) {
    u32 a[SCORE_HEADS][4];
#pragma unroll
    for (i32 m = 0; m < SCORE_HEADS; ++m) load_matrices(a[m], a_row + m * 16 * STRIDE + k * 32);
#pragma unroll
    for (i32 n = 0; n < SCORE_TOKENS; n += 2) {
      u32 b[4];
      load_matrices(b, b_row + n * 8 * STRIDE + k * 32);
#pragma unroll
      for (i32 m = 0; m < SCORE_HEADS; ++m) {
        multiply(score[m][n], a[m], {b[0], b[1]});
        multiply(score[m][n + 1], a[m], {b[2], b[3]});
      }
    }
  }
#pragma unroll
  for (i32 m = 0; m < SCORE_HEADS; ++m)
#pragma unroll
    for (i32 n = 0; n < SCORE_TOKENS; ++n) {
      const i32 head = heads + m * 16 + inside / 4, token = tokens + n * 8 + inside % 4 * 2;
      *(float2*)&shared.score[slice][head][token] = {score[m][n][0], score[m][n][1]};
      *(float2*)&shared.score[slice][head + 8][token] = {score[m][n][2], score[m][n][3]};
    }
}

struct Softmax {  // of one head, on SHARERS neighbouring threads
  float top = LOWEST, weight = 0;

  // Turns a chunk's scores into weights. `scale` is in powers of two.
  __device__ __forceinline__ void add(Shared& shared, const bool* seen, float scale) {
    const i32 head = threadIdx.x / SHARERS, mine = threadIdx.x % SHARERS * 4;
    float score[FOURS][4], highest = top;
#pragma unroll
    for (i32 f = 0; f < FOURS; ++f) {
      const i32 token = f * SHARERS * 4 + mine;
      float4 sum = {0, 0, 0, 0};
#pragma unroll
      for (i32 slice = 0; slice < SLICES; ++slice) {
        const float4 part = *(const float4*)&shared.score[slice][head][token];
        sum = {sum.x + part.x, sum.y + part.y, sum.z + part.z, sum.w + part.w};
      }
      const float sums[4] = {sum.x, sum.y, sum.z, sum.w};
#pragma unroll
      for (i32 i = 0; i < 4; ++i) {
        score[f][i] = seen[token + i] ? sums[i] * scale : LOWEST;
        highest = fmaxf(highest, score[f][i]);
      }
    }
#pragma unroll
    for (i32 step = 1; step < SHARERS; step *= 2) highest = fmaxf(highest, __shfl_xor_sync(~0u, highest, step));
    const float fade = exp2f(top - highest);
    top = highest, weight *= fade;
    if (mine == 0) shared.fade[head] = fade;
#pragma unroll
    for (i32 f = 0; f < FOURS; ++f) {
      const i32 token = f * SHARERS * 4 + mine;
#pragma unroll
      for (i32 i = 0; i < 4; ++i) {
        score[f][i] = seen[token + i] ? exp2f(score[f][i] - highest) : 0;
        weight += score[f][i];
      }
      *(uint2*)&shared.weight[head * WEIGHT_ROW + token * 2] = {
          pack(score[f][0], score[f][1]), pack(score[f][2], score[f][3])};
    }
  }

  __device__ __forceinline__ void write(Shared& shared) {
#pragma unroll
    for (i32 step = 1; step < SHARERS; step *= 2) weight += __shfl_xor_sync(~0u, weight, step);
    if (threadIdx.x % SHARERS == 0) {
      shared.top[threadIdx.x / SHARERS] = top, shared.total[threadIdx.x / SHARERS] = weight;
    }
  }
};

struct Sums {
  float sum[HEAD_TILES][SUM_DIMS][4];

  __device__ __forceinline__ Sums() {
#pragma unroll
    for (i32 m = 0; m < HEAD_TILES; ++m)
#pragma unroll
      for (i32 n = 0; n < SUM_DIMS; ++n)
#pragma unroll
        for (i32 i = 0; i < 4; ++i) sum[m][n][i] = 0;
  }

  __device__ __forceinline__ void add(const Shared& shared, u32 chunk) {
    const i32 warp = threadIdx.x / 32, inside = threadIdx.x % 32;
#pragma unroll
    for (i32 m = 0; m < HEAD_TILES; ++m) {
      const float fade[2] = {shared.fade[m * 16 + inside / 4], shared.fade[m * 16 + 8 + inside / 4]};
#pragma unroll
      for (i32 n = 0; n < SUM_DIMS; ++n)
#pragma unroll
        for (i32 i = 0; i < 4; ++i) sum[m][n][i] *= fade[i / 2];
    }
    const u32 a_row = shared_address(shared.weight) + inside % 16 * WEIGHT_ROW + inside / 16 * 16;
    const u32 b_row = chunk + inside % 16 * STRIDE + warp * SUM_DIMS * 16 + inside / 16 * 16;
#pragma unroll
    for (i32 k = 0; k < TOKENS / 16; ++k) {
      u32 a[HEAD_TILES][4];
#pragma unroll
      for (i32 m = 0; m < HEAD_TILES; ++m) load_matrices(a[m], a_row + m * 16 * WEIGHT_ROW + k * 32);
#pragma unroll
      for (i32 n = 0; n < SUM_DIMS; n += 2) {
        u32 b[4];
        load_matrices_transposed(b, b_row + k * 16 * STRIDE + n * 16);
#pragma unroll
        for (i32 m = 0; m < HEAD_TILES; ++m) {
          multiply(sum[m][n], a[m], {b[0], b[1]});
          multiply(sum[m][n + 1], a[m], {b[2], b[3]});
        }
      }
    }
  }

  __device__ __forceinline__ void write(Own& own) const {
    const i32 warp = threadIdx.x / 32, inside = threadIdx.x % 32;
#pragma unroll
    for (i32 m = 0; m < HEAD_TILES; ++m)
#pragma unroll
      for (i32 n = 0; n < SUM_DIMS; ++n) {
        const i32 head = m * 16 + inside / 4, dim = (warp * SUM_DIMS + n) * 8 + inside % 4 * 2;
        *(float2*)&own.sum[head][dim] = {sum[m][n][0], sum[m][n][1]};
        *(float2*)&own.sum[head + 8][dim] = {sum[m][n][2], sum[m][n][3]};
      }
  }
};

extern "C" __global__ void __launch_bounds__(THREADS) attend_latent(const __grid_constant__ AttendLatentParams p) {
  extern __shared__ __align__(16) char dynamic[];
  Shared& shared = *(Shared*)dynamic;
  const i32 tiles = (p.heads + HEAD_TILE - 1) / HEAD_TILE, split = blockIdx.x % p.splits, unit = blockIdx.x / p.splits;
  const i32 first_head = unit % tiles * HEAD_TILE, row = unit / tiles;
  const i32 warp = threadIdx.x / 32, inside = threadIdx.x % 32;
  const i32 share = (p.top_k + p.splits - 1) / p.splits, first = split * share;
  const i32 tokens = max(0, min(share, p.top_k - first)) * BLOCK_TOKENS, chunks = (tokens + TOKENS - 1) / TOKENS;
  const i32* slots = p.slots + (i64)row * p.top_k + first;
  const i32* selected = p.selected + (i64)row * p.top_k + first;
  wait_for_previous();
  let_next_begin();

  // Each warp brings WARP_TOKENS tokens of a chunk, of which each of its lanes looks one up.
  const auto token = [&](i32 n) {
    return Token(slots, selected, tokens, n * TOKENS + warp * WARP_TOKENS + inside % WARP_TOKENS);
  };
  const i32 length = p.length[row];
  const bool real = row < *p.real_rows;
  const auto fetch = [&](const Token& mine, i32 stage) {
    const bool is_seen = real && mine.seen(length);
    if (inside < WARP_TOKENS) shared.seen[stage][warp * WARP_TOKENS + inside] = is_seen;
    const i64 from = is_seen ? mine.record() * RECORD_BYTES : -1;
    const u32 to = shared_address(shared.coming[stage]) + warp * WARP_TOKENS * COMING_STRIDE;
#pragma unroll
    for (i32 n = 0; n < (WARP_TOKENS * PIECES + 31) / 32; ++n) {
      const i32 piece = n * 32 + inside, of = piece / PIECES, vector = piece % PIECES;
      const i64 record = __shfl_sync(~0u, from, of);
      if (WARP_TOKENS * PIECES % 32 && piece >= WARP_TOKENS * PIECES) break;
      copy_16(to + of * COMING_STRIDE + vector * 16, (const char*)p.pool + max(record, 0ll) + vector * 16, record >= 0);
    }
    return is_seen;
  };
  Token ahead[DEPTH];
#pragma unroll
  for (i32 d = 0; d < DEPTH; ++d) ahead[d] = token(d);
  if (real) {
    const char* from = (const char*)p.query + ((i64)row * p.heads + first_head) * RECORD * 2;
    for (i32 i = threadIdx.x; i < HEAD_TILE * VECTORS; i += THREADS) {
      const bool exists = first_head + i / VECTORS < p.heads;
      copy_16(shared_address(shared.query) + i / VECTORS * STRIDE + i % VECTORS * 16, from + (exists ? i * 16 : 0), exists);
    }
  }
  bool any[DEPTH];
#pragma unroll
  for (i32 d = 0; d < DEPTH; ++d) {
    any[d] = fetch(ahead[d], d);
    close_group();
  }
  if (!real) return;

  Softmax softmax;
  Sums sums;
  for (i32 n = 0; n < chunks; ++n) {
    const i32 stage = n % DEPTH;
    const Token next = token(n + DEPTH);
    wait_groups<DEPTH - 1>();
    if (__syncthreads_or(any[0])) {
      if (CODED) {
        widen<TOKENS, STRIDE, THREADS>(shared.coming[stage], shared.wide);
        __syncthreads();
      }
      const u32 chunk = shared_address(CODED ? shared.wide : shared.coming[stage]);
      score_chunk(shared, chunk);
      __syncthreads();
      softmax.add(shared, shared.seen[stage], p.scaling * 1.44269504f);  // log2(e)
      __syncthreads();
      sums.add(shared, chunk);
    }
    __syncthreads();
#pragma unroll
    for (i32 d = 0; d < DEPTH - 1; ++d) any[d] = any[d + 1];
    any[DEPTH - 1] = n + DEPTH < chunks && fetch(next, stage);
    close_group();
  }
  wait_groups<0>();
  softmax.write(shared);
  __syncthreads();
  Own& own = *(Own*)dynamic;
  sums.write(own);
  if (threadIdx.x < HEAD_TILE) {
    own.top[threadIdx.x] = shared.top[threadIdx.x], own.weight[threadIdx.x] = shared.total[threadIdx.x];
  }

  constexpr i32 SLICE = HEAD_TILE * LATENT / CLUSTER;
  const i32 rank = split % CLUSTER, groups = p.splits / CLUSTER;
  const Meeting<HEAD_TILE, LATENT> meeting = {
      p.sums + (i64)unit * groups * HEAD_TILE * LATENT,
      p.stats + ((i64)unit * p.splits + rank * groups) * HEAD_TILE,
      p.arrived + unit * CLUSTER + rank,
      groups,
  };
  const auto write = [&](i32 tile_head, i32 dim, const Merged& merged) {
    const i32 head = first_head + tile_head;
    if (head >= p.heads) return;
    const i64 place = (i64)row * p.heads + head;
    const bool any = merged.weight > 0;
    store_4(p.out, place * LATENT + dim, any ? merged.mean() : float4{0, 0, 0, 0});
    if (p.lse && dim == 0) p.lse[place] = any ? merged.top * 0.69314718f + logf(merged.weight) : NOTHING;  // ln 2
  };
  merge_cluster<HEAD_TILE, LATENT, THREADS>(own, rank * SLICE, (rank + 1) * SLICE,
      [&](i32 tile_head, i32 dim, const Merged& merged) {
        if (groups == 1) write(tile_head, dim, merged);
        else meeting.put(split / CLUSTER, tile_head, dim, merged);
      });
  if (groups > 1) meeting.close<THREADS>(rank * SLICE, (rank + 1) * SLICE, write);
}
