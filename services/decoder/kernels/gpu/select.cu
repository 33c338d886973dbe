// select: Quest's scores and their exact top-k, for all lanes of a layer, in one launch.
//
// The definition is the twin, kernels/select.py; the set chosen is the twin's (scores are summed in another order,
// so blocks whose scores differ by rounding alone may change places), its order is another: ascending, so the
// open block comes last. Knows bounds and queries, not where blocks lie.
//
// Every lane is cut into equal parts, so that there is about one part a thread block, whatever the rows' lengths;
// a part's scores go to shared memory if the part is the whole lane, else through `keys`, and the last of a
// lane's thread blocks to arrive picks:
//
//   range     smallest and largest key
//   narrow    a histogram between them finds the bin of the TOP_K - 1st best; again within that bin while it
//             holds more than a warp can rank
//   emit      what lies above, and as many of its equals as are wanted, lowest block first; then the open block
//
// A row whose blocks all fit is answered without scores. Bounds of blocks before the open one are read before the
// kernel ahead has ended: within a step nothing may write them before this.
//
// Compile-time: TOP_K, KV_HEADS, GROUPS, GROUP_SIZE (query heads a KV head), HEAD_DIM, BLOCK_TOKENS,
// BLOCKS_PER_PAGE, ELEMENT (0 float32, 1 bfloat16, 2 float16), THREADS.

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
constexpr i32 WARPS = THREADS / 32;
constexpr i32 BINS = 4 * THREADS;
__device__ constexpr i32 bits_of(i32 n) { return n < 2 ? 0 : 1 + bits_of(n / 2); }
constexpr i32 BIN_BITS = bits_of(BINS);
constexpr i32 ALL = 0x7fffffff;
constexpr i32 KEPT = 4096;                                               // keys that shared memory holds
static_assert(2 * HEAD_DIM % VECTOR == 0 && (THREADS & (THREADS - 1)) == 0, "whole pieces; a power of two");

extern __shared__ float4 weight[];  // [VECTOR / 4][PIECES]: of a piece's elements, four by four
__shared__ uint4 kept[KEPT / 4];
__shared__ int4 bins[THREADS];  // counts; zero between uses

// Keys compare as scores do; +0 and -0 are one.
__device__ __forceinline__ u32 to_key(float score) {
  const u32 bits = __float_as_uint(score + 0.f);
  return bits ^ ((i32)bits < 0 ? 0xffffffffu : 0x80000000u);
}

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
    asm("{.reg .b16 l, h; mov.b32 {l, h}, %2; cvt.f32.f16 %0, l; cvt.f32.f16 %1, h;}" : "=f"(out.x), "=f"(out.y) : "r"(word));
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

// Sum of `own` over the threads of a warp up to this one.
__device__ __forceinline__ i32 scan(i32 own, i32 lane_id) {
#pragma unroll
  for (i32 step = 1; step < 32; step *= 2) {
    const i32 left = __shfl_up_sync(~0u, own, step);
    if (lane_id >= step) own += left;
  }
  return own;
}

// `visit(index, key, is there)` for the keys of a warp's stretch, four a thread at once; all threads of it together.
template <typename Visit>
__device__ __forceinline__ void each(const u32* keys, i32 begin, i32 end, Visit visit) {
#pragma unroll 1
  for (i32 base = begin + threadIdx.x % 32; base - (i32)threadIdx.x % 32 < end; base += 128) {
    u32 key[4];
#pragma unroll
    for (i32 u = 0; u < 4; ++u) key[u] = base + u * 32 < end ? keys[base + u * 32] : 0;
#pragma unroll
    for (i32 u = 0; u < 4; ++u) visit(base + u * 32, key[u], base + u * 32 < end);
  }
}

