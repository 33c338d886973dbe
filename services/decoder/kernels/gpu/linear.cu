// linear: y = x W^T for a few rows x, at the speed at which W comes from memory. One launch a matrix.
//
// The definition is the twin, kernels/linear.py. Knows matrices, not what they project.
//
// The depth is cut into blocks of 64 columns; block b belongs to chain b % 8, and each chain is one float32 sum from
// left to right. The eight chains are added as a tree, so that a row's result depends neither on how the work
// is divided below nor on how many rows there are. A tile is TILE rows of W. A thread block computes one tile after
// the other:
//
//   two producer warps  copy boxes (TILE rows of W and ROWS rows of x, 64 columns) into a ring of SLOTS slots. W's
//                       never waits for earlier kernels, so the ring fills while they still run; x's does
//   consumer warps      one a chain; each multiplies every eighth box with M_TILES * 16 rows of W as the matrix unit's
//                       16 rows and x as its 8 columns
//   at a tile's end     the chains meet in shared memory
//
// Boxes lie as the bulk copies swizzle them: 128 bytes a row, 16-byte piece c of row r at piece c ^ (r % 8).
//
// Compile-time: ELEMENT (1 bfloat16, 2 float16), ROWS (8, 16, 32, 64; at least the rows of x), GATED (W is [gate; up]
// and y = silu(gate) * up; a tile is half of each), M_TILES, SLOTS, BULK (0: plain asynchronous copies, which is all
// there is before sm_90).

#include "elements.cuh"
#include "tensor_cores.cuh"

struct alignas(64) TensorMap {
  u64 opaque[16];
};

struct LinearParams {
  TensorMap weight_map;  // of W, a box being 64 columns x WEIGHT_BOX rows; used from sm_90 on
  TensorMap x_map;       // of x, a box being 64 columns x ROWS rows
  const void* weight;    // [features, depth]; gated [2 * features, depth]
  const void* x;         // [rows, depth]
  const void* bias;      // [features] or null
  void* out;             // [rows, features]
  i32 rows, features, depth, tiles;
  u64 unused[2];         // up to a multiple of the maps' alignment
};

constexpr i32 CHAINS = 8;
constexpr i32 CONSUMERS = CHAINS;
constexpr i32 THREADS = 32 * (CONSUMERS + 2);
constexpr i32 TILE = M_TILES * 16;
constexpr i32 WEIGHT_BOX = GATED ? TILE / 2 : TILE;
constexpr i32 OUTPUTS = WEIGHT_BOX;  // features of y a tile
constexpr i32 COLUMNS = 64;
constexpr i32 N_TILES = ROWS / 8;
constexpr i32 WEIGHT_BYTES = TILE * COLUMNS * 2, X_BYTES = ROWS * COLUMNS * 2, SLOT_BYTES = WEIGHT_BYTES + X_BYTES;
constexpr i32 PITCH = TILE + 4;  // floats between rows of partial sums: no bank twice in a warp's store
// A barrier's parity says which round it is in only to who sees every round. So the barriers that say "full" go
// round by a multiple of CHAINS, each for one chain's warp; those that say "free" go with the slots, as the producers do.
constexpr i32 SIGNALS = (SLOTS + CHAINS - 1) / CHAINS * CHAINS;
static_assert(SLOTS >= CHAINS);
static_assert(OUTPUTS % 2 == 0 && WEIGHT_BOX % 8 == 0 && WEIGHT_BOX <= 256);

#define BULK_COPIES (BULK && __CUDA_ARCH__ >= 900)

__device__ __forceinline__ void init_barrier(u32 barrier, u32 arrivals) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

__device__ __forceinline__ void arrive(u32 barrier) {
  asm volatile("{.reg .b64 state; mbarrier.arrive.shared.b64 state, [%0];}" ::"r"(barrier) : "memory");
}

