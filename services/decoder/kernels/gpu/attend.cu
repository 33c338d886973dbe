// attend: one query a row over the blocks its lanes chose, read from hot slots.
//
// The definition is the twin, kernels/attend.py (attend_slots). Knows slots and positions, no row's history.
// A thread block serves one KV head of one lane and one split of its blocks; the G query heads that share the
// KV head are computed together, so that every byte is read once. LANES threads of a warp hold one token; a
// warp takes STRIDE tokens at a time and keeps its own running softmax. Splits are merged by whichever block
// of them ends last. All sums in float32.
//
// Compile-time: HEAD_DIM, GROUP_SIZE (G), BLOCK_TOKENS, ELEMENT (0 float32, 1 bfloat16, 2 float16), WARPS.

using i32 = int;
using u32 = unsigned int;
using u16 = unsigned short;

struct AttendParams {
  const void* query;      // [rows, groups * heads * G, HEAD_DIM]
  const void* pool;       // [pool slots, BLOCK_TOKENS, 2, heads, HEAD_DIM]
  const i32* slots;       // [rows * groups, top_k] pool slots, -1 = none
  const i32* selected;    // [rows * groups, top_k] the blocks in them, -1 = none
  const i32* length;      // [rows] tokens, the newest included
  const i32* real_rows;   // [1]
  void* out;              // [rows, groups * heads * G, HEAD_DIM]
  float* partial;         // [rows * groups * heads, splits, G, HEAD_DIM + 2]: sums, then maximum and weight
  u32* arrived;           // [rows * groups * heads], zero between launches
  float scaling;
  i32 top_k, groups, heads, splits;
};

constexpr i32 ELEMENT_BYTES = ELEMENT == 0 ? 4 : 2;
constexpr i32 VECTOR = 16 / ELEMENT_BYTES;                 // elements of one 16-byte load
constexpr i32 VECTORS = HEAD_DIM / VECTOR;                 // loads of one key
__device__ constexpr i32 power_of_two(i32 n) { return n <= 1 ? 1 : 2 * power_of_two((n + 1) / 2); }
constexpr i32 LANES = power_of_two(VECTORS) < 32 ? power_of_two(VECTORS) : 32;  // threads of one token
constexpr i32 LOADS = (VECTORS + LANES - 1) / LANES;       // of each of them
constexpr i32 STRIDE = 32 / LANES;                         // tokens of a warp at a time
constexpr i32 DEPTH = 4;                                   // of those in flight
constexpr float LOWEST = -3.0e38f;
static_assert(HEAD_DIM % VECTOR == 0, "a key must be whole 16-byte loads");

__device__ __forceinline__ void unpack(const int4& raw, float* values) {
  const u32 words[4] = {(u32)raw.x, (u32)raw.y, (u32)raw.z, (u32)raw.w};
#pragma unroll
  for (i32 i = 0; i < 4; ++i) {
    if (ELEMENT == 0) {
      values[i] = __uint_as_float(words[i]);
    } else if (ELEMENT == 1) {
      values[2 * i] = __uint_as_float(words[i] << 16);
      values[2 * i + 1] = __uint_as_float(words[i] & 0xffff0000u);
    } else {
      asm("{.reg .b16 l, h; mov.b32 {l, h}, %2; cvt.f32.f16 %0, l; cvt.f32.f16 %1, h;}"
          : "=f"(values[2 * i]), "=f"(values[2 * i + 1])
          : "r"(words[i]));
    }
  }
}

__device__ __forceinline__ void store(void* out, long long at, float value) {
  if (ELEMENT == 0) {
    ((float*)out)[at] = value;
  } else {
    u16 bits;
    if (ELEMENT == 1) asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    else asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    ((u16*)out)[at] = bits;
  }
}

