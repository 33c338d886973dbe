// append_entry: each row's new index key to its place on the device and, through, in the arena.
//
// The definition is the twin, kernels/latent_twins.py (observe). A thread moves one 16-byte piece to both sides.
//
// Compile-time: ENTRY_BYTES (multiple of 16), PAGE_TOKENS, THREADS.

struct AppendEntryParams {
  const int4* key;          // [rows, ENTRY_BYTES]
  const i32* seats;         // [rows] row of the tables that each row of the batch sits in
  const i32* length;        // [rows] tokens, the new one included
  const i32* real_rows;     // [1] rows of the batch that are not padding
  const i32* host_pages;    // [table rows, max_pages]
  const i32* device_pages;  // [table rows, max_pages]
  int4* device;             // [device pages, PAGE_TOKENS, ENTRY_BYTES]
  int4* arena;              // this layer's [host pages, PAGE_TOKENS, ENTRY_BYTES] in host memory
  i32 max_pages;
};

constexpr i32 PIECES = ENTRY_BYTES / 16;
static_assert(PIECES * 16 == ENTRY_BYTES, "an entry must be whole 16-byte pieces");

extern "C" __global__ void __launch_bounds__(THREADS) append_entry(const __grid_constant__ AppendEntryParams p) {
  let_next_begin();
  const i32 at = blockIdx.x * THREADS + threadIdx.x, row = at / PIECES, piece = at % PIECES;
  const bool real = row < *p.real_rows;
  i64 device = 0, arena = 0;
  if (real) {
    const i32 position = p.length[row] - 1;
    const i64 page = (i64)p.seats[row] * p.max_pages + position / PAGE_TOKENS;
    device = ((i64)p.device_pages[page] * PAGE_TOKENS + position % PAGE_TOKENS) * PIECES + piece;
    arena = ((i64)p.host_pages[page] * PAGE_TOKENS + position % PAGE_TOKENS) * PIECES + piece;
  }
  wait_for_previous();
  if (!real) return;
  const int4 fresh = p.key[at];
  p.device[device] = fresh;
  p.arena[arena] = fresh;
}