__device__ __forceinline__ void wait_for(u32 barrier, u32 parity) {
  u32 done;
  do {
#if __CUDA_ARCH__ >= 900
    asm volatile("{.reg .pred p; mbarrier.try_wait.parity.shared.b64 p, [%1], %2; selp.u32 %0, 1, 0, p;}"
#else
    asm volatile("{.reg .pred p; mbarrier.test_wait.parity.shared.b64 p, [%1], %2; selp.u32 %0, 1, 0, p;}"
#endif
                 : "=r"(done)
                 : "r"(barrier), "r"(parity)
                 : "memory");
  } while (!done);
}

// A place that goes round a ring of SIZE, and the parity of its round.
template <i32 SIZE>
struct Cursor {
  i32 at = 0;
  u32 round = 0;

  __device__ __forceinline__ void move(i32 steps) {
    at += steps;
    if (at >= SIZE) at -= SIZE, round ^= 1;
  }
};

// Where a box lies, and which barrier says that it is full.
struct Place {
  Cursor<SLOTS> slot;
  Cursor<SIGNALS> signal;

  __device__ __forceinline__ void move(i32 boxes) { slot.move(boxes), signal.move(boxes); }
};

// A box of this thread block, in the order in which the ring takes them: no division on the producers' way.
struct Box {
  i32 row, group, chain;  // first row of W (of the gate), the eight blocks, the chain

  __device__ __forceinline__ void move(i32 groups, i32 tile_step) {
    if (++chain < CHAINS) return;
    chain = 0;
    if (++group < groups) return;
    group = 0, row += tile_step * WEIGHT_BOX;
  }

  __device__ __forceinline__ i32 column() const { return (group * CHAINS + chain) * COLUMNS; }
};

// One box of BOX_ROWS rows from (row, column) on; what lies outside of [rows, depth] becomes zero.
template <i32 BOX_ROWS>
__device__ __forceinline__ void copy_box(u32 to, u32 barrier, const TensorMap& map, const void* from, i32 row,
                                         i32 column, i32 rows, i32 depth, i32 lane) {
#if BULK_COPIES
  asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::
            "r"(to), "l"(&map), "r"(column), "r"(row), "r"(barrier)
        : "memory");
#else
#pragma unroll 4
  for (i32 i = lane; i < BOX_ROWS * 8; i += 32) {
    const i32 r = i / 8, c = i % 8;
    const bool inside = row + r < rows && column + c * 8 < depth;
    const char* at = (const char*)from + (inside ? ((i64)(row + r) * depth + column + c * 8) * 2 : 0);
    copy_16(to + r * 128 + ((c ^ (r & 7)) << 4), at, inside);
  }
#endif
}

// Before and after a producer's copies into one slot.
__device__ __forceinline__ void announce(u32 barrier, i32 bytes) {
#if BULK_COPIES
  asm volatile("{.reg .b64 state; mbarrier.arrive.expect_tx.shared.b64 state, [%0], %1;}" ::"r"(barrier), "r"(bytes)
                 : "memory");
#endif
}

__device__ __forceinline__ void conclude(u32 barrier) {
#if !BULK_COPIES
  asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(barrier) : "memory");
#endif
}

// A thread must not end before its own copies have.
__device__ __forceinline__ void drain() {
#if !BULK_COPIES
  asm volatile("cp.async.wait_all;" ::: "memory");
#endif
}

// silu(gate) * up with every factor rounded, as the twin's separate operations do.
__device__ __forceinline__ u32 gate_times_up(float2 gate, float2 up) {
  const float2 exact = unpack(pack(gate.x, gate.y)), by = unpack(pack(up.x, up.y));
  const float2 silu = unpack(pack(exact.x / (1.0f + __expf(-exact.x)), exact.y / (1.0f + __expf(-exact.y))));
  return pack(silu.x * by.x, silu.y * by.y);
}

