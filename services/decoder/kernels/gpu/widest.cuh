// Bounds of keys, sixteen bytes at a time. ELEMENT (0 float32, 1 bfloat16, 2 float16) must be defined before.

__device__ __forceinline__ i32 minus(i32 word) { return word ^ (ELEMENT == 0 ? 0x80000000 : 0x80008000); }

__device__ __forceinline__ int4 minus(const int4& a) {
  return int4{minus(a.x), minus(a.y), minus(a.z), minus(a.w)};
}

__device__ __forceinline__ i32 larger(i32 a, i32 b) {  // of one float32 or of two halves; NaN stays
  i32 out;
  if (ELEMENT == 0) asm("max.NaN.f32 %0, %1, %2;" : "=r"(out) : "r"(a), "r"(b));
  else if (ELEMENT == 1) asm("max.NaN.bf16x2 %0, %1, %2;" : "=r"(out) : "r"(a), "r"(b));
  else asm("max.NaN.f16x2 %0, %1, %2;" : "=r"(out) : "r"(a), "r"(b));
  return out;
}

__device__ __forceinline__ int4 larger(const int4& a, const int4& b) {
  return int4{larger(a.x, b.x), larger(a.y, b.y), larger(a.z, b.z), larger(a.w, b.w)};
}
