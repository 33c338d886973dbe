// merge_parts: attention over two parts as attention over both, weighed by their sums, in float32.
//
// The definition is the twin, kernels/attend_part.py (merge_parts). Knows rows of numbers and what each weighs.
// A thread makes eight neighbours of one head of one token.
//
// Compile-time: HEAD_DIM (multiple of 8), ELEMENT (of the model: 0 float32, 1 bfloat16, 2 float16), FIRST_WIDE,
// OUT_WIDE (1: float32, whatever ELEMENT says), THREADS.

#include "elements.cuh"

struct MergePartsParams {
  const void* first;        // [tokens, heads, HEAD_DIM], strides in elements
  const void* second;       // likewise, of ELEMENT
  const float* first_lse;   // [tokens, heads], strides in elements
  const float* second_lse;  // likewise
  void* out;                // [tokens, heads, HEAD_DIM] contiguous
  float* out_lse;           // [tokens, heads] contiguous
  i64 first_token, first_head, second_token, second_head;
  i64 first_lse_token, first_lse_head, second_lse_token, second_lse_head;
  u32 tokens, heads;
};

constexpr i32 PIECES = HEAD_DIM / 8;
static_assert(PIECES * 8 == HEAD_DIM, "a head must be whole pieces of eight");

template <bool WIDE>
__device__ __forceinline__ void load_8(const void* tensor, i64 at, float (&values)[8]) {
  if (WIDE || ELEMENT == 0) {
    const float4 low = *(const float4*)((const float*)tensor + at), high = *(const float4*)((const float*)tensor + at + 4);
    values[0] = low.x, values[1] = low.y, values[2] = low.z, values[3] = low.w;
    values[4] = high.x, values[5] = high.y, values[6] = high.z, values[7] = high.w;
  } else {
    const int4 packed = *(const int4*)((const u16*)tensor + at);
    const u32 words[4] = {(u32)packed.x, (u32)packed.y, (u32)packed.z, (u32)packed.w};
#pragma unroll
    for (i32 i = 0; i < 4; ++i) {
      const float2 wide = unpack(words[i]);
      values[2 * i] = wide.x, values[2 * i + 1] = wide.y;
    }
  }
}

extern "C" __global__ void __launch_bounds__(THREADS) merge_parts(const __grid_constant__ MergePartsParams p) {
  const u32 at = blockIdx.x * THREADS + threadIdx.x, row = at / PIECES, piece = at % PIECES;
  const u32 token = row / p.heads, head = row % p.heads;
  if (token >= p.tokens) return;
  const float first = p.first_lse[token * p.first_lse_token + head * p.first_lse_head];
  const float second = p.second_lse[token * p.second_lse_token + head * p.second_lse_head];
  const float most = fmaxf(first, second);
  const float sum = most + log1pf(expf(fminf(first, second) - most));
  const float by_first = expf(first - sum), by_second = expf(second - sum);
  float one[8], other[8];
  load_8<FIRST_WIDE>(p.first, token * p.first_token + head * p.first_head + piece * 8, one);
  load_8<false>(p.second, token * p.second_token + head * p.second_head + piece * 8, other);
#pragma unroll
  for (i32 i = 0; i < 8; ++i) one[i] = fmaf(one[i], by_first, other[i] * by_second);
  const i64 to = (i64)row * HEAD_DIM + piece * 8;
  if (OUT_WIDE || ELEMENT == 0) {
    *(float4*)((float*)p.out + to) = make_float4(one[0], one[1], one[2], one[3]);
    *(float4*)((float*)p.out + to + 4) = make_float4(one[4], one[5], one[6], one[7]);
  } else {
    *(int4*)((u16*)p.out + to) = int4{(i32)pack(one[0], one[1]), (i32)pack(one[2], one[3]),
                                      (i32)pack(one[4], one[5]), (i32)pack(one[6], one[7])};
  }
  if (piece == 0) p.out_lse[row] = sum;
}
