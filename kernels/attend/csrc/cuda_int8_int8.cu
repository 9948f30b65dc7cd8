// attend() for sm_80 and newer, `int8_int8` (I1 to I6): U8 probabilities against the tile's own maximum, S8 values
// with a scale per tile and channel, exact int32 products, fp32 across tiles.
// Host side: ../cuda_int8_int8.py. Must match ../reference.py. Switches: USE_MEANS, USE_F16_MEANS (else bf16).
//
// Both products start from a constant, 12582912 as a float's bits, so neither needs a conversion, and the constant
// costs nothing: the accumulators of a product need not be its result. The keys sit where the preparation of sm_90 puts
// them (../../prepare/csrc/cuda_sm90.cu): the bytes that a lane packs are its A fragment of the second product.
// With means the row sum is that of the probabilities before rounding, else that of the bytes (I3). O is rescaled only
// in tiles where a maximum of the warp moved.
#define KEY_SCALES 8
#define VALUE_RECORD (16384 + 512)
#define VALUE_BYTES VALUE_RECORD
#include "mma_frame.cuh"

// The float conversion to f16 rounds x * 2^-24 to an integer number of f16's smallest steps, whose bits are that
// integer: two conversions and a byte permutation pack four. From sm_89 on one instruction packs two. (A test sets it.)
// The exponents then lie 24 octaves lower, where floats are further apart: one byte in 20,000 differs by one.
#ifndef USE_F16_PACK
#define USE_F16_PACK (__CUDA_ARCH__ < 890)
#endif
constexpr float STEP = USE_F16_PACK ? 5.9604644775390625e-8f : 1.f;

// Four probabilities in units of STEP, rounded to bytes
DEVICE u32 pack_probabilities(float x0, float x1, float x2, float x3) {
#if USE_F16_PACK
  return __byte_perm(pack_f16(x0, x1), pack_f16(x2, x3), 0x6420);
#else
  return pack_u8(x0, x1, x2, x3);
#endif
}
// Bytes 255 * 2^(a s - m) against the tile's own maxima (I2). p[4 k .. 4 k + 3] are the A registers of step k of the
// second product: word i of a lane is keys 32 (lane % 4) + 4 i to + 3, row g in even places, g + 8 in odd ones.
// sum: this lane's sums before rounding, of rows g and g + 8. The tile has `left` keys; what stands after them are
// copies of one key and does not count.
DEVICE void tile_probabilities(const u32 (&s)[64], const Factors& a, float m0, float m1, int left, u32 (&p)[16],
                               float (&sum)[2]) {
  constexpr float TOP = 7.994353436858858f - (USE_F16_PACK ? 24.f : 0.f);  // log2 255
  Factors b;
#pragma unroll
  for (int i = 0; i < GROUPS; i++) {
    b.of[i][0] = fmaf(-PRELOADED, a.of[i][0], TOP - m0);
    b.of[i][1] = fmaf(-PRELOADED, a.of[i][1], TOP - m1);
  }
  sum[0] = sum[1] = 0.f;
#pragma unroll
  for (int j = 0; j < 16; j += 2) {
    float x[8];
#pragma unroll
    for (int i = 0; i < 8; i++)
      x[i] = exp2_fast(fmaf(value(s[4 * j + i]), a.row(2 * j, i / 2 % 2), b.row(2 * j, i / 2 % 2)));
    p[j] = pack_probabilities(x[0], x[1], x[4], x[5]);
    p[j + 1] = pack_probabilities(x[2], x[3], x[6], x[7]);
    sum[0] += (x[0] + x[1]) + (x[4] + x[5]);
    sum[1] += (x[2] + x[3]) + (x[6] + x[7]);
    if (j == 14 && left < TILE) {
      const float absent = min(max(32 * (thread_now() & 3) + 32 - left, 0), 32);
      sum[0] = fmaf(-absent, x[5], sum[0]);
      sum[1] = fmaf(-absent, x[7], sum[1]);
    }
  }
}
// Mass of the tile (I3) of row g in even lanes, g + 8 in odd ones
DEVICE float tile_mass(const u32 (&p)[16], const float (&sum)[2], bool second) {
  if (USE_MEANS) return quad_sum(sum[0], sum[1], second) * (1.f / STEP);
  int sum0 = 0, sum1 = 0;
#pragma unroll
  for (int i = 0; i < 16; i += 2) {
    sum0 = add_bytes(p[i], sum0);
    sum1 = add_bytes(p[i + 1], sum1);
  }
  return (float)quad_sum(sum0, sum1, second);
}