extern "C" __global__ void __launch_bounds__(WARPS * 32) attend(const __grid_constant__ AttendParams p) {
  const i32 split = blockIdx.x % p.splits, unit = blockIdx.x / p.splits;
  const i32 head = unit % p.heads, lane = unit / p.heads, row = lane / p.groups;
  if (row >= *p.real_rows) return;
  const i32 warp = threadIdx.x / 32, inside = threadIdx.x % 32;
  const i32 part = inside % LANES, token_lane = inside / LANES;
  const i32 length = p.length[row];
  const i32 kv_head = (lane % p.groups) * p.heads + head;
  const i32 query_heads = p.groups * p.heads * GROUP_SIZE;
  const long long query_at = ((long long)row * query_heads + (long long)kv_head * GROUP_SIZE) * HEAD_DIM;

  float query[GROUP_SIZE][LOADS * VECTOR], sum[GROUP_SIZE][LOADS * VECTOR] = {}, top[GROUP_SIZE], weight[GROUP_SIZE];
#pragma unroll
  for (i32 g = 0; g < GROUP_SIZE; ++g) {
    top[g] = LOWEST, weight[g] = 0;
#pragma unroll
    for (i32 l = 0; l < LOADS; ++l) {
      const i32 v = l * LANES + part;
      int4 raw = {0, 0, 0, 0};
      if (v < VECTORS) raw = *(const int4*)((const char*)p.query + (query_at + g * HEAD_DIM + v * VECTOR) * ELEMENT_BYTES);
      unpack(raw, &query[g][l * VECTOR]);
#pragma unroll
      for (i32 i = 0; i < VECTOR; ++i) query[g][l * VECTOR + i] *= p.scaling * 1.44269504f;  // log2(e): exp2 below
    }
  }

  const i32 blocks = (p.top_k + p.splits - 1) / p.splits;
  const i32 first = split * blocks * BLOCK_TOKENS;
  const i32 last = min(p.top_k, (split + 1) * blocks) * BLOCK_TOKENS;
  const i32* slots = p.slots + (long long)lane * p.top_k;
  const i32* selected = p.selected + (long long)lane * p.top_k;
  const long long record_bytes = 2ll * p.heads * HEAD_DIM * ELEMENT_BYTES;
  const long long value_offset = (long long)p.heads * HEAD_DIM * ELEMENT_BYTES;
  const char* pool = (const char*)p.pool + (long long)head * HEAD_DIM * ELEMENT_BYTES;

  for (i32 base = first + warp * STRIDE; base < last; base += WARPS * STRIDE * DEPTH) {
    int4 key[DEPTH][LOADS], value[DEPTH][LOADS];
    bool seen[DEPTH];
#pragma unroll
    for (i32 d = 0; d < DEPTH; ++d) {
      const i32 i = base + d * WARPS * STRIDE + token_lane;
      const i32 at = i / BLOCK_TOKENS, offset = i % BLOCK_TOKENS;
      const i32 block = i < last ? selected[at] : -1;
      seen[d] = block >= 0 && block * BLOCK_TOKENS + offset < length;
      const char* record = pool + ((long long)(seen[d] ? slots[at] : 0) * BLOCK_TOKENS + offset) * record_bytes;
#pragma unroll
      for (i32 l = 0; l < LOADS; ++l) {
        const i32 v = l * LANES + part;
        key[d][l] = value[d][l] = int4{0, 0, 0, 0};
        if (seen[d] && v < VECTORS) {
          key[d][l] = *(const int4*)(record + v * 16);
          value[d][l] = *(const int4*)(record + value_offset + v * 16);
        }
      }
    }
    float score[DEPTH][GROUP_SIZE];
#pragma unroll
    for (i32 d = 0; d < DEPTH; ++d) {
      float numbers[LOADS * VECTOR];
#pragma unroll
      for (i32 l = 0; l < LOADS; ++l) unpack(key[d][l], &numbers[l * VECTOR]);
#pragma unroll
      for (i32 g = 0; g < GROUP_SIZE; ++g) {
        float dot = 0;
#pragma unroll
        for (i32 i = 0; i < LOADS * VECTOR; ++i) dot = fmaf(query[g][i], numbers[i], dot);
#pragma unroll
        for (i32 step = LANES / 2; step; step /= 2) dot += __shfl_xor_sync(~0u, dot, step);
        score[d][g] = seen[d] ? dot : LOWEST;
      }
    }
#pragma unroll
    for (i32 g = 0; g < GROUP_SIZE; ++g) {
      float higher = top[g];
#pragma unroll
      for (i32 d = 0; d < DEPTH; ++d) higher = fmaxf(higher, score[d][g]);
      const float fade = exp2f(top[g] - higher);
      top[g] = higher;
      weight[g] *= fade;
#pragma unroll
      for (i32 i = 0; i < LOADS * VECTOR; ++i) sum[g][i] *= fade;
#pragma unroll
      for (i32 d = 0; d < DEPTH; ++d) {
        score[d][g] = seen[d] ? exp2f(score[d][g] - higher) : 0;
        weight[g] += score[d][g];
      }
    }
#pragma unroll
    for (i32 d = 0; d < DEPTH; ++d) {
      float numbers[LOADS * VECTOR];
#pragma unroll
      for (i32 l = 0; l < LOADS; ++l) unpack(value[d][l], &numbers[l * VECTOR]);
#pragma unroll
      for (i32 g = 0; g < GROUP_SIZE; ++g)
#pragma unroll
        for (i32 i = 0; i < LOADS * VECTOR; ++i) sum[g][i] = fmaf(score[d][g], numbers[i], sum[g][i]);
    }
  }

  // The token lanes of each warp and then the warps meet in shared memory, in a fixed order.
  __shared__ float tops[WARPS * STRIDE][GROUP_SIZE], weights[WARPS * STRIDE][GROUP_SIZE];
  __shared__ float sums[WARPS * STRIDE][HEAD_DIM];
  const i32 walker = warp * STRIDE + token_lane;
  if (part == 0)
    for (i32 g = 0; g < GROUP_SIZE; ++g) tops[walker][g] = top[g], weights[walker][g] = weight[g];
  __syncthreads();
  float* partial = p.partial + (((long long)unit * p.splits + split) * GROUP_SIZE) * (HEAD_DIM + 2);
  for (i32 g = 0; g < GROUP_SIZE; ++g) {
    float highest = LOWEST, total = 0;
    for (i32 w = 0; w < WARPS * STRIDE; ++w) highest = fmaxf(highest, tops[w][g]);
    for (i32 w = 0; w < WARPS * STRIDE; ++w) total += weights[w][g] * exp2f(tops[w][g] - highest);
    float mine = 0;
#pragma unroll
    for (i32 k = 0; k < GROUP_SIZE; ++k) if (k == g) mine = exp2f(top[k] - highest);
#pragma unroll
    for (i32 l = 0; l < LOADS; ++l)
#pragma unroll
      for (i32 i = 0; i < VECTOR; ++i) {
        const i32 at = (l * LANES + part) * VECTOR + i;
        float own = 0;
#pragma unroll
        for (i32 k = 0; k < GROUP_SIZE; ++k) if (k == g) own = sum[k][l * VECTOR + i];
        if (at < HEAD_DIM) sums[walker][at] = own * mine;
      }
    __syncthreads();
    for (i32 at = threadIdx.x; at < HEAD_DIM; at += WARPS * 32) {
      float all = 0;
      for (i32 w = 0; w < WARPS * STRIDE; ++w) all += sums[w][at];
      if (p.splits == 1) store(p.out, query_at + (long long)g * HEAD_DIM + at, all / total);
      else partial[g * (HEAD_DIM + 2) + at] = all;
    }
    if (threadIdx.x == 0 && p.splits > 1) {
      partial[g * (HEAD_DIM + 2) + HEAD_DIM] = highest;
      partial[g * (HEAD_DIM + 2) + HEAD_DIM + 1] = total;
    }
    __syncthreads();
  }
  if (p.splits == 1) return;

  // Whoever ends last merges all splits, in their order, so that the result never depends on who that is.
  __shared__ bool is_last;
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) {
    is_last = atomicAdd(&p.arrived[unit], 1) == (u32)p.splits - 1;
    if (is_last) p.arrived[unit] = 0;
  }
  __syncthreads();
  if (!is_last) return;
  __threadfence();
  const volatile float* all = p.partial + (long long)unit * p.splits * GROUP_SIZE * (HEAD_DIM + 2);
  for (i32 g = 0; g < GROUP_SIZE; ++g) {
    float highest = LOWEST;
    for (i32 s = 0; s < p.splits; ++s) highest = fmaxf(highest, all[(s * GROUP_SIZE + g) * (HEAD_DIM + 2) + HEAD_DIM]);
    for (i32 at = threadIdx.x; at < HEAD_DIM; at += WARPS * 32) {
      float total = 0, merged = 0;
      for (i32 s = 0; s < p.splits; ++s) {
        const volatile float* theirs = all + (s * GROUP_SIZE + g) * (HEAD_DIM + 2);
        const float scale = exp2f(theirs[HEAD_DIM] - highest);
        merged += theirs[at] * scale;
        total += theirs[HEAD_DIM + 1] * scale;
      }
      store(p.out, query_at + (long long)g * HEAD_DIM + at, merged / total);
    }
  }
}
