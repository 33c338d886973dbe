// add_entry: each row's new token to the entry that it is part of, on the device and, through, in the arena.
//
// The definition is the twin, kernels/block_twins.py (add). An entry begins with its first token: what lay there
// before was another's. A thread takes four numbers to both sides.
//
// Compile-time: ENTRY (numbers, a multiple of 4), ENTRY_TOKENS, PAGE_TOKENS, ELEMENT (0 float32, 1 bfloat16,
// 2 float16), THREADS.

#include "elements.cuh"

struct AddEntryParams {
  const void* added;        // [rows, ENTRY] the tokens' keys and values, weighted
  const i32* seats;         // [rows] row of the tables that each row of the batch sits in
  const i32* length;        // [rows] tokens, the new one included
  const i32* real_rows;     // [1] rows of the batch that are not padding
  const i32* host_pages;    // [table rows, max_pages]
  const i32* device_pages;  // [table rows, max_pages]
  void* device;             // [device pages, PAGE_TOKENS / ENTRY_TOKENS, ENTRY]
  void* arena;              // this layer's [host pages, PAGE_TOKENS / ENTRY_TOKENS, ENTRY] in host memory
  i32 max_pages;
};

constexpr i32 QUADS = ENTRY / 4;
constexpr i32 PAGE_ENTRIES = PAGE_TOKENS / ENTRY_TOKENS;
static_assert(QUADS * 4 == ENTRY && PAGE_ENTRIES * ENTRY_TOKENS == PAGE_TOKENS, "entries must be whole, and fill pages");

__device__ __forceinline__ float4 load_4(const void* tensor, i64 at) {
  if (ELEMENT == 0) return *(const float4*)((const float*)tensor + at);
  const uint2 both = *(const uint2*)((const u16*)tensor + at);
  const float2 low = unpack(both.x), high = unpack(both.y);
  return {low.x, low.y, high.x, high.y};
}

extern "C" __global__ void __launch_bounds__(THREADS) add_entry(const __grid_constant__ AddEntryParams p) {
  wait_for_previous();
  let_next_begin();
  const i32 at = blockIdx.x * THREADS + threadIdx.x, row = at / QUADS, quad = at % QUADS;
  if (row >= *p.real_rows) return;
  const i32 position = p.length[row] - 1;
  const i64 page = (i64)p.seats[row] * p.max_pages + position / PAGE_TOKENS;
  const i32 entry = position % PAGE_TOKENS / ENTRY_TOKENS;
  const i64 device = (((i64)p.device_pages[page] * PAGE_ENTRIES + entry) * QUADS + quad) * 4;
  const i64 arena = (((i64)p.host_pages[page] * PAGE_ENTRIES + entry) * QUADS + quad) * 4;
  float4 sum = load_4(p.added, (i64)at * 4);
  if (position % ENTRY_TOKENS) {
    const float4 before = load_4(p.device, device);
    sum = {before.x + sum.x, before.y + sum.y, before.z + sum.z, before.w + sum.w};
  }
  store_4(p.device, device, sum);
  store_4(p.arena, arena, sum);
}
