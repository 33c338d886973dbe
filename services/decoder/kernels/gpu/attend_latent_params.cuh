// What attend_latent and attend_latent_plain are launched with. BLOCK_TOKENS, LATENT and ROPED must be defined before.

struct AttendLatentParams {
  const void* query;     // [rows, heads, LATENT + ROPED]
  const void* pool;      // [pool slots, BLOCK_TOKENS, LATENT + ROPED], or coded (coded_records.cuh)
  const i32* slots;      // [rows, top_k] pool slots, -1 = none
  const i32* selected;   // [rows, top_k] the blocks in them, -1 = none
  const i32* length;     // [rows] tokens, the newest included
  const i32* real_rows;  // [1]
  void* out;             // [rows, heads, LATENT]; zeros where a row sees no token
  float* lse;            // [rows, heads] log of the sum of exp(score), NOTHING where no token is seen; or null
  float* sums;           // parts.cuh: [units, splits / CLUSTER, HEAD_TILE, LATENT]; a unit is HEAD_TILE heads of a row
  float2* stats;         // parts.cuh: [units, CLUSTER, splits / CLUSTER, HEAD_TILE]
  u32* arrived;          // [units, CLUSTER], zero between launches
  float scaling;
  i32 top_k, heads, splits;
};