// The whole of one chain-split sum at two neighbouring features; `at` is its place in each chain's partial sums.
__device__ __forceinline__ float2 sum_chains(u32 partial, i32 at) {
  float2 part[CHAINS];
#pragma unroll
  for (i32 chain = 0; chain < CHAINS; ++chain) {
    const u32 own = partial + (chain * ROWS * PITCH + at) * 4;
    asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(part[chain].x), "=f"(part[chain].y) : "r"(own) : "memory");
  }
#pragma unroll
  for (i32 step = 1; step < CHAINS; step *= 2)
#pragma unroll
    for (i32 i = 0; i < CHAINS; i += 2 * step) part[i].x += part[i + step].x, part[i].y += part[i + step].y;
  return part[0];
}

__shared__ __align__(8) u64 full_barriers[SIGNALS], free_barriers[SLOTS];
extern __shared__ unsigned char dynamic_shared[];  // ring [SLOTS][SLOT_BYTES] on a multiple of 1,024; partial sums

extern "C" __global__ void __launch_bounds__(THREADS, 1) linear(const __grid_constant__ LinearParams p) {
  const i32 warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const u32 ring = (shared_address(dynamic_shared) + 1023) & ~1023u;
  const u32 partial = ring + SLOTS * SLOT_BYTES;  // float [CHAINS][ROWS][PITCH]
  const u32 full = shared_address(full_barriers), free = shared_address(free_barriers);
  if (threadIdx.x == 0) {
    for (i32 i = 0; i < SIGNALS; ++i) init_barrier(full + i * 8, BULK_COPIES ? 2 : 64);
    for (i32 i = 0; i < SLOTS; ++i) init_barrier(free + i * 8, 1);
#if __CUDA_ARCH__ >= 900
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
  }
  __syncthreads();
  let_next_begin();

  const i32 first_tile = blockIdx.x, tile_step = gridDim.x;
  const i32 own_tiles = (p.tiles - first_tile + tile_step - 1) / tile_step;
  const i32 groups = (p.depth + CHAINS * COLUMNS - 1) / (CHAINS * COLUMNS);  // of 8 blocks; the last may reach past the depth
  const i32 boxes = own_tiles * groups * CHAINS;
  const Box first_box = {first_tile * WEIGHT_BOX, 0, 0};

  if (warp == CONSUMERS) {  // W into the ring
#if BULK_COPIES
    if (lane) return;  // one thread asks for all
#endif
    const i32 weight_rows = GATED ? 2 * p.features : p.features;
    Place place;
    Box box = first_box;
    for (i32 n = 0; n < boxes; ++n) {
      wait_for(free + place.slot.at * 8, place.slot.round ^ 1);
      const u32 to = ring + place.slot.at * SLOT_BYTES, barrier = full + place.signal.at * 8;
      const i32 column = box.column();
      announce(barrier, WEIGHT_BYTES);
      copy_box<WEIGHT_BOX>(to, barrier, p.weight_map, p.weight, box.row, column, weight_rows, p.depth, lane);
      if (GATED)
        copy_box<WEIGHT_BOX>(to + WEIGHT_BYTES / 2, barrier, p.weight_map, p.weight, p.features + box.row, column,
                             weight_rows, p.depth, lane);
      conclude(barrier);
      place.move(1);
      box.move(groups, tile_step);
    }
    drain();
    return;
  }
  if (warp == CONSUMERS + 1) {  // x into the ring
#if BULK_COPIES
    if (lane) return;
    asm volatile("prefetch.tensormap [%0];" ::"l"(&p.x_map) : "memory");
#endif
    wait_for_previous();
    Place place;
    Box box = first_box;
    for (i32 n = 0; n < boxes; ++n) {
      wait_for(free + place.slot.at * 8, place.slot.round ^ 1);
      const u32 to = ring + place.slot.at * SLOT_BYTES + WEIGHT_BYTES, barrier = full + place.signal.at * 8;
      announce(barrier, X_BYTES);
      copy_box<ROWS>(to, barrier, p.x_map, p.x, 0, box.column(), p.rows, p.depth, lane);
      conclude(barrier);
      place.move(1);
      box.move(groups, tile_step);
    }
    drain();
    return;
  }

  // Consumers are warps 0 to 7, so these are `warp` and 0; written like that, they compile to other code than what
  // the log's figures are of.
  const i32 chain_warp = warp % CHAINS, before = warp / CHAINS;
  // Where this lane's row of each 8 x 8 matrix begins in a box; XOR with 32 * step moves on by 16 columns.
  const u32 weight_lane = (before * M_TILES * 16 + lane % 16) * 128 + (((lane / 16) ^ (lane % 8)) << 4);
  const u32 x_lane = WEIGHT_BYTES + (lane % 8) * 128 + (((lane / 8) ^ (lane % 8)) << 4);
  Place place;
  place.move(chain_warp);
  for (i32 turn = 0; turn < own_tiles; ++turn) {
    float sum[M_TILES][N_TILES][4] = {};
    for (i32 group = 0; group < groups; ++group, place.move(CHAINS)) {
      wait_for(full + place.signal.at * 8, place.signal.round);
      const u32 slot = ring + place.slot.at * SLOT_BYTES;
#pragma unroll
      for (i32 half = 0; half < 2; ++half) {  // of the box's 64 columns
        u32 x[N_TILES][4];
#pragma unroll
        for (i32 n = 0; n < N_TILES; ++n) load_matrices(x[n], slot + ((x_lane + n * 1024) ^ (half * 64)));
#pragma unroll
        for (i32 m = 0; m < M_TILES; ++m)
#pragma unroll
          for (i32 step = 0; step < 2; ++step) {
            u32 weight[4];
            load_matrices(weight, slot + ((weight_lane + m * 2048) ^ (half * 64 + step * 32)));
#pragma unroll
            for (i32 n = 0; n < N_TILES; ++n) multiply(sum[m][n], weight, {x[n][2 * step], x[n][2 * step + 1]});
          }
      }
      __syncwarp();
      if (lane == 0) arrive(free + place.slot.at * 8);
    }

    // All consumers meet before the partial sums of the tile before may be overwritten, and before they may be read.
    if (turn) asm volatile("bar.sync 1, %0;" ::"n"(CONSUMERS * 32) : "memory");
#pragma unroll
    for (i32 m = 0; m < M_TILES; ++m)
#pragma unroll
      for (i32 n = 0; n < N_TILES; ++n)
#pragma unroll
        for (i32 i = 0; i < 4; ++i) {
          const i32 row = n * 8 + lane % 4 * 2 + i % 2;
          const i32 feature = (before * M_TILES + m) * 16 + lane / 4 + i / 2 * 8;
          asm volatile("st.shared.f32 [%0], %1;" ::"r"(partial + ((chain_warp * ROWS + row) * PITCH + feature) * 4),
                       "f"(sum[m][n][i])
                       : "memory");
        }
    asm volatile("bar.sync 1, %0;" ::"n"(CONSUMERS * 32) : "memory");

    const i32 first_feature = (first_tile + turn * tile_step) * OUTPUTS;
    constexpr i32 PAIRS = OUTPUTS / 2;  // of features
    for (i32 i = threadIdx.x; i < p.rows * PAIRS; i += CONSUMERS * 32) {
      const i32 row = i / PAIRS, in_tile = i % PAIRS * 2, feature = first_feature + in_tile;
      if (feature >= p.features) continue;
      const float2 value = sum_chains(partial, row * PITCH + in_tile);
      u32 both;
      if (GATED) {
        both = gate_times_up(value, sum_chains(partial, row * PITCH + OUTPUTS + in_tile));
      } else {
        const u32 bias = p.bias ? *(const u32*)((const u16*)p.bias + feature) : 0;
        both = pack(value.x + unpack(bias).x, value.y + unpack(bias).y);
      }
      *(u32*)((u16*)p.out + (i64)row * p.features + feature) = both;
    }
  }
}
