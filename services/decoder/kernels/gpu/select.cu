// select: Quest's scores and their exact top-k, for all lanes of a layer, in one launch.
//
// The definition is the twin, kernels/select.py; the set chosen is the twin's (scores are summed in another order,
// so blocks whose scores differ by rounding alone may change places), its order is another: ascending, so the
// open block comes last. Knows bounds and queries, not where blocks lie.
//
// The blocks to score, of all lanes one after the other, are dealt out evenly to the thread blocks, whatever the
// rows' lengths. Scores go through `keys`; of the thread blocks that share a lane, the last to arrive picks:
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
// BLOCKS_PER_PAGE, ELEMENT (0 float32, 1 bfloat16, 2 float16), THREADS, MAX_ROWS.

struct SelectParams {
  const char* query;        // [rows, KV_HEADS * GROUP_SIZE, HEAD_DIM], rows query_stride bytes apart
  const int4* bounds;       // [device pages, BLOCKS_PER_PAGE, KV_HEADS, 2 * HEAD_DIM]
  const i32* seats;         // [rows] row of the tables that each row of the batch sits in
  const i32* length;        // [rows] tokens, the newest included
  const i32* real_rows;     // [1] rows of the batch that are not padding
  const i32* device_pages;  // [table rows, max_pages]
  i32* selected;            // out [rows * GROUPS, TOP_K] blocks, -1 = none; padding rows are left alone
  u32* keys;                // workspace [rows * GROUPS, max_pages * BLOCKS_PER_PAGE]
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
static_assert(2 * HEAD_DIM % VECTOR == 0 && (THREADS & (THREADS - 1)) == 0, "whole pieces; a power of two");

extern __shared__ float4 weight[];  // [VECTOR / 4][PIECES]: of a piece's elements, four by four
__shared__ u32 begin[MAX_ROWS + 1];  // blocks to score, all groups, before each row
__shared__ int4 bins[THREADS];       // counts; zero between uses

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

// The TOP_K - 1 best of `count` keys, ascending, into `out`; more than TOP_K - 1 keys, all threads together.
__device__ __forceinline__ void pick(const u32* keys, i32 count, i32* out) {
  __shared__ u32 lows[WARPS], highs[WARPS], list[32];
  __shared__ i32 totals[WARPS], equals[WARPS], gathered, found_bin, found_above, found_count;
  const i32 thread = threadIdx.x, warp = thread / 32, lane_id = thread % 32;
  const i32 stretch = (count + THREADS - 1) / THREADS * 32;
  const i32 first = warp * stretch + lane_id, last = min(count, (warp + 1) * stretch);

  // ---- range
  u32 low = ~0u, high = 0;
  for (i32 i = first; i < last; i += 32) low = min(low, keys[i]), high = max(high, keys[i]);
  low = __reduce_min_sync(~0u, low), high = __reduce_max_sync(~0u, high);
  if (lane_id == 0) lows[warp] = low, highs[warp] = high;
  if (thread == 0) gathered = 0;
  __syncthreads();
#pragma unroll
  for (i32 w = 0; w < WARPS; ++w) low = min(low, lows[w]), high = max(high, highs[w]);

  // ---- narrow: in the end `threshold` and above are wanted, of its equals the first `ties`
  i32 wanted = TOP_K - 1, ties;
  u32 threshold;
  for (;;) {
    const u32 span = high - low;
    const i32 shift = max(0, 32 - __clz(span) - BIN_BITS);
    for (i32 i = first; i < last; i += 32) {
      const u32 above_low = keys[i] - low;
      if (above_low <= span) atomicAdd((i32*)bins + (above_low >> shift), 1);
    }
    __syncthreads();
    const int4 own = bins[THREADS - 1 - thread];  // from the top down
    bins[THREADS - 1 - thread] = int4{0, 0, 0, 0};
    const i32 sum = own.x + own.y + own.z + own.w;
    i32 upto = sum;
#pragma unroll
    for (i32 step = 1; step < 32; step *= 2) {
      const i32 left = __shfl_up_sync(~0u, upto, step);
      if (lane_id >= step) upto += left;
    }
    if (lane_id == 31) totals[warp] = upto;
    __syncthreads();
#pragma unroll
    for (i32 w = 0; w < WARPS; ++w) if (w < warp) upto += totals[w];
    if (upto - sum < wanted && wanted <= upto) {
      const i32 counts[4] = {own.w, own.z, own.y, own.x};
      i32 above = upto - sum;
      bool done = false;
#pragma unroll
      for (i32 b = 0; b < 4; ++b) {
        if (!done && wanted <= above + counts[b]) {
          found_bin = 4 * (THREADS - 1 - thread) + 3 - b, found_above = above, found_count = counts[b];
          done = true;
        }
        above += counts[b];
      }
    }
    __syncthreads();
    const i32 inside = found_count;
    wanted -= found_above;
    const u32 lower = (u32)found_bin << shift;
    low += lower, high = low + min((1u << shift) - 1, span - lower);
    if (inside == wanted || shift == 0) {
      threshold = low, ties = inside == wanted ? ALL : wanted;
      break;
    }
    if (inside <= 32) {
      for (i32 i = first; i < last; i += 32) {
        const u32 key = keys[i];
        if (key - low <= high - low) list[atomicAdd(&gathered, 1)] = key;
      }
      __syncthreads();
      const u32 mine = lane_id < inside ? list[lane_id] : 0;
      i32 larger = 0, no_smaller = 0;
      for (i32 j = 0; j < inside; ++j) larger += list[j] > mine, no_smaller += list[j] >= mine;
      const i32 leader = __ffs(__ballot_sync(~0u, lane_id < inside && larger < wanted && wanted <= no_smaller)) - 1;
      threshold = __shfl_sync(~0u, mine, leader), ties = wanted - __shfl_sync(~0u, larger, leader);
      break;
    }
  }

  // ---- emit
  i32 above = 0, equal = 0;
  for (i32 i = first; i - lane_id < last; i += 32) {
    const u32 key = i < last ? keys[i] : 0;
    above += __popc(__ballot_sync(~0u, i < last && key > threshold));
    equal += __popc(__ballot_sync(~0u, i < last && key == threshold));
  }
  if (lane_id == 0) totals[warp] = above, equals[warp] = equal;
  __syncthreads();
  above = equal = 0;
#pragma unroll
  for (i32 w = 0; w < WARPS; ++w) if (w < warp) above += totals[w], equal += equals[w];
  const u32 below = (1u << lane_id) - 1;
  for (i32 i = first; i - lane_id < last; i += 32) {
    const u32 key = i < last ? keys[i] : 0;
    const u32 higher = __ballot_sync(~0u, i < last && key > threshold);
    const u32 same = __ballot_sync(~0u, i < last && key == threshold);
    const i32 rank = above + __popc(higher & below), equals_before = equal + __popc(same & below);
    const bool chosen = (higher >> lane_id & 1) || ((same >> lane_id & 1) && equals_before < ties);
    if (chosen) out[rank + min(equals_before, ties)] = i;
    above += __popc(higher), equal += __popc(same);
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, 2) select(const __grid_constant__ SelectParams p) {
  __shared__ bool is_last;
  let_next_begin();
  const i32 thread = threadIdx.x, lane_id = thread % 32, team = thread / TEAM, part = thread % TEAM;
  const i32 rows = *p.real_rows;
  bins[thread] = int4{0, 0, 0, 0};
  auto open_block = [&](i32 row) { return (p.length[row] - 1) / BLOCK_TOKENS; };
  if (thread < 32) {
    u32 total = 0;
    for (i32 base = 0; base < rows; base += 32) {
      const i32 opened = base + lane_id < rows ? open_block(base + lane_id) : 0;
      const u32 own = TOP_K > 1 && opened >= TOP_K ? (u32)opened * GROUPS : 0;
      u32 sum = own;
      for (i32 step = 1; step < 32; step *= 2) {
        const u32 left = __shfl_up_sync(~0u, sum, step);
        if (lane_id >= step) sum += left;
      }
      if (base + lane_id < rows) begin[base + lane_id] = total + sum - own;
      total += __shfl_sync(~0u, sum, 31);
    }
    if (lane_id == 0) begin[rows] = total;
  }
  __syncthreads();
  const u32 total = begin[rows];
  const u32 share = max((total + gridDim.x - 1) / gridDim.x, (u32)TEAMS);
  u32 at = blockIdx.x * share;
  const u32 end = min(at + share, total);
  bool waited = false;

  while (at < end) {
    i32 row = 0, beyond = rows;  // the last row that begins at or before `at`
    while (beyond - row > 1) {
      const i32 middle = (row + beyond) / 2;
      if (begin[middle] <= at) row = middle; else beyond = middle;
    }
    const i32 opened = (i32)((begin[row + 1] - begin[row]) / GROUPS);
    const i32 group = (i32)((at - begin[row]) / opened);
    const u32 lane_begin = begin[row] + (u32)group * opened, lane_end = lane_begin + opened;
    const i32 lane = row * GROUPS + group;
    const i32 last = (i32)(min(end, lane_end) - lane_begin);
    const i32* pages = p.device_pages + (i64)p.seats[row] * p.max_pages;
    u32* keys = p.keys + (i64)lane * p.max_pages * BLOCKS_PER_PAGE;

    // ---- score blocks `base` to `last` - 1 of the lane, UNROLL a team at once
    i32 base = (i32)(at - lane_begin);
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
          const i32 index = (stage * DEPTH + l) * TEAM + part;
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
    for (; base < last; base += TEAMS * UNROLL) {
      float score[UNROLL] = {};
#pragma unroll
      for (i32 stage = 0; stage < STAGES; ++stage) {
        if (stage) load(base, stage);
#pragma unroll
        for (i32 l = 0; l < DEPTH; ++l) {
          const i32 index = (stage * DEPTH + l) * TEAM + part;
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
        if (part == 0 && block < last) keys[block] = to_key(score[u]);
      }
    }
    at = lane_begin + last;

    // ---- who comes last to this lane picks
    const u32 sharers = (lane_end - 1) / share - lane_begin / share + 1;
    __syncthreads();
    if (sharers > 1) {
      if (thread == 0) {
        __threadfence();
        is_last = atomicAdd(&p.arrived[lane], 1) == sharers - 1;
        if (is_last) p.arrived[lane] = 0;
        __threadfence();
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
  for (i32 lane = blockIdx.x; lane < rows * GROUPS; lane += gridDim.x) {
    const i32 row = lane / GROUPS;
    if (begin[row] != begin[row + 1]) continue;
    const i32 opened = open_block(row);
    for (i32 j = thread; j < TOP_K; j += THREADS)
      p.selected[(i64)lane * TOP_K + j] = TOP_K == 1 ? opened : j <= opened ? j : -1;
  }
}
