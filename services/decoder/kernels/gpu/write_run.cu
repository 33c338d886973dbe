// write_run: a run of a prompt's keys and values, as records into pages. One thread, one 16-byte piece.
//
// The definition is the twin, kernels/write_run.py. Knows one layer's bytes, no history.
//
// Compile-time: KV_HEADS, GROUPS, SIDES (2: keys and values, 1: keys alone), HEAD_BYTES (of one head,
// multiple of 16), PAGE_TOKENS, THREADS.

struct WriteRunParams {
  const char* key;    // [tokens, KV_HEADS, HEAD_BYTES], tokens key_stride bytes apart
  const char* value;  // likewise
  int4* target;       // [all pages, GROUPS, PAGE_TOKENS, record]
  const i32* pages;   // from the first that the run touches
  i64 key_stride, value_stride;
  i32 first;          // where the run begins in its first page
  i32 tokens;
};

constexpr i32 HEAD = HEAD_BYTES / 16;
constexpr i32 SIDE = KV_HEADS / GROUPS * HEAD;  // pieces of a record's keys
constexpr i32 RECORD = SIDES * SIDE;
constexpr i32 ROW = GROUPS * RECORD;
static_assert(HEAD * 16 == HEAD_BYTES, "a head must be whole 16-byte pieces");

extern "C" __global__ void __launch_bounds__(THREADS) write_run(const __grid_constant__ WriteRunParams p) {
  const u32 at = blockIdx.x * THREADS + threadIdx.x;
  const i32 token = at / ROW, piece = at % ROW;
  if (token >= p.tokens) return;
  const i32 group = piece / RECORD, in_record = piece % RECORD;
  const i64 in_row = (i64)(group * SIDE + in_record % SIDE) * 16;
  const char* from = in_record < SIDE ? p.key + token * p.key_stride : p.value + token * p.value_stride;
  const i32 position = p.first + token;
  const i64 home = ((i64)p.pages[position / PAGE_TOKENS] * GROUPS + group) * PAGE_TOKENS + position % PAGE_TOKENS;
  p.target[home * RECORD + in_record] = *(const int4*)(from + in_row);
}
