// locate: logical blocks -> where they lie in a device-resident pool. A look-up in the rows' page tables.
//
// The definition is the twin, kernels/twins.py (locate). One thread an id.
//
// Compile-time: TOP_K, GROUPS, BLOCK_TOKENS, BLOCKS_PER_PAGE, THREADS.

struct LocateParams {
  const i32* selected;      // [rows * GROUPS, TOP_K] blocks, -1 = none
  const i32* seats;         // [rows] row of the tables that each row of the batch sits in
  const i32* length;        // [rows] tokens, the newest included
  const i32* real_rows;     // [1] rows of the batch that are not padding
  const i32* device_pages;  // [table rows, max_pages]
  i32* slots;               // out [rows * GROUPS, TOP_K] blocks of the pool, -1 = none
  i32* open_slot;           // out [rows * GROUPS]
  u64* counters;            // [6], as kernels/counter.py
  i32 lanes, max_pages;     // lanes = rows * GROUPS, padding included
};

enum Counter { CHOSEN, HITS };

extern "C" __global__ void __launch_bounds__(THREADS) locate(const __grid_constant__ LocateParams p) {
  let_next_begin();
  const i32 id = blockIdx.x * THREADS + threadIdx.x;
  const i32 lane = id / TOP_K, row = lane / GROUPS, group = lane % GROUPS;
  const bool present = lane < p.lanes, real = present && row < *p.real_rows, leads = present && id % TOP_K == 0;
  const i32* pages = p.device_pages;
  auto place = [&](i32 block) {
    return (pages[block / BLOCKS_PER_PAGE] * GROUPS + group) * BLOCKS_PER_PAGE + block % BLOCKS_PER_PAGE;
  };
  i32 open_slot = -1;
  if (real) {
    pages += (i64)p.seats[row] * p.max_pages;
    if (leads) open_slot = place((p.length[row] - 1) / BLOCK_TOKENS);
  }
  wait_for_previous();

  const i32 block = real ? p.selected[id] : -1;
  if (present) p.slots[id] = block >= 0 ? place(block) : -1;
  if (leads) p.open_slot[lane] = open_slot;
  const i32 chosen = __syncthreads_count(block >= 0);
  if (threadIdx.x == 0 && chosen) {
    atomicAdd(&p.counters[CHOSEN], (u64)chosen);
    atomicAdd(&p.counters[HITS], (u64)chosen);
  }
}
