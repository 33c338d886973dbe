// resolve: logical blocks -> hot slots, with the misses fetched from host memory. One launch a layer.
//
// The definition is the twin, kernels/lru.py; this agrees with it slot for slot, order included. Knows one
// layer's tables and bytes (struct below), no tensor library, no request.
//
// A cluster of CLUSTER thread blocks serves one lane. Every block of it reads the whole selection and so
// knows every miss; the LRU order is split between them, and the copies too:
//
//   look up   selection -> lane slots; a bitmap of chosen slots; misses into a hash table (repetitions!)
//   rank      misses in selection order
//   divide    each block classes its stretch of `order` as stale, hit or open; the counts are exchanged
//   update    stale slots of rank < misses become victims; order, block <-> slot are rewritten in place
//   copy      16 bytes a thread, COPY_DEPTH loads in flight before the first store
//
// Compile-time: BLOCK_BYTES (multiple of 16), CLUSTER, THREADS (multiple of 32, at least 128), ID_TILES =
// ceil(top_k / THREADS), HASH_SLOTS (power of two, >= 2 top_k), COPY_THREADS (of a thread block; too many reads in
// flight thrash the address translation), COPY_DEPTH, SKIP_IO (benchmark probe: no bytes move).

using i32 = int;
using u32 = unsigned int;
using u64 = unsigned long long;

struct ResolveParams {
  const i32* selected;      // [rows * groups, top_k] blocks, -1 = none
  const i32* open_block;    // [rows] block of each row's newest token
  const i32* seats;         // [rows] row of the tables that each row of the batch sits in
  const i32* real_rows;     // [1] rows of the batch that are not padding
  i32* slots;               // out [rows * groups, top_k] pool slots, -1 = none
  i32* open_slot;           // out [rows * groups] pool slots
  i32* block_to_slot;       // [lanes, max_blocks] lane slot, -1 = host only
  i32* slot_to_block;       // [lanes, max_capacity] block, -1 = empty
  i32* order;               // [lanes, max_capacity] lane slots, stale to recent, -1 past the capacity
  i32* resident;            // [lanes] blocks that have a slot
  const i32* pool_slot;     // [lanes, max_capacity] lane slot -> pool slot
  const i32* host_pages;    // [table rows, max_pages] host page of each page
  const int4* arena;        // this layer's blocks in host memory
  int4* pool;               // this layer's hot slots
  u64* counters;            // [6] chosen, hits, misses, evictions, fetched bytes, nanoseconds
  i32 top_k, groups, max_blocks, max_capacity, max_pages, blocks_per_page;
};

constexpr i32 WARPS = THREADS / 32;
constexpr i32 CHUNKS = BLOCK_BYTES / 16;  // 16-byte pieces of a block
constexpr i32 NOWHERE = 0x7fffffff;
constexpr i32 EMPTY = -1;

enum Counter { CHOSEN, HITS, MISSES, EVICTIONS, FETCHED_BYTES, NANOSECONDS };

__device__ __forceinline__ u64 nanoseconds() {
  u64 now;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
  return now;
}

// Host memory through the bus: volatile, so that nothing an earlier launch wrote is served from a cache line.
__device__ __forceinline__ int4 load_host(const int4* from) {
  int4 value;
  asm volatile("ld.volatile.global.v4.s32 {%0,%1,%2,%3}, [%4];"
               : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
               : "l"(from));
  return value;
}

// This block's number in its cluster.
__device__ __forceinline__ i32 cluster_rank() {
#if CLUSTER == 1
  return 0;
#else
  i32 rank;
  asm volatile("mov.u32 %0, %cluster_ctarank;" : "=r"(rank));
  return rank;
#endif
}

// A barrier of all threads of the cluster; orders shared and global memory between them.
__device__ __forceinline__ void cluster_sync() {
#if CLUSTER == 1
  __syncthreads();
#else
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
}

// What lies at `own` in the shared memory of block `rank` of the cluster.
__device__ __forceinline__ u32 load_shared_of(const void* own, i32 rank) {
#if CLUSTER == 1
  return *(const u32*)own;
#else
  u32 address, value;
  const u32 local = (u32)__cvta_generic_to_shared(own);
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(local), "r"(rank));
  asm volatile("ld.shared::cluster.u32 %0, [%1];" : "=r"(value) : "r"(address) : "memory");
  return value;
