// sample: the next token of each row, from its logits, its wishes and what it has said before. One launch.
//
// The definition is the twin, kernels/sample.py. Knows rows of tables (struct below), no sequences.
//
// A cluster of CLUSTER thread blocks serves a row; each holds a stretch of the vocabulary. Nothing is sorted: the
// order "greatest logit first, ties in token order" is searched by key, a float's bits made to order as unsigned
// numbers, most significant bits first. `find` asks for the place at which the weights so far reach a goal, and
// answers with a key and the weight ahead of it; among tokens of one key, which all weigh the same, a division
// and a count in token order do the rest. So top-k is a goal in tokens, top-p one in mass, and the draw another:
//
//   load     logits -> keys, with penalties; bias and barred tokens; the greatest
//   top-k    (if wished) where the number of tokens reaches k
//   top-p    (if wished) where their mass reaches its share of the total; min-p bounds the same mass
//   draw     where the mass exceeds uniform * what is left of it
//
// Masses are whole numbers, so that atomic sums are exact and every launch gives the same token.
//
// Compile-time: ELEMENT (0 float32, 1 bfloat16, 2 float16), VECTOR (elements a load; 1 where rows are not aligned
// to 16 bytes), CLUSTER, GREEDY (the likeliest of the unchanged logits, or the forced token; no penalties),
// IN_SHARED (keys lie in shared memory; else in `keys`).

struct SampleParams {
  const void* logits;     // [rows, vocab], rows `row_stride` elements apart
  const i32* seats;       // [rows] rows of the tables
  const i32* positions;   // [rows] tokens generated so far
  const i32* forced;      // [rows] the token that must come, -1 = draw one
  const i32* barred;      // [rows] 1 where stop tokens may not come yet
  const i32* real_rows;   // [1]
  const double* wishes;   // [table rows, WISHES]
  const u64* seeds;       // [table rows]
  i32* counts;            // [table rows, vocab] 2 * times generated, + 1 if the prompt has the token
  const i32* bias_ids;    // [table rows, most_biased]
  const float* biases;    // [table rows, most_biased]
  const i32* stop_ids;    // [table rows, most_barred]
  i32* tokens;            // out [rows], -1 = the greatest logit is no finite number
  u32* keys;              // [rows, vocab] workspace, unless IN_SHARED
  i64 row_stride;
  float scale;            // factor on the logits
  i32 vocab, stretch;     // stretch: tokens a thread block, a multiple of 8
  i32 mass_bits, most_biased, most_barred;
};

enum Wish { TEMPERATURE, TOP_P, MIN_P, TOP_K, REPETITION, FREQUENCY, PRESENCE, PENALISED, BIASED, STOPS, WISHES };

constexpr i32 THREADS = 1024, WARPS = THREADS / 32, BINS = 2 * THREADS;
constexpr i32 LOADS = 4;  // of a thread in flight
constexpr i32 ELEMENT_BYTES = ELEMENT == 0 ? 4 : 2;
constexpr u32 NAN_KEY = 0xffffffffu, INFINITE_KEY = 0xff800000u, NOTHING_KEY = 0x007fffffu;  // NaN, +inf, -inf

// ---- the cluster

__device__ __forceinline__ i32 cluster_rank() { return blockIdx.x % CLUSTER; }

__device__ __forceinline__ void cluster_arrive() {
#if __CUDA_ARCH__ >= 900
  if (CLUSTER > 1) asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
#endif
}

__device__ __forceinline__ void cluster_wait() {
#if __CUDA_ARCH__ >= 900
  if (CLUSTER > 1) asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
  if (CLUSTER == 1) __syncthreads();
}

__device__ __forceinline__ void cluster_sync() {
  cluster_arrive();
  cluster_wait();
}

