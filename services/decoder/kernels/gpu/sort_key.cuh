// Scores as keys that compare as they do, bit by bit; +0 and -0 are one.

__device__ __forceinline__ u32 to_key(float score) {
  const u32 bits = __float_as_uint(score + 0.f);
  return bits ^ ((i32)bits < 0 ? 0xffffffffu : 0x80000000u);
}
