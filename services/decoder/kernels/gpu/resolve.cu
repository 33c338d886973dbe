// resolve: logical blocks -> hot slots, with the misses fetched from host memory. One launch a layer.
//
// The definition is the twin, kernels/lru.py; this agrees with it slot for slot, order included. Knows one
// layer's tables and bytes (struct below), no tensor library, no request.
//
// A cluster of CLUSTER thread blocks serves one lane. Every block of it reads the whole selection and so
// knows every miss; the LRU order is split between them, and the copies too:
//
//   look up   selection -> lane slots; where nothing is missing and nothing can be evicted, that is the answer
//   list      a bitmap of chosen slots; misses into a hash table (repetitions!), and those that this thread block
//             shall fetch into a list
//   fetch     the first loads leave, before anything else is known
//   rank      misses in selection order; this thread block's stretch of `order` classed as stale, hit or open
//   update    stale slots of rank < misses become victims; order, block <-> slot are rewritten in place
//   copy      16 bytes a thread, COPY_DEPTH loads in flight before the first store
//
// Between the first loads and their stores no fence may stand: it would wait for the loads. So the thread blocks
// of a cluster talk by st.async and mbarriers alone.
//
// The sequence in which records are copied is free. With SWEEP every lane goes through its misses from low
// addresses to high ones: all lanes then read the same part of the arena at about the same time, which the GPU's
// address translation rewards (docs/log.md).
//
// A lane's slots lie in the pool by parcels, PARCEL_SLOTS side by side, and the entries of its order and its slots'
// blocks lie as they do. What a lane costs follows its own capacity; only the shared memory is that of the widest.
//
// Compile-time: BLOCK_BYTES (multiple of 16), CLUSTER, THREADS (multiple of 32, at least 128), ID_TILES =
// ceil(top_k / THREADS), HASH_SLOTS (power of two, >= 2 top_k), COPY_DEPTH, SPLIT (every thread block copies its
// part of each record, not whole records), PARCEL_SLOTS (power of two), SWEEP, SKIP_IO (no bytes move: the plan is
// replayed by another launch, or a benchmark probes).

#include "fetch.cuh"

struct ResolveParams {
  const i32* selected;      // [rows * groups, top_k] blocks, -1 = none
  const i32* length;        // [rows] tokens, the newest included
  const i32* seats;         // [rows] row of the tables that each row of the batch sits in
  const i32* real_rows;     // [1] rows of the batch that are not padding
  i32* slots;               // out [rows * groups, top_k] pool slots, -1 = none
  i32* open_slot;           // out [rows * groups] pool slots
  i32* block_to_slot;       // [lanes, max_blocks] lane slot, -1 = host only
  i32* slot_to_block;       // [pool slots] block, -1 = empty
  i32* order;               // [pool slots] lane slots, stale to recent, of each lane at its own slots' places
  const i32* parcels;       // [table rows, max_parcels] parcels of each row
  const i32* capacity;      // [table rows] slots of each lane of the row
  const i32* host_pages;    // [table rows, max_pages] host page of each page
  const int4* arena;        // this layer's blocks in host memory
  int4* pool;               // this layer's hot slots
  u64* counters;            // [6] chosen, hits, misses, evictions, fetched bytes, nanoseconds
  u64* waited_until;        // [1] end of the waiting that is counted already; null = time is not counted
  i32* plan_source;         // out [rows * groups, top_k] block in the arena of each fetch; null = no plan wanted
  i32* plan_target;         // out [rows * groups, top_k] pool slot of each fetch
  i32* plan_count;          // out [rows * groups] fetches
  i32* hits;                // out [rows * groups, top_k] the selection without what is fetched; null = not wanted
  i32* misses;              // out [rows * groups, top_k] block of each fetch of the plan, -1 pads; where hits are wanted
  i32 top_k, groups, max_blocks, max_parcels, max_pages, blocks_per_page, block_tokens;
  i32 copy_threads;  // of a thread block; too many loads in flight thrash the address translation
};

