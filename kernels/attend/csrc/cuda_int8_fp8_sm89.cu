// attend() for sm_89 and sm_120, `int8_fp8` with f16 accumulators, which run at twice the rate of fp32 ones there.
// Host side: ../cuda_int8_fp8_sm89.py. Must match ../reference.py on the same codes. Switches: USE_EXPCAST, USE_MEANS.
//
// No value of V overflows an accumulator: its codes are at most 1.75 (F6: 2 amax|v| over a scale of amax|v| * 256 / 224),
// the probabilities at most 256, and a product holds one tile. After step n of 32 keys a sum is at most
// n * 32 * 256 * 1.75 = n * 14336; 14336, 28672, 43008 and 57344 are f16 numbers, so rounding a sum cannot lift it
// over its bound, and 57344 < 65504. Then it is promoted to fp32.
// Row sums come from the same product with ones. They are at most 128 * 256 and lose at most 2^-11, alike in numerator and
// denominator where means are restored.
#define KEY_SCALES 4
#define VALUE_RECORD (16384 + 1024)
#define VALUE_BYTES 16384
#include "mma_frame.cuh"

constexpr u32 ONES = 0x38383838;

// E4M3 bytes of 256 * 2^((a s - m) / 8), with EXPCAST by Eq. 7: the rounded multiply-add itself. It saturates at 0 below,
// and cannot pass 120 because m includes the tile. Order of p: as in cuda_int8_int8.cu.
template <bool EXPCAST>
DEVICE void fp8_probabilities(const u32 (&s)[64], Factors a, float m0, float m1, u32 (&p)[16]) {
  Factors b;
#pragma unroll
  for (int i = 0; i < GROUPS; i++)
#pragma unroll
    for (int r = 0; r < 2; r++) {
      const float m = r ? m1 : m0;
      if (!EXPCAST) a.of[i][r] *= 0.125f;
      b.of[i][r] = fmaf(-PRELOADED, a.of[i][r], EXPCAST ? EXPCAST_OFFSET - m : 8.f - 0.125f * m);
    }
#pragma unroll
  for (int j = 0; j < 16; j += 2) {
    float x[8];
#pragma unroll
    for (int i = 0; i < 8; i++) {
      x[i] = fmaf(value(s[4 * j + i]), a.row(2 * j, i / 2 % 2), b.row(2 * j, i / 2 % 2));
      if (!EXPCAST) x[i] = exp2_fast(x[i]);
    }
    p[j] = EXPCAST ? pack_u8(x[0], x[1], x[4], x[5]) : pack_e4m3(x[0], x[1], x[4], x[5]);
    p[j + 1] = EXPCAST ? pack_u8(x[2], x[3], x[6], x[7]) : pack_e4m3(x[2], x[3], x[6], x[7]);
  }
}
// Sum of rows g and g + 8 of the tile's probabilities, the same in every lane of the quad
DEVICE void tile_mass(const u32 (&p)[16], float& mass0, float& mass1) {
  const u32 zero[2] = {0, 0};
  u32 sum[2];
#pragma unroll
  for (int step = 0; step < 4; step++) mma_e4m3_f16(sum, p + 4 * step, ONES, ONES, step ? sum : zero);
  mass0 = low_f16(sum[0]);
  mass1 = low_f16(sum[1]);
}
// o = alpha * o + p v, in parts of 64 channels
DEVICE void multiply_pv(float (&o)[64], const u32 (&p)[16], float alpha0, float alpha1, u32 v) {
  const u32 zero[2] = {0, 0};
#pragma unroll
  for (int part = 0; part < 2; part++) {
    u32 t[16];
#pragma unroll
    for (int step = 0; step < 4; step++)
#pragma unroll
      for (int i = 0; i < 16; i += 4) {
        u32 b[4];
        load_matrices(step_address(v, step) + part * 8192 + i * 512, b);
        mma_e4m3_f16(t + i, p + 4 * step, b[0], b[1], step ? t + i : zero);
        mma_e4m3_f16(t + i + 2, p + 4 * step, b[2], b[3], step ? t + i + 2 : zero);
      }
#pragma unroll
    for (int j = 0; j < 16; j++) {
      float* to = o + 32 * part + 2 * j;
      const float alpha = j & 1 ? alpha1 : alpha0;
      to[0] = fmaf(to[0], alpha, low_f16(t[j]));
      to[1] = fmaf(to[1], alpha, high_f16(t[j]));
    }
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) attend_e4m3(const __grid_constant__ Call call) {
  extern __shared__ __align__(1024) char memory[];
  const Block block(call, memory);
  const int lane = threadIdx.x & 31, keys = block.keys;
  const bool second = lane & 1;
  float o[64], l = 0.f, m = MINUS_INFINITY;  // l, m: row g in even lanes, g + 8 in odd ones; m in codes, 8 to the octave
  u32 start[4];
  Masses masses;
  masses.clear();
#pragma unroll
  for (int i = 0; i < 64; i++) o[i] = 0.f;
#pragma unroll 1
  for (int j = 0; j * TILE < keys; j++) {
    opaque(start, PRELOAD);
    u32 s[64], p[16];
    const u32 k_at = block.acquire_keys(j);
    multiply_qk(s, block.q_address(), b_address(k_at, lane), start);
    const Factors a = factors_of(block.q_scales(), k_at + 16384, lane);
    block.release_keys(j);

    float m0, m1, alpha0, alpha1, mass0, mass1;
    const float raised = fmaxf(m, largest(s, a, second)), alpha = exp2_fast((m - raised) * 0.125f);
    m = raised;
    both_rows(raised, second, m0, m1);
    fp8_probabilities<USE_EXPCAST>(s, a, m0, m1, p);
    if (keys - j * TILE < TILE) drop_absent(p, keys - j * TILE, lane);
    tile_mass(p, mass0, mass1);
    l = fmaf(l, alpha, second ? mass1 : mass0);
    both_rows(alpha, second, alpha0, alpha1);
    if (USE_MEANS) masses.rescale(alpha0, alpha1);
    if (USE_MEANS) masses.record(j % MEAN_TILES, lane, mass0, mass1);

    multiply_pv(o, p, alpha0, alpha1, b_address(block.acquire_values(j, USE_MEANS), lane));
    block.release_values(j);
    if (USE_MEANS && block.means_due(j)) restore_means<true>(o, masses, block, j, lane);
  }
  constexpr float SUM_SCALE = USE_EXPCAST ? 1.f / (256.f * 1.00928f) : 1.f / 256.f;
  store_rows(call, o, l, m * 0.125f, lane, SUM_SCALE, call.v_scale);
}