#endif
}

// Exclusive prefix sums of `counts` in place, by one warp; returns the total to every thread of it.
__device__ u32 scan_in_place(u32* counts, i32 size, i32 lane_id) {
  u32 total = 0;
  for (i32 base = 0; base < size; base += 32) {
    const i32 at = base + lane_id;
    const u32 own = at < size ? counts[at] : 0;
    u32 sum = own;
    for (i32 step = 1; step < 32; step *= 2) {
      const u32 left = __shfl_up_sync(~0u, sum, step);
      if (lane_id >= step) sum += left;
    }
    if (at < size) counts[at] = total + sum - own;
    total += __shfl_sync(~0u, sum, 31);
  }
  return total;
}

// Set bits in `bits`, by one warp; the count is every thread's.
__device__ u32 count_bits(const u32* bits, i32 words, i32 lane_id) {
  u32 count = 0;
  for (i32 i = lane_id; i < words; i += 32) count += __popc(bits[i]);
  return __reduce_add_sync(~0u, count);
}

// Position of `block` in the hash table, entering it if it is new.
__device__ __forceinline__ i32 hash_enter(i32* keys, i32 block) {
  u32 at = (u32)block * 2654435761u >> 7;
  for (;;) {
    at &= HASH_SLOTS - 1;
    const i32 before = atomicCAS(&keys[at], EMPTY, block);
    if (before == EMPTY || before == block) return (i32)at;
    ++at;
  }
}

// Dynamic shared memory, in this order; resolve.py computes the same sum.
//   i32 hash_key[HASH_SLOTS], hash_rank[HASH_SLOTS], miss_block[top_k + 1], victim[top_k + 1]
//   u32 miss_home[top_k + 1], miss_counts[ID_TILES * WARPS], order_counts[2 * order tiles * WARPS]
//   i32 stretch[stretch], u32 chosen_bits[max_capacity / 32 rounded up]
extern __shared__ i32 dynamic_shared[];