constexpr i32 WARPS = THREADS / 32;
constexpr i32 CHUNKS = BLOCK_BYTES / 16;  // 16-byte pieces of a block
constexpr i32 PART_CHUNKS = SPLIT ? CHUNKS / CLUSTER : CHUNKS;  // of a block, that one thread block copies
constexpr i32 EACH = 4;  // neighbours of the order that a thread takes at once
constexpr i32 BUCKETS = 256;
constexpr i32 NOWHERE = 0x7fffffff;
constexpr i32 EMPTY = -1;
constexpr u32 ALL = ~0u;

__device__ __forceinline__ u32 shared_address(const void* own) { return (u32)__cvta_generic_to_shared(own); }

// Words into shared memory, asynchronously, `count` of them from `place(i)` each; with ALIGNED four together, which
// lie side by side. loads_arrived() waits for this thread's.
constexpr bool ALIGNED = PARCEL_SLOTS % 4 == 0;
template <typename Place>
__device__ __forceinline__ void load_words(i32* to, i32 count, Place place) {
  for (i32 i = threadIdx.x * (ALIGNED ? 4 : 1); i < count; i += THREADS * (ALIGNED ? 4 : 1)) {
    if (ALIGNED)
      asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(to + i)), "l"(place(i)) : "memory");
    else
      asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(shared_address(to + i)), "l"(place(i)) : "memory");
  }
}
__device__ __forceinline__ void loads_arrived() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// ---- what the thread blocks of a cluster tell one another
#if CLUSTER == 1
__device__ __forceinline__ i32 cluster_rank() { return 0; }
__device__ __forceinline__ void begin_messages(u64*, u64*) {}
__device__ __forceinline__ void cluster_started() {}
__device__ __forceinline__ void expect_bytes(u64*, u32) {}
__device__ __forceinline__ void tell(u32* place, u32 value, u64*, i32) { *place = value; }
__device__ __forceinline__ void wait_for_messages(u64*) { __syncthreads(); }
#else
// This block's number in its cluster.
__device__ __forceinline__ i32 cluster_rank() {
  i32 rank;
  asm volatile("mov.u32 %0, %cluster_ctarank;" : "=r"(rank));
  return rank;
}

// By one thread, before every thread calls cluster_started().
__device__ __forceinline__ void begin_messages(u64* first, u64* second) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared_address(first)) : "memory");
  asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared_address(second)) : "memory");
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// All blocks of the cluster run and have their mbarriers.
__device__ __forceinline__ void cluster_started() {
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// By one thread: the messages of `arrived` are complete with so many bytes.
__device__ __forceinline__ void expect_bytes(u64* arrived, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(arrived)), "r"(bytes)
               : "memory");
}

// Writes `value` to where `place` lies in block `rank`.
__device__ __forceinline__ void tell(u32* place, u32 value, u64* arrived, i32 rank) {
  u32 there, barrier;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(shared_address(place)), "r"(rank));
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(barrier) : "r"(shared_address(arrived)), "r"(rank));
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.u32 [%0], %1, [%2];" ::"r"(there), "r"(value),
               "r"(barrier)
               : "memory");
}

__device__ __forceinline__ void wait_for_messages(u64* arrived) {
  u32 done = 0;
  while (!done)
    asm volatile(
        "{\n.reg .pred ready;\nmbarrier.try_wait.parity.shared::cta.b64 ready, [%1], 0;\n"
        "selp.u32 %0, 1, 0, ready;\n}"
        : "=r"(done)
        : "r"(shared_address(arrived))
        : "memory");
}
#endif

// Sum of one number a warp: of those before this warp, and of all.
__device__ __forceinline__ u32 before_and_all(const u32* of_warps, i32 warp, i32 lane_id, u32* all) {
  const u32 own = lane_id < WARPS ? of_warps[lane_id] : 0;
  *all = __reduce_add_sync(ALL, own);
  return __reduce_add_sync(ALL, lane_id < warp ? own : 0);
}

