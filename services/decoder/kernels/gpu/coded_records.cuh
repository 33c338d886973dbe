// Latent records as they lie in a pool: numbers, or in eight bits (kernels/record_code.py), then e4m3 in tiles of 128, a
// float32 a tile that each is to be multiplied by, and the roped numbers in bfloat16. elements.cuh must come before;
// CODED (1: in eight bits), LATENT and ROPED must be defined.

constexpr i32 TILE = 128;
constexpr i32 SCALE_BYTES = (LATENT / TILE * 4 + 15) / 16 * 16;
constexpr i32 ROPED_AT = LATENT + SCALE_BYTES;
constexpr i32 RECORD_BYTES = CODED ? ROPED_AT + (ROPED * 2 + 15) / 16 * 16 : (LATENT + ROPED) * ELEMENT_BYTES;
static_assert(!CODED || LATENT % TILE == 0, "tiles must be whole");

// A code before its scale, exactly: the exponent's bias is 7 there and 127 here, so a product with 2^120 mends what
// shifting leaves, numbers without a leading one included. The code of no number comes out as 480, and its scale is none.
__device__ __forceinline__ float number_of(u32 code) {
  return __uint_as_float((code & 0x80) << 24 | (code & 0x7f) << 20) * 0x1p120f;
}

__device__ __forceinline__ float scale_of(const char* record, i32 tile) { return ((const float*)(record + LATENT))[tile]; }

// The i-th roped number.
__device__ __forceinline__ float roped_of(const char* record, i32 i) {
  return __uint_as_float((u32)((const u16*)(record + ROPED_AT))[i] << 16);
}

// Any number of a record, the `record`-th of a pool.
__device__ __forceinline__ float number_in(const void* pool, i64 record, i32 i) {
  if (!CODED) return load(pool, record * (LATENT + ROPED) + i);
  const char* own = (const char*)pool + record * RECORD_BYTES;
  return i < LATENT ? number_of((unsigned char)own[i]) * scale_of(own, i / TILE) : roped_of(own, i - LATENT);
}

// `COUNT` coded records as the 16-bit elements that products take, `PITCH` bytes apart, by all `MANY` threads.
template <i32 COUNT, i32 PITCH, i32 MANY>
__device__ __forceinline__ void widen(const char* from, char* to) {
  constexpr i32 CODES = LATENT / 16, TURNED = ROPED / 8;  // 16-byte pieces of a record
  for (i32 i = threadIdx.x; i < COUNT * CODES; i += MANY) {
    const char* record = from + i / CODES * RECORD_BYTES;
    const i32 piece = i % CODES;
    const uint4 codes = *(const uint4*)(record + piece * 16);
    const float scale = scale_of(record, piece * 16 / TILE);
    const u32 four[4] = {codes.x, codes.y, codes.z, codes.w};
    u32 wide[8];
#pragma unroll
    for (i32 n = 0; n < 8; ++n) {
      const u32 two = four[n / 2] >> n % 2 * 16;
      wide[n] = pack(number_of(two) * scale, number_of(two >> 8) * scale);
    }
    uint4* place = (uint4*)(to + i / CODES * PITCH + piece * 32);
    place[0] = {wide[0], wide[1], wide[2], wide[3]}, place[1] = {wide[4], wide[5], wide[6], wide[7]};
  }
  for (i32 i = threadIdx.x; i < COUNT * TURNED; i += MANY) {
    const char* record = from + i / TURNED * RECORD_BYTES;
    const i32 first = i % TURNED * 8;
    u32 wide[4];
#pragma unroll
    for (i32 n = 0; n < 4; ++n) wide[n] = pack(roped_of(record, first + 2 * n), roped_of(record, first + 2 * n + 1));
    *(uint4*)(to + i / TURNED * PITCH + (LATENT + first) * 2) = {wide[0], wide[1], wide[2], wide[3]};
  }
}
