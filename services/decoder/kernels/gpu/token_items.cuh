// The work of score_tokens and score_tokens_plain: queries times tiles of TILE tokens, dealt out in runs.
//
// Two kinds of launches. Decode: each query is a row's newest token and has keys of its own; a run goes along the
// tiles of one row, then of the next. Prefill (no seats): consecutive queries of one row share its keys; a run goes
// along the queries of one tile. A query that sees no more than TOP_K tokens is not scored at all.
// TILE, TOP_K and PAGE_TOKENS must be defined before.

struct ScoreParams {
  const void* query;     // [queries, HEADS, DIM]
  const float* weight;   // [queries, HEADS]
  const void* entries;   // [device pages * PAGE_TOKENS, DIM] index keys
  const i32* pages;      // [table rows, max_pages] device pages; in prefill [max_pages] of the one row
  const i32* seats;      // [queries] row of the tables; null in prefill
  const i32* length;     // [queries] tokens that each query sees; null in prefill, where query i sees first + i + 1
  const i32* real_rows;  // [1] queries that are not padding; null in prefill
  u32* scores;           // out [queries, pitch] keys of pick.cuh
  i32 queries, max_pages, first, pitch;
};

struct Walk {
  const ScoreParams& p;
  i32 queries;  // without padding
  i32 query = 0, tile = 0;

  __device__ __forceinline__ Walk(const ScoreParams& p) : p(p), queries(p.real_rows ? *p.real_rows : p.queries) {}

  __device__ __forceinline__ i32 seen_by(i32 of) const { return p.seats ? p.length[of] : p.first + of + 1; }
  __device__ __forceinline__ i32 tiles_of(i32 of) const {  // 0 past the last query
    const i32 seen = of < queries ? seen_by(of) : 0;
    return seen > TOP_K ? (seen + TILE - 1) / TILE : 0;
  }

  // Tiles of all queries; by every warp for itself.
  __device__ __forceinline__ i64 items() const {
    if (!p.seats) return (i64)tiles_of(queries - 1) * queries;
    i64 all = 0;
#pragma unroll 1
    for (i32 base = 0; base < queries; base += 32)
      all += __reduce_add_sync(~0u, tiles_of(base + (i32)threadIdx.x % 32));
    return all;
  }

  // To the item-th of them; by every warp for itself.
  __device__ __forceinline__ void go_to(i64 item) {
    if (!p.seats) {
      tile = (i32)(item / queries), query = (i32)(item % queries);
      return;
    }
    const i32 lane_id = threadIdx.x % 32;
#pragma unroll 1
    for (i32 base = 0; base < queries; base += 32) {
      const i32 own = tiles_of(base + lane_id);
      i32 upto = own;
#pragma unroll
      for (i32 step = 1; step < 32; step *= 2) {
        const i32 left = __shfl_up_sync(~0u, upto, step);
        if (lane_id >= step) upto += left;
      }
      const u32 holders = __ballot_sync(~0u, item < upto);
      if (holders) {
        const i32 holder = __ffs(holders) - 1;
        query = base + holder, tile = (i32)item - __shfl_sync(~0u, upto - own, holder);
        return;
      }
      item -= __shfl_sync(~0u, upto, 31);
    }
  }

  __device__ __forceinline__ void go_on() {
    if (!p.seats) {
      if (++query == queries) query = 0, ++tile;
      return;
    }
    if (++tile < tiles_of(query)) return;
    tile = 0;
    do ++query; while (query < queries && tiles_of(query) == 0);
  }

  __device__ __forceinline__ bool is_scored() const { return tile < tiles_of(query); }

  // Tokens whose keys may be read; in prefill more than this query sees, for the others of the tile.
  __device__ __forceinline__ i32 known() const { return seen_by(p.seats ? query : queries - 1); }

  // Where a token's key lies among the entries.
  __device__ __forceinline__ i64 entry(i32 token) const {
    const i32* pages = p.pages + (p.seats ? (i64)p.seats[query] * p.max_pages : 0);
    return (i64)pages[token / PAGE_TOKENS] * PAGE_TOKENS + token % PAGE_TOKENS;
  }
};