// Where the search for `block` in the hash table begins; the highest bits are left to others.
__device__ __forceinline__ u32 hash_of(i32 block) { return (u32)block * 2654435761u; }

// Position of `block` in the hash table, entering it if it is new. `found` is what a first atomicCAS at `at` gave.
__device__ __forceinline__ i32 hash_enter(i32* keys, i32 block, u32 at, i32 found, bool* is_new) {
  while (found != EMPTY && found != block) {
    at = (at + 1) & (HASH_SLOTS - 1);
    found = atomicCAS(&keys[at], EMPTY, block);
  }
  *is_new = found == EMPTY;
  return (i32)at;
}

// Inclusive prefix sum over a warp.
__device__ __forceinline__ u32 scan_warp(u32 sum, i32 lane_id) {
#pragma unroll
  for (i32 step = 1; step < 32; step *= 2) {
    const u32 left = __shfl_up_sync(ALL, sum, step);
    if (lane_id >= step) sum += left;
  }
  return sum;
}

// Dynamic shared memory, in this order; resolve.py computes the same sum.
//   i32 mine[the widest stretch], hash_key[HASH_SLOTS], hash_rank[HASH_SLOTS], list_place[top_k], list_home[top_k],
//   miss_block[top_k + 1], given[top_k + 1], parcel_base[max_parcels],
//   u32 chosen_bits[max_parcels * PARCEL_SLOTS / 32 rounded up]
extern __shared__ __align__(16) i32 dynamic_shared[];