// What lies at `own` in the shared memory of block `rank` of the cluster.
__device__ __forceinline__ u32 load_of(i32 rank, const u32* own) {
  if (CLUSTER == 1) return *own;
  u32 value = 0;
#if __CUDA_ARCH__ >= 900
  asm volatile("{.reg .u32 there; mapa.shared::cluster.u32 there, %1, %2; ld.shared::cluster.u32 %0, [there];}"
               : "=r"(value)
               : "r"((u32)__cvta_generic_to_shared(own)), "r"(rank)
               : "memory");
#endif
  return value;
}

__device__ __forceinline__ u64 load_of(i32 rank, const u64* own) {
  return load_of(rank, (const u32*)own) | (u64)load_of(rank, (const u32*)own + 1) << 32;
}

// ---- shared memory

struct Found {
  u32 key;     // of the token at which the goal is reached
  u64 before;  // weight of all greater keys
  u64 own;     // weight of all tokens with this key
};

struct Shared {
  u32 low[BINS], high[BINS];  // weights by bin, this block's
  u64 by_warp[WARPS];
  u64 told;  // what the other blocks of the cluster read
  u64 all;
  Found found;
  i32 by_warp_ties[WARPS];
};

extern __shared__ __align__(16) u32 dynamic_shared[];  // the keys of this block's stretch, if IN_SHARED

struct Larger {
  __device__ __forceinline__ u64 operator()(u64 a, u64 b) const { return a > b ? a : b; }
};
struct Sum {
  __device__ __forceinline__ u64 operator()(u64 a, u64 b) const { return a + b; }
};

template <typename Merge>
__device__ __forceinline__ u64 merge_warp(u64 value, Merge merge) {
#pragma unroll
  for (i32 step = 16; step; step /= 2) value = merge(value, __shfl_xor_sync(~0u, value, step));
  return value;
}

// `value` of all threads of the cluster, merged; the order does not matter to any merge used here.
template <typename Merge>
__device__ u64 merge_cluster(Shared& shared, u64 value, Merge merge) {
  value = merge_warp(value, merge);
  if (threadIdx.x % 32 == 0) shared.by_warp[threadIdx.x / 32] = value;
  __syncthreads();
  if (threadIdx.x < 32) {
    value = merge_warp(shared.by_warp[threadIdx.x], merge);
    if (threadIdx.x == 0) shared.told = value;
  }
  cluster_sync();
  value = load_of(0, &shared.told);
#pragma unroll
  for (i32 rank = 1; rank < CLUSTER; ++rank) value = merge(value, load_of(rank, &shared.told));
  cluster_sync();
  return value;
}

// ---- logits and keys

