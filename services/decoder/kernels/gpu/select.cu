// select: Quest's scores and their exact top-k, for all lanes of a layer, in one launch.
//
// The definition is the twin, kernels/select.py; the set chosen is the twin's (scores are summed in another order,
// so blocks whose scores differ by rounding alone may change places), its order is another: ascending, so the
// open block comes last. Knows bounds and queries, not where blocks lie.
//
// Every lane is cut into equal parts, so that there is about one part a thread block, whatever the rows' lengths;
// a part's scores go to shared memory if the part is the whole lane, else through `keys`, and the last of a
// lane's thread blocks to arrive picks (pick.cuh), then adds the open block.
//
// A row whose blocks all fit is answered without scores. Bounds of blocks before the open one are read before the
// kernel ahead has ended: within a step nothing may write them before this.
//
// Compile-time: TOP_K, KV_HEADS, GROUPS, GROUP_SIZE (query heads a KV head), HEAD_DIM, BLOCK_TOKENS,
// BLOCKS_PER_PAGE, ELEMENT (0 float32, 1 bfloat16, 2 float16), THREADS.

constexpr i32 PICKED = TOP_K - 1;  // beside the open block
#include "pick.cuh"
#include "sort_key.cuh"

struct SelectParams {
  const char* query;        // [rows, KV_HEADS * GROUP_SIZE, HEAD_DIM], rows query_stride bytes apart
  const int4* bounds;       // [device pages, BLOCKS_PER_PAGE, KV_HEADS, 2 * HEAD_DIM]
  const i32* seats;         // [rows] row of the tables that each row of the batch sits in
  const i32* length;        // [rows] tokens, the newest included
  const i32* real_rows;     // [1] rows of the batch that are not padding
  const i32* device_pages;  // [table rows, max_pages]
  i32* selected;            // out [rows * GROUPS, TOP_K] blocks, -1 = none; padding rows are left alone
  u32* keys;                // workspace [rows * GROUPS, max_pages * BLOCKS_PER_PAGE rounded up to 4]
  u32* arrived;             // [rows * GROUPS], zero between launches
  i64 query_stride;
  i32 max_pages;
};

constexpr i32 ELEMENT_BYTES = ELEMENT == 0 ? 4 : 2;
constexpr i32 VECTOR = 16 / ELEMENT_BYTES;                               // elements of a 16-byte piece
constexpr i32 HEADS = KV_HEADS / GROUPS;
constexpr i32 PIECES = HEADS * 2 * HEAD_DIM / VECTOR;                    // of one block's bounds in one group
__device__ constexpr i32 power_of_two_below(i32 n) { return n < 2 ? 1 : 2 * power_of_two_below(n / 2); }
constexpr i32 TEAM = power_of_two_below(PIECES / 4 < 32 ? PIECES / 4 : 32);  // threads that share a block
constexpr i32 TEAMS = THREADS / TEAM;
constexpr i32 LOADS = (PIECES + TEAM - 1) / TEAM;                        // of a thread, for one block
constexpr i32 DEPTH = LOADS < 8 ? LOADS : 8;                             // of those at once
constexpr i32 STAGES = (LOADS + DEPTH - 1) / DEPTH;
constexpr i32 UNROLL = 8 / DEPTH;                                        // blocks of a team at once
static_assert(2 * HEAD_DIM % VECTOR == 0, "bounds must be whole 16-byte pieces");

extern __shared__ float4 weight[];  // [VECTOR / 4][PIECES]: of a piece's elements, four by four

__device__ __forceinline__ int4 load_once(const int4* from) {
  int4 value;
  asm volatile("ld.global.nc.L1::no_allocate.v4.s32 {%0,%1,%2,%3}, [%4];"
               : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
               : "l"(from));
  return value;
}

// How many arrived before; what they wrote until then is seen by whoever comes after.
__device__ __forceinline__ u32 arrive(u32* counter) {
  u32 before;
  asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], 1;" : "=r"(before) : "l"(counter) : "memory");
  return before;
}

__device__ __forceinline__ float2 unpack(i32 word) {  // two halves
  float2 out;
  if (ELEMENT == 1) {
    out.x = __uint_as_float((u32)word << 16);
    out.y = __uint_as_float((u32)word & 0xffff0000u);
  } else {
    asm("{.reg .b16 l, h; mov.b32 {l, h}, %2; cvt.f32.f16 %0, l; cvt.f32.f16 %1, h;}"
        : "=f"(out.x), "=f"(out.y)
        : "r"(word));
  }
  return out;
}