// o += v_scale * w * (p v), in parts of 64 channels; scales: this lane's first pair of the tile's
DEVICE void multiply_pv(float (&o)[64], const u32 (&p)[16], float w0, float w1, u32 v, u32 scales,
                        const u32 (&start)[4]) {
  const float c0 = -PRELOADED * w0, c1 = -PRELOADED * w1;
#pragma unroll
  for (int part = 0; part < 2; part++) {
    u32 n[32];
#pragma unroll
    for (int step = 0; step < 4; step++)
#pragma unroll
      for (int i = 0; i < 32; i += 8) {
        u32 b[4];
        load_matrices(step_address(v, step) + part * 8192 + i * 256, b);
        mma_u8s8(n + i, p + 4 * step, b[0], b[1], step ? n + i : start);
        mma_u8s8(n + i + 4, p + 4 * step, b[2], b[3], step ? n + i + 4 : start);
      }
#pragma unroll
    for (int j = 0; j < 8; j++) {
      float x, y, *to = o + 32 * part + 4 * j;
      load_shared2(scales + part * 256 + 32 * j, x, y);
      to[0] = fmaf(fmaf(value(n[4 * j]), w0, c0), x, to[0]);
      to[1] = fmaf(fmaf(value(n[4 * j + 1]), w0, c0), y, to[1]);
      to[2] = fmaf(fmaf(value(n[4 * j + 2]), w1, c1), x, to[2]);
      to[3] = fmaf(fmaf(value(n[4 * j + 3]), w1, c1), y, to[3]);
    }
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) attend_u8s8(const __grid_constant__ Call call) {
  extern __shared__ __align__(1024) char memory[];
  const Block block(call, memory);
  const int lane = threadIdx.x & 31, keys = block.keys;
  const bool second = lane & 1;
  float o[64], l = 0.f, m = MINUS_INFINITY;  // l, m: row g in even lanes, g + 8 in odd ones
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
    multiply_qk(s, block.q_address(), b_address(k_at, thread_now() & 31), start);
    const Factors a = factors_of(block.q_scales(), k_at + 16384, lane);
    block.release_keys(j);

    float m0, m1, sum[2], w0, w1;
    const float tile_max = largest(s, a, second);
    both_rows(tile_max, second, m0, m1);
    const int left = keys - j * TILE;
    tile_probabilities(s, a, m0, m1, left, p, sum);
    if (left < TILE) drop_absent(p, left, lane);
    const float raised = fmaxf(m, tile_max), alpha = exp2_fast(m - raised);
    const float w = exp2_fast(tile_max - raised) * (1.f / 255.f), mass = w * tile_mass(p, sum, second);
    m = raised;
    l = fmaf(l, alpha, mass);
    if (__any_sync(~0u, alpha != 1.f)) {
      float alpha0, alpha1;
      both_rows(alpha, second, alpha0, alpha1);
#pragma unroll
      for (int i = 0; i < 64; i++) o[i] *= (i & 2) ? alpha1 : alpha0;
      if (USE_MEANS) masses.rescale(alpha0, alpha1);
    }
    if (USE_MEANS) {
      float mass0, mass1;
      both_rows(mass, second, mass0, mass1);
      masses.record(j % MEAN_TILES, lane, mass0, mass1);
    }
    both_rows(w, second, w0, w1);

    const u32 v_at = block.acquire_values(j, USE_MEANS);
    multiply_pv(o, p, w0, w1, b_address(v_at, lane), v_at + 16384 + (lane & 3) * 8, start);
    block.release_values(j);
    if (USE_MEANS && block.means_due(j)) restore_means<USE_F16_MEANS>(o, masses, block, j, lane);
  }
  store_rows(call, o, l, m, lane, 1.f, nullptr);
}
