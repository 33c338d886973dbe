// append: each row's new record to its open slot and, through, to the arena; the open block's bounds widen.
//
// The definition is the twin, kernels/twins.py (append). Knows one layer's bytes (struct below), no history.
// A thread moves one 16-byte piece of one row's keys or values to both sides; a key's thread also takes it into
// the two pieces of the bounds that it touches. A block that opens has its other records zeroed and its bounds
// start afresh, as the twin does it: what the slot held before was another row's. A full block's bounds are
// written through to the arena.
//
// Compile-time: KV_HEADS, GROUPS, SIDES (2: keys and values, 1: keys alone), HEAD_DIM, BLOCK_TOKENS, BLOCKS_PER_PAGE,
// ELEMENT (0 float32, 1 bfloat16, 2 float16, 3 bytes, of which no bounds are kept), THREADS.

#include "widest.cuh"

struct AppendParams {
  const char* key;          // [rows, KV_HEADS, HEAD_DIM], rows key_stride bytes apart
  const char* value;        // likewise
  const i32* open_slot;     // [rows * GROUPS] pool slots
  const i32* seats;         // [rows] row of the tables that each row of the batch sits in
  const i32* length;        // [rows] tokens, the new one included
  const i32* real_rows;     // [1] rows of the batch that are not padding
  const i32* host_pages;    // [table rows, max_pages]
  const i32* device_pages;  // [table rows, max_pages]
  int4* pool;               // [pool slots, BLOCK_TOKENS, record]
  int4* arena;              // this layer's [host blocks, BLOCK_TOKENS, record] in host memory
  int4* bounds;             // [device pages, BLOCKS_PER_PAGE, KV_HEADS, 2 * HEAD_DIM], or null
  int4* arena_bounds;       // this layer's [host pages, BLOCKS_PER_PAGE, KV_HEADS, 2 * HEAD_DIM] in host memory
  i64 key_stride, value_stride;
  i32 max_pages;
};

constexpr i32 HEAD_BYTES = HEAD_DIM * (ELEMENT == 0 ? 4 : ELEMENT == 3 ? 1 : 2);
constexpr i32 HEAD = HEAD_BYTES / 16;                         // 16-byte pieces of one head's key
constexpr i32 SIDE = KV_HEADS / GROUPS * HEAD;                // of a record's keys
constexpr i32 RECORD = SIDES * SIDE;                          // of a record: the group's keys, then its values
constexpr i32 ROW = GROUPS * RECORD;
constexpr i32 PARTS = (ROW + THREADS - 1) / THREADS;          // thread blocks of one row
static_assert(HEAD * 16 == HEAD_BYTES, "a head must be whole 16-byte pieces");

extern "C" __global__ void __launch_bounds__(THREADS) append(const __grid_constant__ AppendParams p) {
  let_next_begin();
  const i32 row = blockIdx.x / PARTS;
  const i32 piece = blockIdx.x % PARTS * THREADS + threadIdx.x;
  const i32 group = piece / RECORD, in_record = piece % RECORD;
  const bool is_key = in_record < SIDE;
  const bool present = piece < ROW && row < *p.real_rows;
  i32 offset = 0, in_page = 0, host_page = 0, device_page = 0;
  if (present) {
    const i32 position = p.length[row] - 1, opened = position / BLOCK_TOKENS;
    const i64 page = (i64)p.seats[row] * p.max_pages + opened / BLOCKS_PER_PAGE;
    offset = position % BLOCK_TOKENS, in_page = opened % BLOCKS_PER_PAGE;
    host_page = p.host_pages[page];
    if (p.bounds) device_page = p.device_pages[page];
  }
  wait_for_previous();
  if (!present) return;

  const i64 in_row = (i64)(group * SIDE + in_record % SIDE) * 16;
  const int4 fresh = *(const int4*)((is_key ? p.key + row * p.key_stride : p.value + row * p.value_stride) + in_row);
  int4* slot = p.pool + (i64)p.open_slot[row * GROUPS + group] * BLOCK_TOKENS * RECORD + in_record;
  if (p.bounds && is_key) {
    const i32 head = group * (SIDE / HEAD) + in_record / HEAD;
    int4* highest = p.bounds + (((i64)device_page * BLOCKS_PER_PAGE + in_page) * KV_HEADS + head) * 2 * HEAD + in_record % HEAD;
    int4 up = fresh, down = minus(fresh);
    if (offset) up = larger(up, highest[0]), down = larger(down, highest[HEAD]);
    highest[0] = up, highest[HEAD] = down;
    if (offset == BLOCK_TOKENS - 1) {  // the block is full: these are its bounds for good
      int4* saved = p.arena_bounds + (highest - p.bounds) +
                    ((i64)host_page - device_page) * BLOCKS_PER_PAGE * KV_HEADS * 2 * HEAD;
      saved[0] = up, saved[HEAD] = down;
    }
  }
  slot[offset * RECORD] = fresh;
  const i64 home = ((i64)host_page * GROUPS + group) * BLOCKS_PER_PAGE + in_page;
  p.arena[(home * BLOCK_TOKENS + offset) * RECORD + in_record] = fresh;
  if (offset == 0)
    for (i32 later = 1; later < BLOCK_TOKENS; ++later) slot[later * RECORD] = int4{0, 0, 0, 0};
}