extern "C" __global__ void __launch_bounds__(THREADS) resolve(const __grid_constant__ ResolveParams p) {
  const i32 rank = cluster_rank();
  const i32 batch_lane = blockIdx.x / CLUSTER;
  const i32 batch_row = batch_lane / p.groups;
  const i32 group = batch_lane % p.groups;
  const i32 thread = threadIdx.x, warp = thread / 32, lane_id = thread % 32;
  const i32* selected = p.selected + (size_t)batch_lane * p.top_k;
  i32* out = p.slots + (size_t)batch_lane * p.top_k;

  if (batch_row >= *p.real_rows) {  // padding: the whole cluster leaves, nothing is touched
    for (i32 j = rank * THREADS + thread; j < p.top_k; j += CLUSTER * THREADS) out[j] = -1;
    if (rank == 0 && thread == 0) p.open_slot[batch_lane] = -1;
    return;
  }

  const u64 begun = nanoseconds();
  const i32 lane = p.seats[batch_row] * p.groups + group;
  const i32 opened = p.open_block[batch_row];
  i32* block_to_slot = p.block_to_slot + (size_t)lane * p.max_blocks;
  i32* slot_to_block = p.slot_to_block + (size_t)lane * p.max_capacity;
  i32* order = p.order + (size_t)lane * p.max_capacity;
  const i32* pool_slot = p.pool_slot + (size_t)lane * p.max_capacity;
  const i32* host_pages = p.host_pages + (size_t)p.seats[batch_row] * p.max_pages;

  // ---- look up
  i32 ids[ID_TILES], held[ID_TILES];
  for (i32 t = 0; t < ID_TILES; ++t) {
    const i32 j = t * THREADS + thread;
    ids[t] = j < p.top_k ? selected[j] : -1;
  }
  const i32 open_held = block_to_slot[opened];
  const bool settled = open_held >= 0 && p.resident[lane] == opened + 1;
  i32 page[ID_TILES];  // read before it is known to be needed: one wait less where it is
  for (i32 t = 0; t < ID_TILES; ++t) {
    held[t] = ids[t] >= 0 ? block_to_slot[ids[t]] : -1;
    page[t] = ids[t] >= 0 ? host_pages[ids[t] / p.blocks_per_page] : 0;
  }
  const i32 stretch = (p.max_capacity + CLUSTER - 1) / CLUSTER;
  const i32 stretch_tiles = (stretch + THREADS - 1) / THREADS;
  const i32 words = (p.max_capacity + 31) / 32;

  i32* hash_key = dynamic_shared;
  i32* hash_rank = hash_key + HASH_SLOTS;
  i32* miss_block = hash_rank + HASH_SLOTS;
  i32* victim = miss_block + p.top_k + 1;
  u32* miss_home = (u32*)(victim + p.top_k + 1);
  u32* miss_counts = miss_home + p.top_k + 1;
  u32* stale_counts = miss_counts + ID_TILES * WARPS;
  u32* hit_counts = stale_counts + stretch_tiles * WARPS;
  i32* mine = (i32*)(hit_counts + stretch_tiles * WARPS);
  u32* chosen_bits = (u32*)(mine + stretch);
  __shared__ u32 stale_total, hit_total, misses_shared, chosen_hits, evicted_shared;

  const i32 first = rank * stretch;
  if (!settled) {
    for (i32 i = thread; i < HASH_SLOTS; i += THREADS) hash_key[i] = EMPTY, hash_rank[i] = NOWHERE;
    for (i32 i = thread; i < stretch; i += THREADS) mine[i] = first + i < p.max_capacity ? order[first + i] : -1;
  }
  for (i32 i = thread; i < words; i += THREADS) chosen_bits[i] = 0;
  if (thread == 0) evicted_shared = 0;
  __syncthreads();
  i32 place[ID_TILES];  // of a missing id in the hash table
  for (i32 t = 0; t < ID_TILES; ++t) {
    place[t] = -1;
    if (held[t] >= 0) {
      atomicOr(&chosen_bits[held[t] >> 5], 1u << (held[t] & 31));
    } else if (ids[t] >= 0 && !settled) {
      place[t] = hash_enter(hash_key, ids[t]);
      atomicMin(&hash_rank[place[t]], t * THREADS + thread);
    }
  }

  if (settled) {  // every block of the row is here: nothing can be evicted, and the order may rest
    for (i32 t = 0; t < ID_TILES; ++t) {
      const i32 j = t * THREADS + thread;
      if (j < p.top_k && (t * WARPS + warp) % CLUSTER == rank) out[j] = held[t] >= 0 ? pool_slot[held[t]] : -1;
    }
    __syncthreads();
    if (rank == 0 && warp == 0) {
      const u32 hits = count_bits(chosen_bits, words, lane_id);
      if (lane_id == 0) {
        p.open_slot[batch_lane] = pool_slot[open_held];
        atomicAdd(&p.counters[CHOSEN], (u64)hits);
        atomicAdd(&p.counters[HITS], (u64)hits);
      }
    }
    return;
  }

  i32 open_place = -1;
  if (thread == 0 && open_held < 0) {
    open_place = hash_enter(hash_key, opened);
    atomicMin(&hash_rank[open_place], p.top_k);
  }
  __syncthreads();

  // ---- rank the misses; a repetition is not the first of its block
  bool leads[ID_TILES];
  for (i32 t = 0; t < ID_TILES; ++t) {
    const i32 j = t * THREADS + thread;
    leads[t] = place[t] >= 0 && hash_rank[place[t]] == j;
    const u32 ballot = __ballot_sync(~0u, leads[t]);
    if (lane_id == 0) miss_counts[t * WARPS + warp] = __popc(ballot);
  }
  const bool open_chosen_late = thread == 0 && open_place >= 0 && hash_rank[open_place] != p.top_k;
  __syncthreads();
  if (warp == 0) {
    const u32 total = scan_in_place(miss_counts, ID_TILES * WARPS, lane_id);
    if (lane_id == 0) misses_shared = total;
  } else if (warp == 1) {
    const u32 hits = count_bits(chosen_bits, words, lane_id);
    if (lane_id == 0) chosen_hits = hits;
  }
  __syncthreads();
  for (i32 t = 0; t < ID_TILES; ++t) {
    const u32 ballot = __ballot_sync(~0u, leads[t]);
    const u32 r = miss_counts[t * WARPS + warp] + __popc(ballot & ((1u << lane_id) - 1));
    if (leads[t]) {
      miss_block[r] = ids[t];
      miss_home[r] = (u32)((page[t] * p.groups + group) * p.blocks_per_page + ids[t] % p.blocks_per_page);
      hash_rank[place[t]] = (i32)r;  // from now on a rank, no longer a place in the selection
    }
  }
  __shared__ i32 open_rank_shared;  // rank of the open block among the misses, NOWHERE if it has a slot
  if (thread == 0) {
    open_rank_shared = NOWHERE;
    if (open_place >= 0 && !open_chosen_late) {
      miss_block[misses_shared] = opened;
      open_rank_shared = (i32)misses_shared;
      misses_shared += 1;
    }
  }
  __syncthreads();
  if (open_chosen_late) open_rank_shared = hash_rank[open_place];  // thread 0: its rank is known by now
  __syncthreads();

  // The sources are known: the first loads travel while the victims are worked out.
  const i32 misses = (i32)misses_shared, open_rank = open_rank_shared;
  const i32 total = thread < COPY_THREADS && !SKIP_IO ? misses * CHUNKS : 0, workers = CLUSTER * COPY_THREADS;
  i32 base = rank * COPY_THREADS + thread;
  int4 piece[COPY_DEPTH];
#pragma unroll
  for (i32 d = 0; d < COPY_DEPTH; ++d) {
    const i32 c = base + d * workers, r = c / CHUNKS;
    if (c < total && r != open_rank) piece[d] = load_host(p.arena + (size_t)miss_home[r] * CHUNKS + c % CHUNKS);
  }

  // ---- divide: class this block's stretch of the order ...
  for (i32 t = 0; t < stretch_tiles; ++t) {
    const i32 i = t * THREADS + thread;
    const i32 slot = i < stretch ? mine[i] : -1;
    const bool open = slot >= 0 && slot == open_held;
    const bool hit = slot >= 0 && !open && (chosen_bits[slot >> 5] >> (slot & 31) & 1);
    const u32 stale_ballot = __ballot_sync(~0u, slot >= 0 && !open && !hit);
    const u32 hit_ballot = __ballot_sync(~0u, hit);
    if (lane_id == 0) {
      stale_counts[t * WARPS + warp] = __popc(stale_ballot);
      hit_counts[t * WARPS + warp] = __popc(hit_ballot);
    }
  }
  __syncthreads();
  if (warp == 0) {
    const u32 total = scan_in_place(stale_counts, stretch_tiles * WARPS, lane_id);
    if (lane_id == 0) stale_total = total;
  } else if (warp == 1) {
    const u32 total = scan_in_place(hit_counts, stretch_tiles * WARPS, lane_id);
    if (lane_id == 0) hit_total = total;
  }
  cluster_sync();

  // ---- ... and see where this block's stretch begins among all stale and hit slots of the lane
  u32 stale_before = 0, hits_before = 0, stale_all = 0, hits_all = 0;
  u32 stale_begin[CLUSTER];
  for (i32 r = 0; r < CLUSTER; ++r) {
    const u32 stale_there = load_shared_of(&stale_total, r), hits_there = load_shared_of(&hit_total, r);
    stale_begin[r] = stale_all;
    if (r < rank) stale_before += stale_there, hits_before += hits_there;
    stale_all += stale_there, hits_all += hits_there;
  }
  const bool open_missing = open_rank != NOWHERE;
  const i32 kept = (i32)stale_all - misses;             // stale slots that stay
  const i32 hits_at = (i32)stale_all - (open_missing ? 1 : 0);  // where the hits begin in the new order
  const i32 last = hits_at + (i32)hits_all;             // the open block's place, the most recent

  // ---- update
  for (i32 t = 0; t < stretch_tiles; ++t) {
    const i32 i = t * THREADS + thread;
    const i32 slot = i < stretch ? mine[i] : -1;
    const bool open = slot >= 0 && slot == open_held;
    const bool hit = slot >= 0 && !open && (chosen_bits[slot >> 5] >> (slot & 31) & 1);
    const bool stale = slot >= 0 && !open && !hit;
    const u32 below = (1u << lane_id) - 1;
    const u32 stale_ballot = __ballot_sync(~0u, stale), hit_ballot = __ballot_sync(~0u, hit);
    if (stale) {
      const i32 r = (i32)(stale_before + stale_counts[t * WARPS + warp] + __popc(stale_ballot & below));
      if (r >= misses) {
        order[r - misses] = slot;
      } else {
        const i32 block = miss_block[r];
        const i32 evicted = slot_to_block[slot];
        if (evicted >= 0) block_to_slot[evicted] = -1, atomicAdd(&evicted_shared, 1);
        block_to_slot[block] = slot;
        slot_to_block[slot] = block;
        victim[r - (i32)stale_before] = pool_slot[slot];
        order[r == open_rank ? last : kept + r - (open_missing && r > open_rank ? 1 : 0)] = slot;
      }
    } else if (hit) {
      order[hits_at + (i32)(hits_before + hit_counts[t * WARPS + warp]) + __popc(hit_ballot & below)] = slot;
    } else if (open) {
      order[last] = slot;
    }
  }
  cluster_sync();

  // ---- every block gathers the victims' pool slots (they lie where their stretch was) ...
  for (i32 r = thread; r < misses; r += THREADS) {
    i32 owner = 0, begin = 0;
#pragma unroll
    for (i32 o = 1; o < CLUSTER; ++o)
      if (r >= (i32)stale_begin[o]) owner = o, begin = (i32)stale_begin[o];
    hash_key[r] = (i32)load_shared_of(&victim[r - begin], owner);  // the table is done with
  }
  if (thread == 0 && evicted_shared) atomicAdd(&p.counters[EVICTIONS], (u64)evicted_shared);
  if (thread == 0 && rank == 0) {
    const u32 fetched = misses - (open_missing ? 1 : 0);
    const u32 hits = chosen_hits + (open_missing && open_chosen_late ? 1 : 0);
    atomicAdd(&p.counters[CHOSEN], (u64)(hits + fetched));
    atomicAdd(&p.counters[HITS], (u64)hits);
    atomicAdd(&p.counters[MISSES], (u64)fetched);
    atomicAdd(&p.counters[FETCHED_BYTES], (u64)fetched * BLOCK_BYTES);
  }
  if (thread == 0) atomicAdd(&p.resident[lane], -(i32)evicted_shared + (rank == 0 ? misses : 0));
  __syncthreads();
  const i32* given = hash_key;

  for (i32 t = 0; t < ID_TILES; ++t) {
    const i32 j = t * THREADS + thread;
    if (j >= p.top_k || (t * WARPS + warp) % CLUSTER != rank) continue;
    out[j] = held[t] >= 0 ? pool_slot[held[t]] : place[t] >= 0 ? given[hash_rank[place[t]]] : -1;
  }

  // ---- ... and copies its share
  while (base < total) {
#pragma unroll
    for (i32 d = 0; d < COPY_DEPTH; ++d) {
      const i32 c = base + d * workers, r = c / CHUNKS;
      if (c < total && r != open_rank) p.pool[(size_t)given[r] * CHUNKS + c % CHUNKS] = piece[d];
    }
    base += COPY_DEPTH * workers;
#pragma unroll
    for (i32 d = 0; d < COPY_DEPTH; ++d) {
      const i32 c = base + d * workers, r = c / CHUNKS;
      if (c < total && r != open_rank) piece[d] = load_host(p.arena + (size_t)miss_home[r] * CHUNKS + c % CHUNKS);
    }
  }
  if (rank == 0 && thread == 0) {
    p.open_slot[batch_lane] = open_missing ? given[open_rank] : pool_slot[open_held];
    if (misses) atomicAdd(&p.counters[NANOSECONDS], nanoseconds() - begun);
  }
  cluster_sync();  // no block may leave while others read its victims
}
