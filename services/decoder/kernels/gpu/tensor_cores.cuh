// One warp's matrix products of 16-bit numbers, and copies into shared memory that pass through no register.
//
// The fragments are those of mma.m16n8k16. With g = lane / 4 and t = lane % 4, a thread of the warp holds
//   a  rows g, g + 8, g, g + 8 at columns 2t, 2t, 2t + 8, 2t + 8, each with its right neighbour
//   b  columns g, g at rows 2t, 2t + 8, each with the one below
//   c  row g at columns 2t, 2t + 1, then row g + 8 at the same
// ELEMENT (1 bfloat16, 2 float16) must be defined before. Works from sm_80 on.

// 16 bytes from global memory, or zeros; `from` must be a valid address either way.
__device__ __forceinline__ void copy_16(u32 to, const void* from, bool wanted) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(wanted ? 16 : 0) : "memory");
}

// What this thread has copied since the last call becomes one group.
__device__ __forceinline__ void close_group() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Until all of this thread's groups but the `LEFT` newest are in shared memory.
template <i32 LEFT>
__device__ __forceinline__ void wait_groups() {
  asm volatile("cp.async.wait_group %0;" ::"n"(LEFT) : "memory");
}

// Four 8 x 8 matrices; thread i says where row i % 8 of matrix i / 8 lies.
__device__ __forceinline__ void load_matrices(u32 (&to)[4], u32 row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(row)
               : "memory");
}

__device__ __forceinline__ void load_matrices_transposed(u32 (&to)[4], u32 row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(row)
               : "memory");
}

// An 8 x 8 matrix across the warp, on its other side.
__device__ __forceinline__ u32 transpose(u32 pair) {
  u32 turned;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(turned) : "r"(pair));
  return turned;
}

// c += a * b
__device__ __forceinline__ void multiply(float (&c)[4], const u32 (&a)[4], const u32 (&b)[2]) {
#if ELEMENT == 1
#define HOTSET_MMA "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
#else
#define HOTSET_MMA "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
#endif
  asm volatile(HOTSET_MMA "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
