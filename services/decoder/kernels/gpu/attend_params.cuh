// What attend.cu and attend_plain.cu are given, where each thread block works, and how it ends.
//
// Compile-time: HEAD_DIM, GROUP_SIZE (query heads of a KV head), BLOCK_TOKENS, ELEMENT, WARPS.

struct AttendParams {
  const void* query;      // [rows, groups * heads * GROUP_SIZE, HEAD_DIM]
  const void* pool;       // [pool slots, BLOCK_TOKENS, 2, heads, HEAD_DIM]
  const i32* slots;       // [rows * groups, top_k] pool slots, -1 = none
  const i32* selected;    // [rows * groups, top_k] the blocks in them, -1 = none
  const i32* length;      // [rows] tokens, the newest included
  const i32* real_rows;   // [1]
  void* out;              // as query
  float* partial;         // parts.cuh's sums of all units, then their stats; a unit is a KV head of a lane
  u32* arrived;           // [units, CLUSTER], zero between launches
  float scaling;
  i32 top_k, groups, heads, splits;
};

// What a thread block works on: one split of one unit.
struct Place {
  i32 unit, head, row;
  i64 query;                  // of the unit's first query head, in elements
  const i32 *slots, *selected;  // its share of the lane's blocks
  i32 tokens;                 // in them

  __device__ __forceinline__ explicit Place(const AttendParams& p) {
    const i32 split = blockIdx.x % p.splits;
    unit = blockIdx.x / p.splits;
    const i32 lane = unit / p.heads;
    head = unit % p.heads, row = lane / p.groups;
    query = (i64)unit * GROUP_SIZE * HEAD_DIM;
    const i32 share = (p.top_k + p.splits - 1) / p.splits, first = split * share;
    slots = p.slots + (i64)lane * p.top_k + first, selected = p.selected + (i64)lane * p.top_k + first;
    tokens = max(0, min(share, p.top_k - first)) * BLOCK_TOKENS;
  }

  // The key of a token's first head, in bytes of the pool.
  __device__ __forceinline__ i64 key(const AttendParams& p, const Token& token) const {
    return (token.record() * 2 * p.heads + head) * (HEAD_DIM * ELEMENT_BYTES);
  }
};

// The parts of a unit's thread blocks meet, and the result is written.
template <i32 THREADS>
__device__ __forceinline__ void finish(const AttendParams& p, const Place& place, Part<GROUP_SIZE, HEAD_DIM>& own) {
  const i32 units = gridDim.x / p.splits, groups = p.splits / CLUSTER;
  float* sums = p.partial + (i64)place.unit * groups * GROUP_SIZE * HEAD_DIM;
  float2* stats = (float2*)(p.partial + (i64)units * groups * GROUP_SIZE * HEAD_DIM);
  stats += (i64)place.unit * p.splits * GROUP_SIZE;
  u32* arrived = p.arrived + place.unit * CLUSTER;
  merge_blocks<GROUP_SIZE, HEAD_DIM, THREADS>(own, sums, stats, arrived, p.splits,
      [&](i32 row, i32 dim, const Merged& merged) {
        store_4(p.out, place.query + row * HEAD_DIM + dim, merged.mean());
      });
}