__device__ __forceinline__ u32 key_of(float value) {
  const u32 bits = __float_as_uint(value + 0.0f);  // -0 is 0
  if (value != value) return NAN_KEY;
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

__device__ __forceinline__ float value_of(u32 key) {
  return __uint_as_float(key & 0x80000000u ? key & 0x7fffffffu : ~key);
}

struct Raw {
  u32 words[4];  // VECTOR elements; of a single one, the lowest bits
};

__device__ __forceinline__ Raw load(const void* logits, i64 at) {
  if (VECTOR > 1) {
    const uint4 got = *(const uint4*)((const char*)logits + at * ELEMENT_BYTES);
    return {{got.x, got.y, got.z, got.w}};
  }
  return {{ELEMENT == 0 ? ((const u32*)logits)[at] : ((const u16*)logits)[at], 0, 0, 0}};
}

__device__ __forceinline__ void unpack(const Raw& raw, float* values) {
#pragma unroll
  for (i32 i = 0; i < VECTOR; ++i) {
    const u32 word = raw.words[i * ELEMENT_BYTES / 4];
    const bool upper = ELEMENT_BYTES == 2 && i % 2;
    if (ELEMENT == 0) values[i] = __uint_as_float(word);
    else if (ELEMENT == 1) values[i] = __uint_as_float(upper ? word & 0xffff0000u : word << 16);
    else asm("cvt.f32.f16 %0, %1;" : "=f"(values[i]) : "h"((u16)(upper ? word >> 16 : word)));
  }
}

// VECTOR neighbours; 16 bytes at a time where they are aligned.
__device__ __forceinline__ void load_counts(const i32* counts, i32* values) {
  if (VECTOR == 1) values[0] = counts[0];
  else
#pragma unroll
    for (i32 i = 0; i < VECTOR / 4; ++i) {
      const int4 got = ((const int4*)counts)[i];
      values[4 * i] = got.x, values[4 * i + 1] = got.y, values[4 * i + 2] = got.z, values[4 * i + 3] = got.w;
    }
}

__device__ __forceinline__ void store_keys(u32* keys, const u32* values) {
  if (VECTOR == 1) keys[0] = values[0];
  else
#pragma unroll
    for (i32 i = 0; i < VECTOR / 4; ++i)
      ((uint4*)keys)[i] = make_uint4(values[4 * i], values[4 * i + 1], values[4 * i + 2], values[4 * i + 3]);
}

struct Penalties {
  float repetition, frequency, presence;

  // Every step rounds, as the twin's does; the compiler must not fuse them.
  __device__ __forceinline__ float apply(float value, i32 count) const {
    if (count == 0) return value;
    value = value > 0 ? __fdiv_rn(value, repetition) : __fmul_rn(value, repetition);
    const i32 times = count >> 1;
    return times ? __fsub_rn(value, __fadd_rn(__fmul_rn(frequency, (float)times), presence)) : value;
  }
};

// A key before the token, so that the greatest of these is the first of the likeliest.
__device__ __forceinline__ u64 candidate(u32 key, i32 token) { return (u64)key << 32 | ~(u32)token; }

// ---- weights

struct Weights {
  double greatest, per_temperature, unit;

  __device__ __forceinline__ double exponent(u32 key) const {
    return ((double)value_of(key) - greatest) * per_temperature;
  }
  __device__ __forceinline__ u64 of(double likeliness) const { return __double2ull_rn(likeliness * unit); }
};

// Philox4x64-10 of numpy: its first number for this key, with the position in the counter's second word.
__device__ double uniform(u64 seed, u64 position) {
  u64 counter[4] = {1, position, 0, 0}, key[2] = {seed, 0};
#pragma unroll 1
  for (i32 round = 0; round < 10; ++round) {
    const u64 a = 0xD2E7470EE14C6C93ull, b = 0xCA5A826395121157ull;
    const u64 high_a = __umul64hi(a, counter[0]), low_a = a * counter[0];
    const u64 high_b = __umul64hi(b, counter[2]), low_b = b * counter[2];
    counter[0] = high_b ^ counter[1] ^ key[0], counter[1] = low_b;
    counter[2] = high_a ^ counter[3] ^ key[1], counter[3] = low_a;
    key[0] += 0x9E3779B97F4A7C15ull, key[1] += 0xBB67AE8584CAA73Bull;
  }
  return (double)(counter[0] >> 11) * (1.0 / 9007199254740992.0);
}

// ---- the search

struct Stretch {
  const u32* keys;
  i32 length;
  u32 least;  // smaller keys do not count
};

// This thread's two bins, summed over the cluster: bins BINS - 1 - 2 * thread and the one below. A key is counted
// in the bin that its bits from `shift` on name, if those above agree with `prefix`.
template <bool MASS>
__device__ void histogram(
    Shared& shared, const Stretch& stretch, const Weights& weights, i32 level, u32 prefix, u64* own) {
  const i32 thread = threadIdx.x;
  const i32 shift = level == 0 ? 21 : level == 1 ? 10 : 0, above = level == 0 ? 32 : level == 1 ? 21 : 10;
  for (i32 bin = thread; bin < BINS; bin += THREADS) {
    shared.low[bin] = 0;
    if (MASS) shared.high[bin] = 0;
  }
  __syncthreads();
#pragma unroll 4
  for (i32 i = thread; i < stretch.length; i += THREADS) {
    const u32 key = stretch.keys[i];
    if (key < stretch.least || (level && (key ^ prefix) >> above)) continue;
    const u32 bin = key >> shift & (BINS - 1);
    if (MASS) {
      const double exponent = weights.exponent(key);
      if (exponent < -44) continue;  // no weight: 2**62 * exp(-44) < 1/2
      const u64 weight = weights.of(exp(exponent));
      const u32 low = (u32)weight, sum = atomicAdd(&shared.low[bin], low) + low;
      const u32 high = (u32)(weight >> 32) + (sum < low);
      if (high) atomicAdd(&shared.high[bin], high);
    } else {
      atomicAdd(&shared.low[bin], 1u);
    }
  }
  cluster_sync();
  for (i32 j = 0; j < 2; ++j) {
    const i32 bin = BINS - 1 - 2 * thread - j;
    own[j] = 0;
#pragma unroll
    for (i32 rank = 0; rank < CLUSTER; ++rank) {
      own[j] += load_of(rank, &shared.low[bin]);
      if (MASS) own[j] += (u64)load_of(rank, &shared.high[bin]) << 32;
    }
  }
  cluster_sync();
}

// Narrows `found` by one level: the bin in which the goal is reached, counted from the greatest keys down.
__device__ void narrow(Shared& shared, i32 level, u64 goal, const u64* own, Found& found) {
  const i32 warp = threadIdx.x / 32, inside = threadIdx.x % 32;
  u64 sum = own[0] + own[1];
#pragma unroll
  for (i32 step = 1; step < 32; step *= 2) {
    const u64 left = __shfl_up_sync(~0u, sum, step);
    if (inside >= step) sum += left;
  }
  if (inside == 31) shared.by_warp[warp] = sum;
  __syncthreads();
  const u64 ahead = merge_warp(inside < warp ? shared.by_warp[inside] : 0, Sum());
  u64 before = found.before + ahead + sum - own[0] - own[1];
  const u32 prefix = found.key;
  const i32 shift = level == 0 ? 21 : level == 1 ? 10 : 0;
#pragma unroll
  for (i32 j = 0; j < 2; ++j) {
    if (before < goal && goal <= before + own[j])
      shared.found = {prefix | (u32)(BINS - 1 - 2 * (i32)threadIdx.x - j) << shift, before, own[j]};
    before += own[j];
  }
  __syncthreads();
  found = shared.found;
}

// Where the weight, greatest keys first, reaches `goal`, which is at least 1 and at most the total. The first
// level's bins may be known already.
template <bool MASS>
__device__ Found find(Shared& shared, const Stretch& stretch, const Weights& weights, u64 goal, const u64* first) {
  Found found = {0, 0, 0};
#pragma unroll 1
  for (i32 level = 0; level < 3; ++level) {
    u64 own[2];
    if (MASS && level == 0) own[0] = first[0], own[1] = first[1];
    else histogram<MASS>(shared, stretch, weights, level, found.key, own);
    narrow(shared, level, goal, own, found);
  }
  return found;
}

// How many tokens of one key, each of `weight`, reach `goal` after `before`.
__device__ __forceinline__ u64 ties_to(u64 goal, u64 before, u64 weight) { return (goal - before + weight - 1) / weight; }

// The place of the `nth` (from 1) token of the whole row that has this key, if it lies in this block; else -1. Only
// the warp that holds it knows.
__device__ i32 place_of(Shared& shared, const Stretch& stretch, u32 key, u64 nth) {
  const i32 warp = threadIdx.x / 32, inside = threadIdx.x % 32;
  const i32 part = (stretch.length + THREADS - 1) / THREADS * 32;  // each warp's, in token order
  const i32 first = warp * part, last = min(stretch.length, first + part);
  i32 ties = 0;
  for (i32 base = first; base < last; base += 32)
    ties += __popc(__ballot_sync(~0u, base + inside < last && stretch.keys[base + inside] == key));
  if (inside == 0) shared.by_warp_ties[warp] = ties;
  __syncthreads();
  const i32 theirs = shared.by_warp_ties[inside];
  if (threadIdx.x < 32) {
    const i32 sum = __reduce_add_sync(~0u, theirs);
    if (inside == 0) shared.told = sum;
  }
  cluster_sync();
  i64 ahead = __reduce_add_sync(~0u, inside < warp ? theirs : 0);
  for (i32 rank = 0; rank < cluster_rank(); ++rank) ahead += load_of(rank, &shared.told);
  cluster_sync();  // nobody may leave, or write anew, while others read
  i64 wanted = (i64)nth - ahead;
  if (wanted < 1 || wanted > ties) return -1;
  for (i32 base = first; base < last; base += 32) {
    const u32 hits = __ballot_sync(~0u, base + inside < last && stretch.keys[base + inside] == key);
    if (wanted <= __popc(hits)) return base + __fns(hits, 0, (i32)wanted);
    wanted -= __popc(hits);
  }
  return -1;
}

// ---- the kernel

extern "C" __global__ void __launch_bounds__(THREADS) sample(const __grid_constant__ SampleParams p) {
  __shared__ Shared shared;
  wait_for_previous();
  const i32 row = blockIdx.x / CLUSTER, thread = threadIdx.x;
  if (row >= *p.real_rows) return;
  const i32 seat = p.seats[row];
  const i32 first = cluster_rank() * p.stretch, length = max(0, min(p.stretch, p.vocab - first));
  const i64 start = row * p.row_stride + first;
  const double* wishes = p.wishes + (i64)seat * WISHES;
  i32* counts = p.counts + (i64)seat * p.vocab;
  const bool penalised = !GREEDY && wishes[PENALISED] != 0;
  const Penalties penalties = {(float)wishes[REPETITION], (float)wishes[FREQUENCY], (float)wishes[PRESENCE]};
  u32* keys = IN_SHARED ? dynamic_shared : p.keys + (i64)row * p.vocab + first;

  // ---- load
  u64 best = 0;  // of the model's own logits
  {
    u32 best_key = 0;
    i32 best_token = 0;
    for (i32 base = thread * VECTOR; base < length; base += LOADS * THREADS * VECTOR) {
      Raw raw[LOADS];
#pragma unroll
      for (i32 l = 0; l < LOADS; ++l) {
        const i32 at = base + l * THREADS * VECTOR;
        if (at < length) raw[l] = load(p.logits, start + at);
      }
#pragma unroll
      for (i32 l = 0; l < LOADS; ++l) {
        const i32 at = base + l * THREADS * VECTOR;
        if (at >= length) break;
        float values[VECTOR];
        u32 own[VECTOR];
        unpack(raw[l], values);
#pragma unroll
        for (i32 i = 0; i < VECTOR; ++i) {
          values[i] = __fmul_rn(values[i], p.scale);
          own[i] = key_of(values[i]);
          if (own[i] > best_key) best_key = own[i], best_token = first + at + i;  // ascending: ties keep the first
        }
        if (penalised) {
          i32 count[VECTOR];
          load_counts(counts + first + at, count);
#pragma unroll
          for (i32 i = 0; i < VECTOR; ++i) own[i] = key_of(penalties.apply(values[i], count[i]));
        }
        if (!GREEDY) store_keys(keys + at, own);
      }
    }
    best = candidate(best_key, best_token);
  }
  let_next_begin();
  best = merge_cluster(shared, best, Larger());
  const u32 greatest = (u32)(best >> 32);
  const bool broken = greatest >= INFINITE_KEY || greatest == NOTHING_KEY;
  const i32 forced = p.forced[row];
  i32 token = broken ? -1 : forced >= 0 ? forced : (i32)~(u32)best;
  bool mine = cluster_rank() == 0 && thread == 0;

  if (!GREEDY && !broken && forced < 0) {
    // ---- bias, barred tokens, and the greatest of what is left
    const i32 biased = (i32)wishes[BIASED], stops = p.barred[row] ? (i32)wishes[STOPS] : 0;
    for (i32 i = thread; i < biased; i += THREADS) {
      const i32 at = p.bias_ids[(i64)seat * p.most_biased + i] - first;
      if (at >= 0 && at < length) keys[at] = key_of(value_of(keys[at]) + p.biases[(i64)seat * p.most_biased + i]);
    }
    __syncthreads();
    for (i32 i = thread; i < stops; i += THREADS) {
      const i32 at = p.stop_ids[(i64)seat * p.most_barred + i] - first;
      if (at >= 0 && at < length) keys[at] = NOTHING_KEY;
    }
    __syncthreads();
    best = 0;
    for (i32 i = thread; i < length; i += THREADS) best = Larger()(best, candidate(keys[i], first + i));
    best = merge_cluster(shared, best, Larger());
    token = (i32)~(u32)best;
    const u32 top = (u32)(best >> 32);
    const double temperature = wishes[TEMPERATURE];
    const u64 top_k = (u64)wishes[TOP_K];

    if (temperature > 0 && top_k != 1 && top < INFINITE_KEY && top != NOTHING_KEY) {
      Stretch stretch = {keys, length, 0};
      const Weights weights = {(double)value_of(top), 1 / temperature, (double)(1ull << p.mass_bits)};
      u64 beyond = 0;  // tokens of the least key that top-k leaves out
      if (top_k && top_k < p.vocab) {
        const Found edge = find<false>(shared, stretch, weights, top_k, nullptr);
        stretch.least = edge.key;
        beyond = edge.before + edge.own - top_k;
      }
      const double edge_likeliness = beyond ? exp(weights.exponent(stretch.least)) : 0;
      const u64 left_out = beyond * weights.of(edge_likeliness);

      u64 masses[2];
      histogram<true>(shared, stretch, weights, 0, 0, masses);
      u64 total = merge_warp(masses[0] + masses[1], Sum());
      if (thread % 32 == 0) shared.by_warp[thread / 32] = total;
      __syncthreads();
      total = merge_warp(shared.by_warp[thread % 32], Sum()) - left_out;
      __syncthreads();

      u64 end = total;
      if (wishes[TOP_P] < 1) {
        const u64 goal = min(max((u64)ceil(wishes[TOP_P] * (double)total), 1ull), total);
        const Found edge = find<true>(shared, stretch, weights, goal, masses);
        const u64 weight = weights.of(exp(weights.exponent(edge.key)));
        end = edge.before + ties_to(goal, edge.before, weight) * weight;
      }
      const double min_p = wishes[MIN_P];
      if (min_p > 0) {
        const double cutoff = log(min_p) - 1e-6;  // spares most of the exact comparisons
        u64 likely = 0;
        for (i32 i = thread; i < length; i += THREADS) {
          const u32 key = keys[i];
          const double exponent = weights.exponent(key);
          if (key < stretch.least || !(exponent >= cutoff)) continue;
          const double likeliness = exp(exponent);
          if (likeliness >= min_p) likely += weights.of(likeliness);
        }
        likely = merge_cluster(shared, likely, Sum());
        end = min(end, edge_likeliness >= min_p ? likely - left_out : likely);
      }

      // ---- draw
      const double number = uniform(p.seeds[seat], (u64)p.positions[row]);
      const u64 goal = min((u64)(number * (double)end), end - 1) + 1;
      const Found drawn = find<true>(shared, stretch, weights, goal, masses);
      const u64 weight = weights.of(exp(weights.exponent(drawn.key)));
      const i32 at = place_of(shared, stretch, drawn.key, ties_to(goal, drawn.before, weight));
      mine = at >= 0 && thread % 32 == 0;
      token = first + at;
    }
  }
  if (mine) {
    p.tokens[row] = token;
    if (penalised && token >= 0) counts[token] += 2;
  }
}