extern "C" __global__ void __launch_bounds__(THREADS, 1024 / THREADS) resolve(const __grid_constant__ ResolveParams p) {
  __shared__ u64 totals_arrived, given_arrived;
  __shared__ u32 totals[CLUSTER];  // of each block's stretch: stale slots in the low half, hits in the high half
  __shared__ u32 miss_counts[WARPS], order_counts[WARPS];
  __shared__ u32 listed, lowest, highest, buckets[SWEEP ? BUCKETS : 1];
  __shared__ i32 open_place_shared;

  let_next_begin();
  const i32 rank = cluster_rank();
  const i32 thread = threadIdx.x, warp = thread / 32, lane_id = thread % 32;
  const u32 below = (1u << lane_id) - 1;  // the threads before this one
  const i32 batch_lane = blockIdx.x / CLUSTER;
  const i32 batch_row = batch_lane / p.groups;
  const i32 group = batch_lane % p.groups;
  i32* mine = dynamic_shared;
  i32* hash_key = mine + (((p.max_parcels * PARCEL_SLOTS + CLUSTER - 1) / CLUSTER + 3) & ~3);
  i32* hash_rank = hash_key + HASH_SLOTS;
  i32* list_place = hash_rank + HASH_SLOTS;
  u32* list_home = (u32*)(list_place + p.top_k);
  i32* miss_block = (i32*)(list_home + p.top_k);
  i32* given = miss_block + p.top_k + 1;
  i32* parcel_base = given + p.top_k + 1;
  u32* chosen_bits = (u32*)(parcel_base + p.max_parcels);

  // ---- before the previous kernel has ended: only what no kernel of the step writes
  const bool padding = batch_row >= *p.real_rows;
  const i32 seat = padding ? 0 : p.seats[batch_row];
  const i32 opened = padding ? 0 : (p.length[batch_row] - 1) / p.block_tokens;
  const i32 capacity = padding ? 0 : p.capacity[seat];
  const i32 lane = seat * p.groups + group;
  i32* block_to_slot = p.block_to_slot + (size_t)lane * p.max_blocks;
  // A layer's weights have driven the table out of the cache; ask for it, if the choice will touch most of it.
  const i32 line = (rank * THREADS + thread) * 32;
  if (!padding && line <= opened && opened / 32 < p.top_k)
    asm volatile("prefetch.global.L2 [%0];" ::"l"(block_to_slot + line) : "memory");
  const i32 stretch = ((capacity + CLUSTER - 1) / CLUSTER + 3) & ~3;
  if (thread == 0) {
    listed = 0, lowest = ALL, highest = 0;
    open_place_shared = -1;
    begin_messages(&totals_arrived, &given_arrived);
    expect_bytes(&totals_arrived, 4 * CLUSTER);
  }
#if CLUSTER > 1
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
#endif
  for (i32 i = thread; i < HASH_SLOTS; i += THREADS) hash_key[i] = EMPTY, hash_rank[i] = NOWHERE;
  for (i32 i = thread; i < (capacity + 31) / 32; i += THREADS) chosen_bits[i] = 0;
  for (i32 i = thread; i < capacity / PARCEL_SLOTS; i += THREADS)
    parcel_base[i] = (p.parcels[(size_t)seat * p.max_parcels + i] * p.groups + group) * PARCEL_SLOTS;
  if (SWEEP)
    for (i32 i = thread; i < BUCKETS; i += THREADS) buckets[i] = 0;
  __syncthreads();
  wait_for_previous();
  const u64 begun = nanoseconds();

  // ---- look up
  const i32* selected = p.selected + (size_t)batch_lane * p.top_k;
  i32* out = p.slots + (size_t)batch_lane * p.top_k;
  i32* resident = p.hits ? p.hits + (size_t)batch_lane * p.top_k : nullptr;
  i32* coming = p.misses + (size_t)batch_lane * p.top_k;
  const auto nothing_comes_from = [&](i32 first) {  // by the whole cluster
    for (i32 j = first + rank * THREADS + thread; resident && j < p.top_k; j += CLUSTER * THREADS) coming[j] = -1;
  };
  i32 ids[ID_TILES], held[ID_TILES], place[ID_TILES];
  for (i32 t = 0; t < ID_TILES; ++t) {
    const i32 j = (warp * ID_TILES + t) * 32 + lane_id;
    ids[t] = j < p.top_k ? selected[j] : -1;
  }
  if (padding) {  // the whole cluster leaves, nothing is touched
    for (i32 j = rank * THREADS + thread; j < p.top_k; j += CLUSTER * THREADS) {
      out[j] = -1;
      if (resident) resident[j] = -1;
    }
    nothing_comes_from(0);
    if (rank == 0 && thread == 0) {
      p.open_slot[batch_lane] = -1;
      if (p.plan_count) p.plan_count[batch_lane] = 0;
    }
    cluster_started();
    return;
  }
  const auto pooled_at = [&](i32 slot) { return parcel_base[slot / PARCEL_SLOTS] + slot % PARCEL_SLOTS; };
  const i32* host_pages = p.host_pages + (size_t)seat * p.max_pages;
  const i32 first = rank * stretch;
  const i32 own = min(stretch, capacity - first);  // may be negative: a narrow lane, a wide cluster

  const i32 open_held = block_to_slot[opened];
  bool lacks = open_held < 0;
  for (i32 t = 0; t < ID_TILES; ++t) {
    held[t] = ids[t] >= 0 ? block_to_slot[ids[t]] : -1;
    lacks = lacks || (ids[t] >= 0 && held[t] < 0);
  }
  const auto home_of = [&](i32 block) {
    const i32 page = host_pages[block / p.blocks_per_page];
    return (u32)((page * p.groups + group) * p.blocks_per_page + block % p.blocks_per_page);
  };

  // ---- a slot for every block of the row: nothing can be evicted, so while nothing is missing the order may rest
  if (capacity > opened && !__syncthreads_or(lacks)) {
    i32 hits = 0;
    for (i32 t = 0; t < ID_TILES; ++t) {
      const i32 j = (warp * ID_TILES + t) * 32 + lane_id;
      if (j < p.top_k && (t * WARPS + warp) % CLUSTER == rank) {
        out[j] = held[t] >= 0 ? pooled_at(held[t]) : -1;
        if (resident) resident[j] = ids[t];
      }
      if (rank == 0) {
        const u32 bit = 1u << (held[t] & 31);
        hits += __syncthreads_count(held[t] >= 0 && !(atomicOr(&chosen_bits[held[t] >> 5], bit) & bit));
      }
    }
    nothing_comes_from(0);
    if (rank == 0 && thread == 0) {
      p.open_slot[batch_lane] = pooled_at(open_held);
      if (p.plan_count) p.plan_count[batch_lane] = 0;
      atomicAdd(&p.counters[CHOSEN], (u64)hits);
      atomicAdd(&p.counters[HITS], (u64)hits);
    }
    cluster_started();
    return;
  }

  load_words(mine, own, [&](i32 i) { return p.order + pooled_at(first + i); });
  i32 found[ID_TILES];
#pragma unroll
  for (i32 t = 0; t < ID_TILES; ++t) {
    place[t] = -1;
    if (held[t] >= 0) {
      atomicOr(&chosen_bits[held[t] >> 5], 1u << (held[t] & 31));
    } else if (ids[t] >= 0) {
      place[t] = (i32)(hash_of(ids[t]) >> 7 & (HASH_SLOTS - 1));
      found[t] = atomicCAS(&hash_key[place[t]], EMPTY, ids[t]);
    }
  }
  bool fetches[ID_TILES];  // this thread block fetches the record, and this thread lists it
  u32 fetched = 0;
#pragma unroll
  for (i32 t = 0; t < ID_TILES; ++t) {
    fetches[t] = false;
    if (place[t] >= 0) {
      place[t] = hash_enter(hash_key, ids[t], (u32)place[t], found[t], &fetches[t]);
      atomicMin(&hash_rank[place[t]], (warp * ID_TILES + t) * 32 + lane_id);
      const bool owned = SPLIT || (i32)(hash_of(ids[t]) >> 29) % CLUSTER == rank;
      fetches[t] = fetches[t] && owned && ids[t] != opened;
    }
    fetched += __popc(__ballot_sync(ALL, fetches[t]));
  }
  if (fetched) {
    u32 home[ID_TILES], low = ALL, high = 0;
#pragma unroll
    for (i32 t = 0; t < ID_TILES; ++t) {
      home[t] = fetches[t] ? home_of(ids[t]) : 0;
      if (fetches[t]) low = min(low, home[t]), high = max(high, home[t]);
    }
    u32 at = lane_id == 0 ? atomicAdd(&listed, fetched) : 0;
    at = __shfl_sync(ALL, at, 0);
#pragma unroll
    for (i32 t = 0; t < ID_TILES; ++t) {
      const u32 ballot = __ballot_sync(ALL, fetches[t]);
      const u32 m = at + __popc(ballot & below);
      if (fetches[t]) list_place[m] = place[t], list_home[m] = home[t];
      at += __popc(ballot);
    }
    if (SWEEP) {
      low = __reduce_min_sync(ALL, low), high = __reduce_max_sync(ALL, high);
      if (lane_id == 0) atomicMin(&lowest, low), atomicMax(&highest, high);
    }
  }
  if (thread == 0 && open_held < 0) {
    bool is_new;
    const u32 at = hash_of(opened) >> 7 & (HASH_SLOTS - 1);
    open_place_shared = hash_enter(hash_key, opened, at, atomicCAS(&hash_key[at], EMPTY, opened), &is_new);
    atomicMin(&hash_rank[open_place_shared], p.top_k);
  }
  loads_arrived();
  cluster_started();
  __syncthreads();

  // ---- fetch: the first loads travel while all else is worked out
  const i32 list = (i32)listed;
  // The last threads copy: the first have the stalest slots, and whoever waits for a host load gives none away.
  const i32 total = SKIP_IO ? 0 : list * PART_CHUNKS, idle = THREADS - p.copy_threads;
  const i32 copier = thread >= idle ? thread - idle : total;
  const int4* arena = p.arena + (SPLIT ? rank * PART_CHUNKS : 0);
  int4* pool = p.pool + (SPLIT ? rank * PART_CHUNKS : 0);
  int4 piece[COPY_DEPTH];
#pragma unroll
  for (i32 d = 0; d < COPY_DEPTH; ++d) {
    const i32 c = d * p.copy_threads + copier;
    if (c < total) piece[d] = load_host(arena + (size_t)list_home[c / PART_CHUNKS] * CHUNKS + c % PART_CHUNKS);
  }

  // ---- rank the misses (a repetition is not the first of its block), class this block's stretch of the order
  bool leads[ID_TILES];
  u32 count = 0;
  for (i32 t = 0; t < ID_TILES; ++t) {
    leads[t] = place[t] >= 0 && hash_rank[place[t]] == (warp * ID_TILES + t) * 32 + lane_id;
    count += __popc(__ballot_sync(ALL, leads[t]));
  }
  const i32 open_place = open_place_shared;
  const bool open_last = open_place >= 0 && hash_rank[open_place] == p.top_k;  // missing and not chosen
  const i32 tiles = (stretch + THREADS * EACH - 1) / (THREADS * EACH);  // that a warp takes
  const i32 warp_begin = warp * tiles * 32 * EACH;
  const i32 warp_slots = max(0, min(tiles * 32 * EACH, own - warp_begin));
  const auto class_of = [&](i32 slot) {  // as counts: a stale slot is 1, a hit 1 << 16
    if (slot < 0 || slot == open_held) return 0u;
    return chosen_bits[slot >> 5] >> (slot & 31) & 1 ? 1u << 16 : 1u;
  };
  const auto read_tile = [&](i32 t, i32* slot) {  // returns where in the stretch it begins
    const i32 at = warp_begin + (t * 32 + lane_id) * EACH;
    const int4 four = at < own ? *(const int4*)(mine + at) : int4{-1, -1, -1, -1};
    slot[0] = four.x, slot[1] = four.y, slot[2] = four.z, slot[3] = four.w;
    for (i32 e = 1; e < EACH; ++e)
      if (at + e >= own) slot[e] = -1;
    return at;
  };
  u32 stale_and_hits = 0;
  for (i32 t = 0; t < tiles; ++t) {
    i32 slot[EACH];
    read_tile(t, slot);
#pragma unroll
    for (i32 e = 0; e < EACH; ++e) stale_and_hits += class_of(slot[e]);
  }
  stale_and_hits = __reduce_add_sync(ALL, stale_and_hits);
  if (lane_id == 0) miss_counts[warp] = count, order_counts[warp] = stale_and_hits;
  const i32 begun_records = (COPY_DEPTH * p.copy_threads + PART_CHUNKS - 1) / PART_CHUNKS;  // by the first loads
  const u32 shift = max(0, 24 - __clz((i32)(highest - lowest)));
  if (SWEEP)
    for (i32 m = begun_records + thread; m < list; m += THREADS) atomicAdd(&buckets[(list_home[m] - lowest) >> shift], 1u);
  __syncthreads();

  u32 chosen_misses, own_total;
  i32 r = (i32)before_and_all(miss_counts, warp, lane_id, &chosen_misses);
  const u32 own_before = before_and_all(order_counts, warp, lane_id, &own_total);
  if (warp == 0 && lane_id < CLUSTER) tell(&totals[rank], own_total, &totals_arrived, lane_id);
  const i32 misses = (i32)chosen_misses + (open_last ? 1 : 0);
  for (i32 t = 0; t < ID_TILES; ++t) {
    const u32 ballot = __ballot_sync(ALL, leads[t]);
    if (leads[t]) {
      const i32 mine_rank = r + __popc(ballot & below);
      miss_block[mine_rank] = ids[t];
      hash_rank[place[t]] = mine_rank;  // from now on a rank, no longer a place in the selection
    }
    r += __popc(ballot);
  }
  if (thread == 0) {
    expect_bytes(&given_arrived, 4 * misses);
    if (open_last) miss_block[chosen_misses] = opened, hash_rank[open_place] = (i32)chosen_misses;
  }
  if (SWEEP && warp == WARPS - 1) {
    u32 before = 0;
    for (i32 i = lane_id; i < BUCKETS; i += 32) {
      const u32 size = buckets[i], sum = scan_warp(size, lane_id);
      buckets[i] = before + sum - size;
      before += __shfl_sync(ALL, sum, 31);
    }
  }
  __syncthreads();
  const i32 open_rank = open_place >= 0 ? hash_rank[open_place] : NOWHERE;  // among the misses
  i32* copy_place = list_place;
  u32* copy_home = list_home;
  if (SWEEP && list > begun_records) {
    copy_place = hash_key, copy_home = (u32*)hash_key + p.top_k;  // the keys are done with
    for (i32 m = thread; m < list; m += THREADS) {
      const u32 home = list_home[m];
      const i32 at = m < begun_records ? m : begun_records + (i32)atomicAdd(&buckets[(home - lowest) >> shift], 1u);
      copy_place[at] = list_place[m], copy_home[at] = home;
    }
  }
  if (CLUSTER > 1) wait_for_messages(&totals_arrived);

  // ---- see where this block's stretch begins among all stale and hit slots of the lane
  i32 stale_rank = (i32)(own_before & 0xffff), hit_rank = (i32)(own_before >> 16), stale_all = 0, hits_all = 0;
  for (i32 i = 0; i < CLUSTER; ++i) {
    const i32 stale_there = (i32)(totals[i] & 0xffff), hits_there = (i32)(totals[i] >> 16);
    if (i < rank) stale_rank += stale_there, hit_rank += hits_there;
    stale_all += stale_there, hits_all += hits_there;
  }
  const bool open_missing = open_rank != NOWHERE;
  const i32 kept = stale_all - misses;                     // stale slots that stay
  const i32 hits_at = stale_all - (open_missing ? 1 : 0);  // where the hits begin in the new order
  const i32 last = hits_at + hits_all;                     // the open block's place, the most recent

  // ---- update, unless this warp has no slots, or all are stale and stay where they are
  const bool stays =
      misses == 0 && stale_rank == first + warp_begin && (i32)(order_counts[warp] & 0xffff) == warp_slots;
  const bool rests = warp_slots == 0 || stays;
  for (i32 t = 0; t < tiles && !rests; ++t) {
    i32 slot[EACH], pooled[EACH], evicted[EACH];
    const i32 at = first + read_tile(t, slot);
    u32 count = 0;
#pragma unroll
    for (i32 e = 0; e < EACH; ++e) count += class_of(slot[e]);
    const u32 sum = scan_warp(count, lane_id), warp_sum = __shfl_sync(ALL, sum, 31);
    i32 s = stale_rank + (i32)((sum - count) & 0xffff), h = hit_rank + (i32)((sum - count) >> 16);
    stale_rank += (i32)(warp_sum & 0xffff), hit_rank += (i32)(warp_sum >> 16);
    const i32 victims = max(0, min((i32)(count & 0xffff), misses - s));  // the first stale ones of this thread
    u32 evictions = 0;
    i32 v = 0;
#pragma unroll
    for (i32 e = 0; e < EACH; ++e) {
      const bool taken = v < victims && class_of(slot[e]) == 1;
      v += taken;
      pooled[e] = taken ? pooled_at(slot[e]) : -1;
      evicted[e] = taken ? p.slot_to_block[pooled[e]] : -1;
    }
#pragma unroll
    for (i32 e = 0; e < EACH; ++e) {
      const u32 kind = class_of(slot[e]);
      i32 to = last;
      if (kind == 1) {
        to = s - misses;
        if (s < misses) {
          to = s == open_rank ? last : kept + s - (open_missing && s > open_rank ? 1 : 0);
          const i32 block = miss_block[s];
#pragma unroll 1
          for (i32 i = 0; i < CLUSTER; ++i) tell((u32*)&given[s], (u32)pooled[e], &given_arrived, i);
          if (evicted[e] >= 0) block_to_slot[evicted[e]] = -1, ++evictions;
          block_to_slot[block] = slot[e];
          p.slot_to_block[pooled[e]] = block;
        }
        ++s;
      } else if (kind) {
        to = hits_at + h++;
      }
      if (slot[e] >= 0 && to != at + e) p.order[pooled_at(to)] = slot[e];
    }
    evictions = misses ? __reduce_add_sync(ALL, evictions) : 0;
    if (lane_id == 0 && evictions) atomicAdd(&p.counters[EVICTIONS], (u64)evictions);
  }
  if (rank == 0 && thread == 0) {
    const u32 fetches = misses - (open_missing ? 1 : 0);
    const bool open_hit = open_missing ? !open_last : chosen_bits[open_held >> 5] >> (open_held & 31) & 1;
    const u32 hits = hits_all + (open_hit ? 1 : 0);
    atomicAdd(&p.counters[CHOSEN], (u64)(hits + fetches));
    atomicAdd(&p.counters[HITS], (u64)hits);
    if (misses) {
      atomicAdd(&p.counters[MISSES], (u64)fetches);
      atomicAdd(&p.counters[FETCHED_BYTES], (u64)fetches * BLOCK_BYTES);
    }
    if (p.plan_count) p.plan_count[batch_lane] = (i32)fetches;
  }
  if (misses) wait_for_messages(&given_arrived);
  if (SWEEP && CLUSTER > 1) __syncthreads();  // the list in its new sequence

  if (rank == 0 && thread == 0) p.open_slot[batch_lane] = open_missing ? given[open_rank] : pooled_at(open_held);
  for (i32 t = 0; t < ID_TILES; ++t) {
    const i32 j = (warp * ID_TILES + t) * 32 + lane_id;
    if (j >= p.top_k || (t * WARPS + warp) % CLUSTER != rank) continue;
    out[j] = held[t] >= 0 ? pooled_at(held[t]) : place[t] >= 0 ? given[hash_rank[place[t]]] : -1;
    if (resident) resident[j] = place[t] >= 0 && ids[t] != opened ? -1 : ids[t];
    if (p.plan_count && leads[t] && ids[t] != opened) {
      const i32 s = hash_rank[place[t]], rank_of_fetch = s - (s > open_rank ? 1 : 0);
      const i32 at = batch_lane * p.top_k + rank_of_fetch;
      p.plan_source[at] = (i32)home_of(ids[t]);
      p.plan_target[at] = given[s];
      if (resident) coming[rank_of_fetch] = ids[t];
    }
  }
  nothing_comes_from(misses - (open_missing ? 1 : 0));

  // ---- copy
  for (i32 base = copier; base < total; base += COPY_DEPTH * p.copy_threads) {
#pragma unroll
    for (i32 d = 0; d < COPY_DEPTH; ++d) {
      const i32 c = base + d * p.copy_threads;
      if (c < total) pool[(size_t)given[hash_rank[copy_place[c / PART_CHUNKS]]] * CHUNKS + c % PART_CHUNKS] = piece[d];
    }
#pragma unroll
    for (i32 d = 0; d < COPY_DEPTH; ++d) {
      const i32 c = base + (COPY_DEPTH + d) * p.copy_threads;
      if (c < total) piece[d] = load_host(arena + (size_t)copy_home[c / PART_CHUNKS] * CHUNKS + c % PART_CHUNKS);
    }
  }
  if (thread == THREADS - 1 && list && p.waited_until) count_wait(p.counters, p.waited_until, begun);
}
