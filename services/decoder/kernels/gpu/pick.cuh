// pick: the PICKED largest of many keys, ascending by place, by one thread block; of equals the first.
//
// Knows keys and their places, not what they rank. THREADS (a power of two) and PICKED must be defined before.
//
//   range     smallest and largest key
//   narrow    a histogram between them finds the bin of the last that is wanted; again within that bin while it
//             holds more than a warp can rank
//   emit      what lies above, and as many of its equals as are wanted

constexpr i32 WARPS = THREADS / 32;
constexpr i32 BINS = 4 * THREADS;
__device__ constexpr i32 bits_of(i32 n) { return n < 2 ? 0 : 1 + bits_of(n / 2); }
constexpr i32 BIN_BITS = bits_of(BINS);
constexpr i32 ALL = 0x7fffffff;
constexpr i32 KEPT = 4096;  // keys that shared memory holds
static_assert((THREADS & (THREADS - 1)) == 0, "a power of two");

__shared__ uint4 kept[KEPT / 4];
__shared__ int4 bins[THREADS];  // counts; zero between uses

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

// The PICKED best of `count` keys, ascending, into `out`; more than PICKED keys, all threads together.
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
  i32 wanted = PICKED, inside, shift;
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
    above += __popc(__ballot_sync(~0u, before && mine > high));
    equal = __popc(__ballot_sync(~0u, before && mine == high));
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