// The TOP_K - 1 best of `count` keys, ascending, into `out`; more than TOP_K - 1 keys, all threads together.
__device__ __forceinline__ void pick(const u32* keys, i32 count, i32* out) {
  __shared__ u32 lows[WARPS], highs[WARPS], list_key[32];
  __shared__ i32 totals[WARPS], insides[WARPS], list_index[32], gathered, found_bin, found_above, found_count;
  const i32 thread = threadIdx.x, warp = thread / 32, lane_id = thread % 32;

  // ---- range; what lies in global memory comes along
  u32 low = ~0u, high = 0;
  const bool fits = count <= KEPT;
#pragma unroll 2
  for (i32 i = thread * 4; i < count; i += THREADS * 4) {
    const uint4 four = *(const uint4*)(keys + i);
    if (fits) kept[i / 4] = four;
    const u32 each_key[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
    for (i32 u = 0; u < 4; ++u)
      if (i + u < count) low = min(low, each_key[u]), high = max(high, each_key[u]);
  }
  if (fits) keys = (const u32*)kept;
  low = __reduce_min_sync(~0u, low), high = __reduce_max_sync(~0u, high);
  if (lane_id == 0) lows[warp] = low, highs[warp] = high;
  if (thread == 0) gathered = 0;
  __syncthreads();
#pragma unroll
  for (i32 w = 0; w < WARPS; ++w) low = min(low, lows[w]), high = max(high, highs[w]);

  // ---- narrow: keys above `high` are wanted, of those from `low` to `high` (`inside` of them) the first `ties`
  const i32 stretch = (count + THREADS - 1) / THREADS * 32;
  const i32 begin = warp * stretch, end = min(count, begin + stretch);
  i32 wanted = TOP_K - 1, inside, shift;
  do {
    const u32 span = high - low;
    shift = max(0, 32 - __clz(span) - BIN_BITS);
    each(keys, begin, end, [&](i32, u32 key, bool there) {
      if (there && key - low <= span) atomicAdd((i32*)bins + (key - low >> shift), 1);
    });
    __syncthreads();
    const int4 own = bins[THREADS - 1 - thread];  // from the top down
    bins[THREADS - 1 - thread] = int4{0, 0, 0, 0};
    const i32 sum = own.x + own.y + own.z + own.w;
    i32 upto = scan(sum, lane_id);
    if (lane_id == 31) totals[warp] = upto;
    __syncthreads();
#pragma unroll
    for (i32 w = 0; w < WARPS; ++w) if (w < warp) upto += totals[w];
    if (upto - sum < wanted && wanted <= upto) {
      const i32 counts[4] = {own.w, own.z, own.y, own.x};
      i32 above = upto - sum, b = 0;
#pragma unroll
      for (i32 next = 0; next < 3; ++next)
        if (b == next && above + counts[next] < wanted) above += counts[next], ++b;
      found_bin = 4 * (THREADS - 1 - thread) + 3 - b, found_above = above;
      found_count = b == 0 ? own.w : b == 1 ? own.z : b == 2 ? own.y : own.x;
    }
    __syncthreads();
    const u32 lower = (u32)found_bin << shift;
    low += lower, high = low + min((1u << shift) - 1, span - lower);
    wanted -= found_above, inside = found_count;
  } while (inside != wanted && shift > 0 && inside > 32);

  // ---- emit
  const bool to_rank = inside != wanted && shift > 0;
  i32 above = 0, equal = 0;
  each(keys, begin, end, [&](i32 index, u32 key, bool there) {
    const bool within = there && key >= low && key <= high;
    above += __popc(__ballot_sync(~0u, there && key > high)), equal += __popc(__ballot_sync(~0u, within));
    if (to_rank && within) {
      const i32 at = atomicAdd(&gathered, 1);
      list_key[at] = key, list_index[at] = index;
    }
  });
  if (lane_id == 0) totals[warp] = above, insides[warp] = equal;
  __syncthreads();
  above = equal = 0;
#pragma unroll
  for (i32 w = 0; w < WARPS; ++w) if (w < warp) above += totals[w], equal += insides[w];
  i32 ties = inside == wanted ? ALL : wanted;
  if (to_rank) {  // every warp for itself
    const bool there = lane_id < inside;
    const u32 mine = there ? list_key[lane_id] : 0;
    i32 larger = 0, no_smaller = 0;
#pragma unroll 1
    for (i32 j = 0; j < inside; ++j) larger += list_key[j] > mine, no_smaller += list_key[j] >= mine;
    const i32 leader = __ffs(__ballot_sync(~0u, there && larger < wanted && wanted <= no_smaller)) - 1;
    low = high = __shfl_sync(~0u, mine, leader), ties = wanted - __shfl_sync(~0u, larger, leader);
    const bool before = there && list_index[lane_id] < begin;
    above += __popc(__ballot_sync(~0u, before && mine > high)), equal = __popc(__ballot_sync(~0u, before && mine == high));
  }
  const u32 below = (1u << lane_id) - 1;
  each(keys, begin, end, [&](i32 index, u32 key, bool there) {
    const u32 higher = __ballot_sync(~0u, there && key > high);
    const u32 same = __ballot_sync(~0u, there && key >= low && key <= high);
    const i32 rank = above + __popc(higher & below), equals_before = equal + __popc(same & below);
    const bool chosen = (higher >> lane_id & 1) || ((same >> lane_id & 1) && equals_before < ties);
    if (chosen) out[rank + min(equals_before, ties)] = index;
    above += __popc(higher), equal += __popc(same);
  });
}

extern "C" __global__ void __launch_bounds__(THREADS, 2) select(const __grid_constant__ SelectParams p) {
  __shared__ i32 parts_in_all[WARPS];
  __shared__ bool is_last;
  let_next_begin();
  const i32 thread = threadIdx.x, warp = thread / 32, lane_id = thread % 32, team = thread / TEAM, part_of_team = thread % TEAM;
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
    u32* keys = parts == 1 && opened <= KEPT ? (u32*)kept : p.keys + (i64)lane * ((p.max_pages * BLOCKS_PER_PAGE + 3) / 4 * 4);

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
