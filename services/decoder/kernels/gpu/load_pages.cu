// load_pages: pages of every layer from host memory into the device's pools, beside other work.
//
// The definition is the twin, kernels/load_pages.py. What counts is how few multiprocessors it holds and for how
// long: a few thread blocks stay for the whole of it, each takes one page of one layer after the other, and a
// thread keeps DEPTH loads in flight.
//
// Compile-time: PAGE_BYTES (of one layer, multiple of 16), THREADS, DEPTH.

#include "fetch.cuh"

struct LoadPagesParams {
  const u64* layers;  // [2, layer_count] addresses of a layer's pages: in the arena, in the pool
  const i64* pages;   // [2, page_count] pages: of the arena, of the pool
  i32 layer_count, page_count;
};

constexpr i32 PIECES = PAGE_BYTES / 16;
static_assert(PIECES * 16 == PAGE_BYTES, "a page must be whole 16-byte pieces");

extern "C" __global__ void __launch_bounds__(THREADS) load_pages(const __grid_constant__ LoadPagesParams p) {
  const i64 units = (i64)p.layer_count * p.page_count;
  for (i64 unit = blockIdx.x; unit < units; unit += gridDim.x) {
    const i32 layer = unit / p.page_count, page = unit % p.page_count;
    const int4* source = (const int4*)p.layers[layer] + p.pages[page] * PIECES;
    int4* target = (int4*)p.layers[p.layer_count + layer] + p.pages[p.page_count + page] * PIECES;
    for (i32 first = threadIdx.x; first < PIECES; first += DEPTH * THREADS) {
      int4 piece[DEPTH];
#pragma unroll
      for (i32 d = 0; d < DEPTH; ++d) {
        const i32 at = first + d * THREADS;
        if (at < PIECES) piece[d] = load_host(source + at);
      }
#pragma unroll
      for (i32 d = 0; d < DEPTH; ++d) {
        const i32 at = first + d * THREADS;
        if (at < PIECES) target[at] = piece[d];
      }
    }
  }
}
