// What every kernel here stands on; compile.py puts it before each source.
//
// Overlapped launches (programmatic dependent launch): a kernel that was launched with `overlaps` may begin while
// the one before it still runs. Until wait_for_previous() it may touch only what no earlier kernel of the step
// writes (weights, tables of constants); every thread block must call it, or whoever comes after is let through
// too early. let_next_begin() says that the next kernel may start its own first part.

using i32 = int;
using u16 = unsigned short;
using u32 = unsigned int;
using i64 = long long;
using u64 = unsigned long long;

__device__ __forceinline__ void wait_for_previous() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

__device__ __forceinline__ void let_next_begin() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
