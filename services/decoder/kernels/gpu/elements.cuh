// Where things lie in shared memory, and floats as the elements of a tensor.
// ELEMENT (0 float32, 1 bfloat16, 2 float16) must be defined before.

__device__ __forceinline__ u32 shared_address(const void* shared) { return (u32)__cvta_generic_to_shared(shared); }

constexpr i32 ELEMENT_BYTES = ELEMENT == 0 ? 4 : 2;

// Two neighbours of a 16-bit type in one register, `low` first in memory.
__device__ __forceinline__ u32 pack(float low, float high) {
  u32 both;
  if (ELEMENT == 1) asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
  else asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
  return both;
}

__device__ __forceinline__ float2 unpack(u32 both) {
  if (ELEMENT == 1) return make_float2(__uint_as_float(both << 16), __uint_as_float(both & 0xffff0000u));
  float2 wide;
  asm("{.reg .b16 l, h; mov.b32 {l, h}, %2; cvt.f32.f16 %0, l; cvt.f32.f16 %1, h;}"
      : "=f"(wide.x), "=f"(wide.y)
      : "r"(both));
  return wide;
}

// One element, whichever it is.
__device__ __forceinline__ float load(const void* tensor, i64 at) {
  if (ELEMENT == 0) return ((const float*)tensor)[at];
  return unpack(((const u16*)tensor)[at]).x;
}

// Four neighbours, of which `at` (counted in elements) is the first; `at` is a multiple of 4.
__device__ __forceinline__ void store_4(void* tensor, i64 at, const float4& values) {
  if (ELEMENT == 0) *(float4*)((float*)tensor + at) = values;
  else *(uint2*)((u16*)tensor + at) = make_uint2(pack(values.x, values.y), pack(values.z, values.w));
}
