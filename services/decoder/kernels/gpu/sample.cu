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
  u32* keys;              // [rows, CLUSTER * stretch] workspace, unless IN_SHARED
  i64 row_stride;
  float scale;            // factor on the logits
  i32 vocab, stretch;     // stretch: tokens a thread block, a multiple of 8
  i32 mass_bits, most_biased, most_barred;
};

enum Wish { TEMPERATURE, TOP_P, MIN_P, TOP_K, REPETITION, FREQUENCY, PRESENCE, PENALISED, BIASED, STOPS, WISHES };

constexpr i32 THREADS = 1024, WARPS = THREADS / 32, BINS = 2 * THREADS;
constexpr i32 ELEMENT_BYTES = ELEMENT == 0 ? 4 : 2;
constexpr i32 LOADS = VECTOR == 8 && !GREEDY ? 2 : 4;  // of a thread in flight; counts take registers too
constexpr u32 NAN_KEY = 0xffffffffu, INFINITE_KEY = 0xff800000u, NOTHING_KEY = 0x007fffffu;  // NaN, +inf, -inf

// ---- the cluster

__device__ __forceinline__ i32 cluster_rank() { return blockIdx.x % CLUSTER; }

// A barrier of all threads of the cluster; orders shared memory between them. One thread fences for its block:
// a fence by every thread, as a plain release and acquire would have it, waits for each of them.
__device__ __forceinline__ void cluster_sync() {
  __syncthreads();
#if __CUDA_ARCH__ >= 900
  if (CLUSTER > 1) {
    if (threadIdx.x == 0) asm volatile("fence.acq_rel.cluster;" ::: "memory");
    asm volatile("barrier.cluster.arrive.relaxed;\nbarrier.cluster.wait.acquire;" ::: "memory");
  }
#endif
}

// What lies at `own` in the shared memory of block `rank` of the cluster.
__device__ __forceinline__ u64 load_of(i32 rank, const u64* own) {
  if (CLUSTER == 1) return *own;
  u64 value = 0;
#if __CUDA_ARCH__ >= 900
  asm volatile("{.reg .u32 there; mapa.shared::cluster.u32 there, %1, %2; ld.shared::cluster.u64 %0, [there];}"
               : "=l"(value)
               : "r"((u32)__cvta_generic_to_shared(own)), "r"(rank)
               : "memory");
#endif
  return value;
}

// ---- shared memory

struct Found {
  u32 key;     // of the token at which the goal is reached
  u64 before;  // weight of all greater keys
  u64 own;     // weight of all tokens with this key
};

// What the blocks of a cluster tell each other in one exchange. There are two of these, used in turn: when a block
// has met the others for an exchange, all of them have read what was told in the one before.
struct Told {
  u64 low[BINS / 2], high[BINS / 2];  // lower and upper words of the weights by bin, two bins together
  u64 value;
};

