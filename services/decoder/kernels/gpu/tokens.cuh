// A token among the blocks that a lane chose. BLOCK_TOKENS must be defined before.

constexpr float NOTHING = -1e30f;  // log of the sum over no token; finite, so that two such parts merge into a third

struct Token {
  i32 slot = -1, block = -1, offset = 0;

  __device__ __forceinline__ Token() {}

  // The i-th of the `tokens` tokens of these blocks and their slots; past the end there is none.
  __device__ __forceinline__ Token(const i32* slots, const i32* selected, i32 tokens, i32 i) {
    if (i < tokens) slot = slots[i / BLOCK_TOKENS], block = selected[i / BLOCK_TOKENS];
    offset = i % BLOCK_TOKENS;
  }

  // Whether it exists, and lies before the row's end.
  __device__ __forceinline__ bool seen(i32 length) const {
    return slot >= 0 && block >= 0 && block * BLOCK_TOKENS + offset < length;
  }

  // Its place in the pool, in tokens.
  __device__ __forceinline__ i64 record() const { return (i64)slot * BLOCK_TOKENS + offset; }
};