__device__ __forceinline__ float query_at(const char* row, i32 at) {
  if (ELEMENT == 0) return ((const float*)row)[at];
  return unpack(((const u16*)row)[at]).x;
}

__device__ __forceinline__ float dot(const int4& piece, i32 index, float sum) {
  if (ELEMENT == 0) {
    const float4 w = weight[index];
    sum = fmaf(__int_as_float(piece.x), w.x, sum), sum = fmaf(__int_as_float(piece.y), w.y, sum);
    return fmaf(__int_as_float(piece.w), w.w, fmaf(__int_as_float(piece.z), w.z, sum));
  }
  const float4 w = weight[index], v = weight[PIECES + index];
  const float2 a = unpack(piece.x), b = unpack(piece.y), c = unpack(piece.z), d = unpack(piece.w);
  sum = fmaf(b.y, w.w, fmaf(b.x, w.z, fmaf(a.y, w.y, fmaf(a.x, w.x, sum))));
  return fmaf(d.y, v.w, fmaf(d.x, v.z, fmaf(c.y, v.y, fmaf(c.x, v.x, sum))));
}

// The score is linear in relu([q, -q]), so the heads that share keys are summed before the product.
__device__ __forceinline__ void make_weight(const char* query, i32 group) {
#pragma unroll 1
  for (i32 i = threadIdx.x; i < HEADS * HEAD_DIM; i += THREADS) {
    const i32 head = i / HEAD_DIM, d = i % HEAD_DIM;
    float up = 0, down = 0;
#pragma unroll
    for (i32 g = 0; g < GROUP_SIZE; ++g) {
      const float q = query_at(query, ((group * HEADS + head) * GROUP_SIZE + g) * HEAD_DIM + d);
      up += fmaxf(q, 0.f), down += fmaxf(-q, 0.f);
    }
    auto put = [&](i32 at, float value) {
      const i32 quad = at / 4;
      ((float*)&weight[quad % (VECTOR / 4) * PIECES + quad / (VECTOR / 4)])[at % 4] = value;
    };
    put(head * 2 * HEAD_DIM + d, up), put((head * 2 + 1) * HEAD_DIM + d, down);
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, 2) select(const __grid_constant__ SelectParams p) {
  __shared__ i32 parts_in_all[WARPS];
  __shared__ bool is_last;
  let_next_begin();
  const i32 thread = threadIdx.x, warp = thread / 32, lane_id = thread % 32;
  const i32 team = thread / TEAM, part_of_team = thread % TEAM;
  const i32 rows = *p.real_rows, blocks = gridDim.x;
  bins[thread] = int4{0, 0, 0, 0};
  auto opened_of = [&](i32 row) { return row < rows ? (p.length[row] - 1) / BLOCK_TOKENS : 0; };
  auto is_scored = [](i32 opened) { return TOP_K > 1 && opened >= TOP_K; };
  auto parts_of = [&](i32 opened, i32 size) { return is_scored(opened) ? (opened + size - 1) / size : 0; };

  // ---- divide: each warp tries one size of the parts; the smallest that gives no thread block too many is taken
  i32 scored = 0, lanes = 0;
#pragma unroll 1
  for (i32 row = lane_id; row < rows; row += 32) {
    const i32 opened = opened_of(row);
    if (is_scored(opened)) scored += opened, ++lanes;  // fewer than 2^31 blocks, of all lanes
  }
  scored = __reduce_add_sync(~0u, scored), lanes = __reduce_add_sync(~0u, lanes) * GROUPS;
  const i32 limit = max(1, (lanes + blocks - 1) / blocks) * blocks;
  const i32 smallest = max((scored * GROUPS + limit - 1) / limit, TEAMS);
  auto size_tried = [&](i32 w) { return w == WARPS - 1 ? ALL / 2 : smallest + (i32)((i64)smallest * w * w / 16); };
  i32 parts_here = 0;
#pragma unroll 1
  for (i32 row = lane_id; row < rows; row += 32) parts_here += parts_of(opened_of(row), size_tried(warp));
  parts_here = __reduce_add_sync(~0u, parts_here) * GROUPS;
  if (lane_id == 0) parts_in_all[warp] = parts_here;
  __syncthreads();
  i32 choice = 0;
#pragma unroll 1
  while (parts_in_all[choice] > limit) ++choice;
  const i32 size = size_tried(choice), items = parts_in_all[choice];

  bool waited = false;
#pragma unroll 1
  for (i32 item = blockIdx.x; item < items; item += blocks) {
    // ---- the part's row, group and place, by every warp for itself
    i32 row = 0, opened = 0, inside = item;
#pragma unroll 1
    for (;; row += 32) {
      opened = opened_of(row + lane_id);
      const i32 own = parts_of(opened, size) * GROUPS, upto = scan(own, lane_id);
      const u32 holders = __ballot_sync(~0u, inside < upto);
      if (holders) {
        const i32 holder = __ffs(holders) - 1;
        row += holder, opened = __shfl_sync(~0u, opened, holder), inside -= __shfl_sync(~0u, upto - own, holder);
        break;
      }
      inside -= __shfl_sync(~0u, upto, 31);
    }
    const i32 parts = parts_of(opened, size), group = inside / parts, part = inside % parts;
    const i32 part_size = (opened + parts - 1) / parts, last = min(opened, (part + 1) * part_size);
    const i32 lane = row * GROUPS + group;
    const i32* pages = p.device_pages + (i64)p.seats[row] * p.max_pages;
    const i32 pitch = (p.max_pages * BLOCKS_PER_PAGE + 3) / 4 * 4;
    u32* keys = parts == 1 && opened <= KEPT ? (u32*)kept : p.keys + (i64)lane * pitch;

    // ---- score blocks `base` to `last` - 1 of the lane, UNROLL a team at once
    i32 base = part * part_size;
    i32 page[UNROLL];
    int4 piece[UNROLL][DEPTH];
    auto look_up = [&](i32 from) {
#pragma unroll
      for (i32 u = 0; u < UNROLL; ++u) {
        const i32 block = from + u * TEAMS + team;
        page[u] = block < last ? pages[block / BLOCKS_PER_PAGE] : 0;
      }
    };
    auto load = [&](i32 from, i32 stage) {
#pragma unroll
      for (i32 u = 0; u < UNROLL; ++u) {
        const i32 block = from + u * TEAMS + team;
        const i64 place = (i64)page[u] * BLOCKS_PER_PAGE + block % BLOCKS_PER_PAGE;
        const int4* source = p.bounds + (place * GROUPS + group) * PIECES;
#pragma unroll
        for (i32 l = 0; l < DEPTH; ++l) {
          const i32 index = (stage * DEPTH + l) * TEAM + part_of_team;
          if (block < last && index < PIECES) piece[u][l] = load_once(source + index);
        }
      }
    };
    look_up(base);
    load(base, 0);
    if (!waited) wait_for_previous();
    waited = true;
    make_weight(p.query + row * p.query_stride, group);
    __syncthreads();
#pragma unroll 1
    for (; base < last; base += TEAMS * UNROLL) {
      float score[UNROLL] = {};
#pragma unroll
      for (i32 stage = 0; stage < STAGES; ++stage) {
        if (stage) load(base, stage);
#pragma unroll
        for (i32 l = 0; l < DEPTH; ++l) {
          const i32 index = (stage * DEPTH + l) * TEAM + part_of_team;
          if (index < PIECES) {
#pragma unroll
            for (i32 u = 0; u < UNROLL; ++u) score[u] = dot(piece[u][l], index, score[u]);
          }
        }
      }
      look_up(base + TEAMS * UNROLL);
      load(base + TEAMS * UNROLL, 0);
#pragma unroll
      for (i32 u = 0; u < UNROLL; ++u) {
#pragma unroll
        for (i32 step = TEAM / 2; step; step /= 2) score[u] += __shfl_xor_sync(~0u, score[u], step);
        const i32 block = base + u * TEAMS + team;
        if (part_of_team == 0 && block < last) keys[block] = to_key(score[u]);
      }
    }

    // ---- who comes last to this lane picks
    __syncthreads();
    if (parts > 1) {
      if (thread == 0) {
        is_last = arrive(&p.arrived[lane]) == (u32)parts - 1;
        if (is_last) p.arrived[lane] = 0;
      }
      __syncthreads();
      if (!is_last) continue;
    }
    i32* out = p.selected + (i64)lane * TOP_K;
    pick(keys, opened, out);
    if (thread == 0) out[TOP_K - 1] = opened;
    __syncthreads();
  }
  if (!waited) wait_for_previous();

  // ---- rows whose every block is chosen
#pragma unroll 1
  for (i32 lane = blockIdx.x; lane < rows * GROUPS; lane += blocks) {
    const i32 opened = opened_of(lane / GROUPS);
    if (is_scored(opened)) continue;
#pragma unroll 1
    for (i32 j = thread; j < TOP_K; j += THREADS)
      p.selected[(i64)lane * TOP_K + j] = TOP_K == 1 ? opened : j <= opened ? j : -1;
  }
}
