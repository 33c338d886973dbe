// gather_pages: pages of one layer into one run of records a group, in token order.
//
// The definition is the twin, kernels/gather_pages.py. Knows the bytes of a group's share of a page, nothing in it.
// A thread moves DEPTH pieces of 16 bytes, all of them in flight at once.
//
// Compile-time: GROUPS, GROUP_BYTES (of one group in a page, multiple of 16), THREADS, DEPTH.

struct GatherPagesParams {
  const int4* source;  // [all pages, GROUPS, GROUP_BYTES]
  const i32* pages;    // [count]
  int4* out;           // [GROUPS, count, GROUP_BYTES]
  u32 count;
};

constexpr u32 PIECES = GROUP_BYTES / 16;
static_assert(PIECES * 16 == GROUP_BYTES, "a group's share of a page must be whole 16-byte pieces");

extern "C" __global__ void __launch_bounds__(THREADS) gather_pages(const __grid_constant__ GatherPagesParams p) {
  const u32 total = GROUPS * p.count * PIECES;
  const u32 first = blockIdx.x * THREADS * DEPTH + threadIdx.x;
  int4 piece[DEPTH];
#pragma unroll
  for (i32 d = 0; d < DEPTH; ++d) {
    const u32 at = first + d * THREADS, run = at / PIECES;
    if (at < total) {
      const i32 group = run / p.count, page = p.pages[run % p.count];
      piece[d] = p.source[((i64)page * GROUPS + group) * PIECES + at % PIECES];
    }
  }
#pragma unroll
  for (i32 d = 0; d < DEPTH; ++d) {
    const u32 at = first + d * THREADS;
    if (at < total) p.out[at] = piece[d];
  }
}
