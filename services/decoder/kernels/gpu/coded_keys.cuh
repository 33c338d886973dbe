// Index keys in eight bits (kernels/index_code.py): e4m3 numbers, then a float32 that each is to be multiplied by.
// CODED (1: keys are so) and DIM must be defined before.

constexpr i32 TAIL_BYTES = 16;
constexpr i32 ENTRY_BYTES = CODED ? DIM + TAIL_BYTES : DIM * ELEMENT_BYTES;

// Two neighbours, exactly, as two float16: the exponent's bias is 7 there and 15 here, so a product with 2^8 mends
// what shifting leaves, numbers without a leading one included.
__device__ __forceinline__ u32 widen(u32 low, u32 high) {
  const u32 pair = low | high << 16, bits = (pair & 0x800080) << 8 | (pair & 0x7f007f) << 7;
  u32 wide;
  asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(wide) : "r"(bits), "r"(0x5c005c00));  // 2^8 twice
  return wide;
}

__device__ __forceinline__ float scale_of(const char* entry) { return *(const float*)(entry + DIM); }
