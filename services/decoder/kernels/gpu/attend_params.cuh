// What attend.cu and attend_plain.cu are given, where each thread block works, and how it ends.
//
// The work is cut into items: one split (share of the blocks) of one unit (a KV head of a lane). A thread block takes
// the item of its number, then the one gridDim.x further on, and so on.
//
// Compile-time: HEAD_DIM, GROUP_SIZE (query heads of a KV head), BLOCK_TOKENS, ELEMENT, WARPS, WINDOW (newest tokens
// of a row that are seen at all; 0 = every token is, for that).

struct AttendParams {
  const void* query;      // [rows, groups * heads * GROUP_SIZE, HEAD_DIM]
  const void* pool;       // [pool slots, BLOCK_TOKENS, 2, heads, HEAD_DIM]
  const i32* slots;       // [rows * groups, top_k] pool slots, -1 = none
  const i32* selected;    // [rows * groups, top_k] the blocks in them, -1 = none
  const i32* length;      // [rows] tokens, the newest included
  const i32* real_rows;   // [1]
  void* out;              // as query; zeros where a lane sees no token
  float* lse;             // [rows, groups * heads * GROUP_SIZE] log of the sum of exp(score), or NOTHING; may be null
  float* sums;            // parts.cuh: [units, splits, GROUP_SIZE, HEAD_DIM]
  float2* stats;          // parts.cuh: [units, splits, GROUP_SIZE]
  u32* arrived;           // [units], zero between launches
  float scaling;
  i32 top_k, groups, heads, splits, items;  // items: of all rows, padding included

  __device__ __forceinline__ i32 real_items() const { return *real_rows * groups * heads * splits; }
  __device__ __forceinline__ i32 share() const { return (top_k + splits - 1) / splits; }  // blocks of a split
};

// An item's place in the tensors.
struct Place {
  i32 unit, split, head, row;
  const i32 *slots, *selected;  // its share of the lane's blocks
  i32 tokens;                   // in them

  __device__ __forceinline__ Place(const AttendParams& p, i32 item) {
    unit = item / p.splits, split = item % p.splits;
    const i32 lane = unit / p.heads, first = split * p.share();
    head = unit % p.heads, row = lane / p.groups;
    slots = p.slots + (i64)lane * p.top_k + first, selected = p.selected + (i64)lane * p.top_k + first;
    tokens = max(0, min(p.share(), p.top_k - first)) * BLOCK_TOKENS;
  }

  __device__ __forceinline__ Token token(i32 i) const { return Token(slots, selected, tokens, i); }
};

// Whether a row of `length` tokens sees a token.
__device__ __forceinline__ bool is_seen(const Token& token, i32 length) {
  return token.seen(length) && (WINDOW == 0 || token.block * BLOCK_TOKENS + token.offset >= length - WINDOW);
}

// The key of a token's `head`, in bytes of the pool.
__device__ __forceinline__ i64 key_of(const AttendParams& p, const Token& token, i32 head) {
  return (token.record() * 2 * p.heads + head) * (HEAD_DIM * ELEMENT_BYTES);
}

// Of a unit's first query head, in elements.
__device__ __forceinline__ i64 query_of(i32 unit) { return (i64)unit * GROUP_SIZE * HEAD_DIM; }

// The warps' parts of an item meet, then those of the unit's items, and the result is written.
template <i32 PARTS, i32 THREADS>
__device__ __forceinline__ void finish(const AttendParams& p, i32 item, const Part<GROUP_SIZE, HEAD_DIM>* parts) {
  const i32 unit = item / p.splits, split = item % p.splits;
  const i64 first = (i64)unit * p.splits * GROUP_SIZE;
  const Meeting<GROUP_SIZE, HEAD_DIM> meeting = {p.sums + first * HEAD_DIM, p.stats + first, p.arrived + unit, p.splits};
  const auto write = [&](i32 row, i32 dim, const Merged& merged) {
    const bool any = merged.weight > 0;
    store_4(p.out, query_of(unit) + row * HEAD_DIM + dim, any ? merged.mean() : float4{0, 0, 0, 0});
    if (p.lse && dim == 0)
      p.lse[(i64)unit * GROUP_SIZE + row] = any ? merged.top * 0.69314718f + logf(merged.weight) : NOTHING;  // ln 2
  };
  merge_warps<PARTS, GROUP_SIZE, HEAD_DIM, THREADS>(parts, [&](i32 row, i32 dim, const Merged& merged) {
    if (p.splits == 1) write(row, dim, merged);
    else meeting.put(split, row, dim, merged);
  });
  if (p.splits > 1) meeting.template close<THREADS>(0, GROUP_SIZE * HEAD_DIM, write);
}