struct Shared {
  Told told[2];
  u64 by_warp[WARPS];
  i32 ties_by_warp[WARPS];
  Found found;
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

// `value` of all threads of the block, merged; 0 must be neutral. Between two calls there must be a barrier.
template <typename Merge>
__device__ __forceinline__ u64 merge_block(Shared& shared, u64 value, Merge merge) {
  value = merge_warp(value, merge);
  if (threadIdx.x % 32 == 0) shared.by_warp[threadIdx.x / 32] = value;
  __syncthreads();
  return merge_warp(shared.by_warp[threadIdx.x % 32], merge);
}

// Likewise of the cluster. `told` is the exchange's.
template <typename Merge>
__device__ __forceinline__ u64 merge_cluster(Shared& shared, Told& told, u64 value, Merge merge) {
  value = merge_block(shared, value, merge);
  if (threadIdx.x == 0) told.value = value;
  cluster_sync();
  const i32 inside = threadIdx.x % 32;
  return merge_warp(inside < CLUSTER ? load_of(inside, &told.value) : 0, merge);
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

// exp where it is wanted once: inlined everywhere, it would fill the instruction cache.
__device__ __noinline__ double likeliness_of(double exponent) { return exp(exponent); }

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

struct Row {
  Shared& shared;
  const u32* keys;  // this block's stretch of the vocabulary, padded with zeros, which are less than any key
  i32 length;       // a multiple of 4
  i32 exchange;     // how many there were
  Weights weights;
  u32 least;  // smaller keys do not count

  __device__ __forceinline__ Told& next_told() { return shared.told[exchange++ % 2]; }

  template <typename Use>
  __device__ __forceinline__ void each_key(Use use) const {
#pragma unroll 1
    for (i32 i = 4 * threadIdx.x; i < length; i += 4 * THREADS) {
      const uint4 four = *(const uint4*)(keys + i);
      use(four.x), use(four.y), use(four.z), use(four.w);
    }
  }
};

__device__ __forceinline__ i32 shift_of(i32 level) { return level == 0 ? 21 : level == 1 ? 10 : 0; }

struct Bins {
  u64 upper, lower;  // weights of a thread's two bins, 2 * pair + 1 and 2 * pair: of thread 0 the greatest
};
__device__ __forceinline__ i32 own_pair() { return THREADS - 1 - (i32)threadIdx.x; }

// This thread's bins, summed over the cluster. A key is counted in the bin that its bits from the level's shift on
// name, if those above agree with `prefix`.
template <bool MASS>
__device__ Bins histogram(Row& row, i32 level, u32 prefix) {
  Told& told = row.next_told();
  told.low[threadIdx.x] = 0;
  if (MASS) told.high[threadIdx.x] = 0;
  __syncthreads();
  u32 *low = (u32*)told.low, *high = (u32*)told.high;
  const i32 shift = shift_of(level), above = level == 0 ? 31 : shift_of(level - 1);
  const u32 mask = level == 0 ? 0 : ~0u;
  row.each_key([&](u32 key) {
    if (key < row.least || ((key ^ prefix) & mask) >> above) return;
    const u32 bin = key >> shift & (BINS - 1);
    if (MASS) {
      const double exponent = row.weights.exponent(key);
      if (!(exponent >= -44)) return;  // no weight: 2**62 * exp(-44) < 1/2
      const u64 weight = row.weights.of(exp(exponent));
      const u32 added = (u32)weight, sum = atomicAdd(&low[bin], added) + added;
      const u32 carried = (u32)(weight >> 32) + (sum < added);
      if (carried) atomicAdd(&high[bin], carried);
    } else {
      atomicAdd(&low[bin], 1u);
    }
  });
  cluster_sync();
  Bins bins = {0, 0};
#pragma unroll
  for (i32 rank = 0; rank < CLUSTER; ++rank) {
    const u64 words = load_of(rank, &told.low[own_pair()]);
    bins.lower += (u32)words, bins.upper += words >> 32;
  }
  if (MASS) {
#pragma unroll
    for (i32 rank = 0; rank < CLUSTER; ++rank) {
      const u64 words = load_of(rank, &told.high[own_pair()]);
      bins.lower += words << 32, bins.upper += words & 0xffffffff00000000ull;
    }
  }
  return bins;
}

// Narrows `found` by one level: to the bin in which the goal is reached, counted from the greatest keys down.
__device__ __forceinline__ void narrow(Shared& shared, i32 level, u64 goal, const Bins& bins, Found& found) {
  const i32 warp = threadIdx.x / 32, inside = threadIdx.x % 32;
  u64 sum = bins.upper + bins.lower;
#pragma unroll
  for (i32 step = 1; step < 32; step *= 2) {
    const u64 left = __shfl_up_sync(~0u, sum, step);
    if (inside >= step) sum += left;
  }
  if (inside == 31) shared.by_warp[warp] = sum;
  __syncthreads();
  const u64 warps_before = merge_warp(inside < warp ? shared.by_warp[inside] : 0, Sum());
  const u64 upper = found.before + warps_before + sum - bins.upper - bins.lower, lower = upper + bins.upper;
  const u32 bin = 2 * own_pair(), shift = shift_of(level);
  if (upper < goal && goal <= lower)
    shared.found = {found.key | (bin + 1) << shift, upper, bins.upper};
  if (lower < goal && goal <= lower + bins.lower)
    shared.found = {found.key | bin << shift, lower, bins.lower};
  __syncthreads();
  found = shared.found;
}

// Where the weight, greatest keys first, reaches `goal`, which is at least 1 and at most the total. `first` are
// the first level's bins.
template <bool MASS>
__device__ Found find(Row& row, u64 goal, const Bins& first) {
  Found found = {0, 0, 0};
  narrow(row.shared, 0, goal, first, found);
#pragma unroll 1
  for (i32 level = 1; level < 3; ++level)
    narrow(row.shared, level, goal, histogram<MASS>(row, level, found.key), found);
  return found;
}

// How many tokens of one key, each of `weight`, reach `goal` after `before`.
__device__ __forceinline__ u64 ties_to(u64 goal, u64 before, u64 weight) { return (goal - before + weight - 1) / weight; }

// The place of the `nth` (from 1) token of the whole row that has this key, if it lies in this warp's part; else -1.
__device__ i32 place_of(Row& row, u32 key, u64 nth) {
  const i32 warp = threadIdx.x / 32, inside = threadIdx.x % 32;
  const i32 part = (row.length + THREADS - 1) / THREADS * 32;  // each warp's, in token order
  const i32 first = warp * part, last = min(row.length, first + part);
  i32 ties = 0;
  for (i32 base = first; base < last; base += 32)
    ties += __popc(__ballot_sync(~0u, base + inside < last && row.keys[base + inside] == key));
  if (inside == 0) row.shared.ties_by_warp[warp] = ties;
  __syncthreads();
  const i32 theirs = row.shared.ties_by_warp[inside];
  Told& told = row.next_told();
  const i32 all = __reduce_add_sync(~0u, theirs);
  if (threadIdx.x == 0) told.value = all;
  cluster_sync();
  const u64 ahead = __reduce_add_sync(~0u, inside < warp ? theirs : 0) +
                    merge_warp(inside < cluster_rank() ? load_of(inside, &told.value) : 0, Sum());
  if (nth <= ahead || nth > ahead + ties) return -1;
  i32 wanted = (i32)(nth - ahead);
  for (i32 base = first;; base += 32) {
    const u32 hits = __ballot_sync(~0u, base + inside < last && row.keys[base + inside] == key);
    if (wanted <= __popc(hits)) return base + __fns(hits, 0, wanted);
    wanted -= __popc(hits);
  }
}

// ---- the kernel

extern "C" __global__ void __launch_bounds__(THREADS) sample(const __grid_constant__ SampleParams p) {
  __shared__ Shared shared;
  wait_for_previous();
  const i32 batch_row = blockIdx.x / CLUSTER, thread = threadIdx.x;
  if (batch_row >= *p.real_rows) return;
  const i32 seat = p.seats[batch_row];
  const i32 first = cluster_rank() * p.stretch, length = max(0, min(p.stretch, p.vocab - first));
  const i64 start = batch_row * p.row_stride + first;
  const double* wishes = p.wishes + (i64)seat * WISHES;
  i32* counts = p.counts + (i64)seat * p.vocab;
  const bool penalised = !GREEDY && wishes[PENALISED] != 0;
  const Penalties penalties = {(float)wishes[REPETITION], (float)wishes[FREQUENCY], (float)wishes[PRESENCE]};
  u32* keys = IN_SHARED ? dynamic_shared : p.keys + (i64)blockIdx.x * p.stretch;

  // ---- load
  u32 best_key = 0;  // of the model's own logits
  i32 best_token = 0;
  for (i32 base = thread * VECTOR; base < length; base += LOADS * THREADS * VECTOR) {
    Raw raw[LOADS];
    i32 count[LOADS][GREEDY ? 1 : VECTOR];
#pragma unroll
    for (i32 l = 0; l < LOADS; ++l) {
      const i32 at = base + l * THREADS * VECTOR;
      if (at < length) raw[l] = load(p.logits, start + at);
      if (penalised && at < length) load_counts(counts + first + at, count[l]);
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
      if (GREEDY) continue;
      if (penalised)
#pragma unroll
        for (i32 i = 0; i < VECTOR; ++i) own[i] = key_of(penalties.apply(values[i], count[l][i]));
      store_keys(keys + at, own);
    }
  }
  let_next_begin();
  u64 best = merge_cluster(shared, shared.told[0], candidate(best_key, best_token), Larger());
  const u32 greatest = (u32)(best >> 32);
  const bool broken = greatest >= INFINITE_KEY || greatest == NOTHING_KEY;
  const i32 forced = p.forced[batch_row];
  i32 token = broken ? -1 : forced >= 0 ? forced : (i32)~(u32)best;
  bool mine = cluster_rank() == 0 && thread == 0;

  if (!GREEDY && !broken && forced < 0) {
    // ---- bias, barred tokens, and the greatest of what is left
    const i32 biased = (i32)wishes[BIASED], stops = p.barred[batch_row] ? (i32)wishes[STOPS] : 0;
    for (i32 i = thread; i < biased; i += THREADS) {
      const i32 at = p.bias_ids[(i64)seat * p.most_biased + i] - first;
      if (at >= 0 && at < length) keys[at] = key_of(value_of(keys[at]) + p.biases[(i64)seat * p.most_biased + i]);
    }
    __syncthreads();
    for (i32 i = thread; i < stops; i += THREADS) {
      const i32 at = p.stop_ids[(i64)seat * p.most_barred + i] - first;
      if (at >= 0 && at < length) keys[at] = NOTHING_KEY;
    }
    const i32 padded = (length + 3) / 4 * 4;
    if (thread < padded - length) keys[length + thread] = 0;
    __syncthreads();
    Row row = {shared, keys, padded, 1, {}, 0};
    if (penalised || biased || stops) {
      best = 0;
      for (i32 i = thread; i < length; i += THREADS) best = Larger()(best, candidate(keys[i], first + i));
      best = merge_cluster(shared, row.next_told(), best, Larger());
      token = (i32)~(u32)best;
    }
    const u32 top = (u32)(best >> 32);
    const double temperature = wishes[TEMPERATURE], top_p = wishes[TOP_P], min_p = wishes[MIN_P];
    const u64 top_k = (u64)wishes[TOP_K];

    if (temperature > 0 && top_k != 1 && top < INFINITE_KEY && top != NOTHING_KEY) {
      const Weights weights = row.weights = {(double)value_of(top), 1 / temperature, (double)(1ull << p.mass_bits)};
      u64 beyond = 0;  // tokens of the least key that top-k leaves out
      if (top_k && top_k < p.vocab) {
        const Found edge = find<false>(row, top_k, histogram<false>(row, 0, 0));
        row.least = edge.key;
        beyond = edge.before + edge.own - top_k;
      }
      const double edge_likeliness = likeliness_of(weights.exponent(row.least));
      const u64 left_out = beyond ? beyond * weights.of(edge_likeliness) : 0;

      const Bins masses = histogram<true>(row, 0, 0);
      const u64 total = merge_block(shared, masses.upper + masses.lower, Sum()) - left_out;
      __syncthreads();
      u64 likely = total;  // mass of the tokens that min-p keeps
      if (min_p > 0) {
        const double cutoff = log(min_p) - 1e-6;  // spares most of the exact comparisons
        likely = 0;
        row.each_key([&](u32 key) {
          const double exponent = weights.exponent(key);
          if (key < row.least || !(exponent >= cutoff)) return;
          const double likeliness = exp(exponent);
          if (likeliness >= min_p) likely += weights.of(likeliness);
        });
        likely = merge_cluster(shared, row.next_told(), likely, Sum());
        if (edge_likeliness >= min_p) likely -= left_out;
      }

      const double number = uniform(p.seeds[seat], (u64)p.positions[batch_row]);
      u64 end = total;
#pragma unroll 1
      for (bool cutting = top_p < 1;; cutting = false) {  // top-p looks for where to cut, the draw for its token
        if (!cutting) end = min(end, likely);
        const u64 wanted = cutting ? (u64)ceil(top_p * (double)total) : (u64)(number * (double)end) + 1;
        const u64 goal = min(max(wanted, 1ull), end);
        const Found found = find<true>(row, goal, masses);
        const u64 weight = weights.of(likeliness_of(weights.exponent(found.key)));
        const u64 ties = ties_to(goal, found.before, weight);
        if (!cutting) {
          const i32 at = place_of(row, found.key, ties);
          mine = at >= 0 && thread % 32 == 0;
          token = first + at;
          break;
        }
        end = found.before + ties * weight;
      }
    }
  }
  if (mine) {
    p.tokens[batch_row] = token;
    if (penalised && token >= 0) counts[token] += 2;
  }
  if (CLUSTER > 1) cluster_sync();  // nobody may leave while others read what it told
}
