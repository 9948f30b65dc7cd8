// One warpgroup's score tile, 64 rows x 128 keys, to probability bytes.
//
// Accumulator layout: a lane holds rows g = lane / 4 and g + 8 of its warp's 16; s[4 j], s[4 j + 1] are row g and
// s[4 j + 2], s[4 j + 3] row g + 8, columns 8 j + 2 (lane % 4) and the next. A lane's 32 columns are the 32 keys of
// one scale group: the preparation places the keys so, and then a scale is one number per lane and tile.
// Scores and maxima are in code units, 8 to the octave (E4M3 codes of Eq. 7).
#pragma once
#include "hopper.cuh"

// An integer score S is accumulated on top of these bits: read as a float they are 12582912 + S while |S| < 2^22,
// and |S| <= 127 * 127 * 128 < 2^21. That replaces one conversion per score by one move.
constexpr u32 PRELOAD = 0x4B400000u;
constexpr float PRELOADED = 12582912.f;
constexpr float EXPCAST_OFFSET = 119.65f;  // Eq. 7
#define MINUS_INFINITY __int_as_float(0xFF800000)

template <typename T> struct is_float { static constexpr bool value = false; };
template <> struct is_float<float> { static constexpr bool value = true; };
DEVICE int bits(u32 x) { return (int)x; }
DEVICE int bits(float x) { return __float_as_int(x); }
DEVICE float value(u32 x) { return __uint_as_float(x); }
DEVICE float value(float x) { return x; }
DEVICE int max3(int a, int b, int c) { return max(max(a, b), c); }
DEVICE void preload(u32 (&s)[64]) {
#pragma unroll
  for (int i = 0; i < 64; i++) asm volatile("mov.b32 %0,%1;" : "=r"(s[i]) : "n"(PRELOAD));
}
DEVICE void preload(float (&)[64]) {}
// The same, half of it read from 16 bytes of shared memory that hold PRELOAD four times: one load instead of four moves.
// Faster where instructions bound the loop (`int8_int8`, 4 to 8%); all of it from there is not (tests/bench/NOTES.md).
DEVICE void preload_by_halves(u32 (&s)[64], u32 at) {
#pragma unroll
  for (int i = 0; i < 64; i += 8) {
    asm volatile("ld.volatile.shared.v4.u32 {%0,%1,%2,%3},[%4];"
                 : "=r"(s[i]), "=r"(s[i + 1]), "=r"(s[i + 2]), "=r"(s[i + 3]) : "r"(at));
#pragma unroll
    for (int n = 4; n < 8; n++) asm volatile("mov.b32 %0,%1;" : "=r"(s[i + n]) : "n"(PRELOAD));
  }
}

// s = q k, 64 x 128: four steps of 32 channels
DEVICE void multiply_qk(u32 (&s)[64], u64 q, u64 k) {
  wgmma_s8<1>(s, q, k);
  wgmma_s8<1>(s, q + 2, k + 2);
  wgmma_s8<1>(s, q + 4, k + 4);
  wgmma_s8<1>(s, q + 6, k + 6);
}
DEVICE void multiply_qk(float (&s)[64], u64 q, u64 k) {
  wgmma_e4m3<0>(s, q, k);
  wgmma_e4m3<1>(s, q + 2, k + 2);
  wgmma_e4m3<1>(s, q + 4, k + 4);
  wgmma_e4m3<1>(s, q + 6, k + 6);
}

// Largest bit patterns, compared as integers, of this lane's scores in its two rows; two chains a row.
template <typename S>
DEVICE void bit_max(const S (&s)[64], int& x0, int& x1) {
  int a0 = max(bits(s[0]), bits(s[1])), a1 = max(bits(s[2]), bits(s[3]));
  int b0 = max(bits(s[4]), bits(s[5])), b1 = max(bits(s[6]), bits(s[7]));
#pragma unroll
  for (int j = 2; j < 16; j += 2) {
    a0 = max3(a0, bits(s[4 * j]), bits(s[4 * j + 1]));
    a1 = max3(a1, bits(s[4 * j + 2]), bits(s[4 * j + 3]));
    b0 = max3(b0, bits(s[4 * j + 4]), bits(s[4 * j + 5]));
    b1 = max3(b1, bits(s[4 * j + 6]), bits(s[4 * j + 7]));
  }
  x0 = max(a0, b0);
  x1 = max(a1, b1);
}

// The larger of each row's lane maxima over the quad: lane & 1 picks the row that comes back, g or g + 8.
DEVICE float quad_max(float f0, float f1, bool second) {
  const float mine = second ? f1 : f0, other = second ? f0 : f1;
  const float both = fmaxf(mine, __shfl_xor_sync(~0u, other, 1));
  return fmaxf(both, __shfl_xor_sync(~0u, both, 2));
}
template <typename T>
DEVICE T quad_sum(T f0, T f1, bool second) {
  const T mine = second ? f1 : f0, other = second ? f0 : f1;
  const T both = mine + __shfl_xor_sync(~0u, other, 1);
  return both + __shfl_xor_sync(~0u, both, 2);
}
// Running maximum of row g (even lanes) or g + 8 (odd lanes), moved to include this tile.
DEVICE float raise_max(const u32 (&s)[64], float a0, float a1, float m, bool second) {
  int x0, x1;
  bit_max(s, x0, x1);
  return fmaxf(m, quad_max((__int_as_float(x0) - PRELOADED) * a0, (__int_as_float(x1) - PRELOADED) * a1, second));
}
DEVICE float raise_max(const float (&s)[64], float a0, float a1, float m, bool second) {
  // Bits order like integers among floats >= 0, and the negative ones lose to them. Only where the running maximum
  // itself is negative do negative scores matter; then the whole warp takes the exact way.
  int x0, x1;
  bit_max(s, x0, x1);
  const float y0 = x0 < 0 ? MINUS_INFINITY : __int_as_float(x0) * a0;
  const float y1 = x1 < 0 ? MINUS_INFINITY : __int_as_float(x1) * a1;
  const float n = fmaxf(m, quad_max(y0, y1, second));
  if (__all_sync(~0u, n >= 0.f)) return n;
  float f0 = s[0], f1 = s[2];
#pragma unroll
  for (int j = 0; j < 16; j++) {
    f0 = fmaxf(f0, fmaxf(s[4 * j], s[4 * j + 1]));
    f1 = fmaxf(f1, fmaxf(s[4 * j + 2], s[4 * j + 3]));
  }
  return fmaxf(m, quad_max(f0 * a0, f1 * a1, second));
}
// A value of each lane's own row to both rows of the lane.
DEVICE void both_rows(float mine, bool second, float& x0, float& x1) {
  const float other = __shfl_xor_sync(~0u, mine, 1);
  x0 = second ? other : mine;
  x1 = second ? mine : other;
}

// E4M3 bytes of 256 * 2^((a s - m) / 8), in the A-fragment order of a product whose B has its keys permuted alike
// (prepare/csrc/cuda_sm90.cu): p[4 k .. 4 k + 3] are the A registers of step k. With EXPCAST the byte is the rounded
// multiply-add itself; it saturates at 0 below, and above it cannot pass 120 because m includes the tile.
template <bool EXPCAST, typename S>
DEVICE void probabilities(const S (&s)[64], float a0, float a1, float m0, float m1, u32 (&p)[16]) {
  float b0 = EXPCAST ? EXPCAST_OFFSET - m0 : 8.f - 0.125f * m0;
  float b1 = EXPCAST ? EXPCAST_OFFSET - m1 : 8.f - 0.125f * m1;
  if (!EXPCAST) a0 *= 0.125f, a1 *= 0.125f;
  if (!is_float<S>::value) b0 = fmaf(-PRELOADED, a0, b0), b1 = fmaf(-PRELOADED, a1, b1);
#pragma unroll
  for (int j = 0; j < 16; j += 2) {
    float x[8];
#pragma unroll
    for (int i = 0; i < 8; i++) {
      x[i] = fmaf(value(s[4 * j + i]), (i & 2) ? a1 : a0, (i & 2) ? b1 : b0);
      if (!EXPCAST) x[i] = exp2_fast(x[i]);
    }
    p[j] = EXPCAST ? pack_u8(x[0], x[1], x[4], x[5]) : pack_e4m3(x[0], x[1], x[4], x[5]);
    p[j + 1] = EXPCAST ? pack_u8(x[2], x[3], x[6], x[7]) : pack_e4m3(x[2], x[3], x[6], x[7]);
  }
}

// A lane's factors where it has two scale groups of 16 keys: [half of its columns][row g or g + 8]
struct HalfScales {
  float of[2][2];
};
// The tile's own maximum of row g (even lanes) or g + 8 (odd lanes).
DEVICE float tile_max(const u32 (&s)[64], const HalfScales& a, bool second) {
  float top[2];
#pragma unroll
  for (int half = 0; half < 2; half++) {
    int x0 = bits(s[32 * half]), x1 = bits(s[32 * half + 2]);
    x0 = max(x0, bits(s[32 * half + 1]));
    x1 = max(x1, bits(s[32 * half + 3]));
#pragma unroll
    for (int j = 8 * half + 1; j < 8 * half + 8; j++) {
      x0 = max3(x0, bits(s[4 * j]), bits(s[4 * j + 1]));
      x1 = max3(x1, bits(s[4 * j + 2]), bits(s[4 * j + 3]));
    }
    const float y0 = (__int_as_float(x0) - PRELOADED) * a.of[half][0];
    const float y1 = (__int_as_float(x1) - PRELOADED) * a.of[half][1];
    top[0] = half ? fmaxf(top[0], y0) : y0;
    top[1] = half ? fmaxf(top[1], y1) : y1;
  }
  return quad_max(top[0], top[1], second);
}
// Unsigned bytes 255 * 2^((a s - m) / 8) against the tile's own maxima (I2), in the same order.
// SUM: also this lane's sums before rounding; its last `absent` keys are copies of one key and do not count.
template <bool SUM>
DEVICE void probabilities_u8(const u32 (&s)[64], HalfScales a, float m0, float m1, float absent, u32 (&p)[16],
                             float& sum0, float& sum1) {
  constexpr float TOP = 7.994353436858858f;  // log2 255
  HalfScales b;
#pragma unroll
  for (int i = 0; i < 4; i++) {
    a.of[i / 2][i % 2] *= 0.125f;
    b.of[i / 2][i % 2] = fmaf(-PRELOADED, a.of[i / 2][i % 2], TOP - 0.125f * (i % 2 ? m1 : m0));
  }
  sum0 = sum1 = 0.f;
#pragma unroll
  for (int j = 0; j < 16; j += 2) {
    float x[8];
#pragma unroll
    for (int i = 0; i < 8; i++)
      x[i] = exp2_fast(fmaf(value(s[4 * j + i]), a.of[j / 8][i / 2 % 2], b.of[j / 8][i / 2 % 2]));
    p[j] = pack_u8(x[0], x[1], x[4], x[5]);
    p[j + 1] = pack_u8(x[2], x[3], x[6], x[7]);
    if (SUM) {
      sum0 += (x[0] + x[1]) + (x[4] + x[5]);
      sum1 += (x[2] + x[3]) + (x[6] + x[7]);
      if (j == 14) sum0 = fmaf(-absent, x[5], sum0), sum1 = fmaf(-absent, x[7], sum1);
    }
  }
}
// Clears the bytes of keys from count on: word i of a lane is keys 32 (lane % 4) + 4 i to + 3.
DEVICE void drop_absent(u32 (&p)[16], int count, int lane) {
#pragma unroll
  for (int i = 0; i < 8; i++) {
    const int real = min(max(count - 32 * (lane & 3) - 4 * i, 0), 4);
    const u32 mask = real == 4 ? ~0u : (1u << 8 * real) - 1;
    p[2 * i] &= mask;
    p[2 * i + 1] &= mask;
  }
}
// Row sums over this lane's bytes
DEVICE void byte_sums(const u32 (&p)[16], float& sum0, float& sum1) {
  int x0 = 0, x1 = 0;
#pragma unroll
  for (int i = 0; i < 8; i++) {
    x0 = add_bytes(p[2 * i], x0);
    x1 = add_bytes(p[2 * i + 1], x1);
  }
  sum0 = (float)x0, sum1 = (float)x1;
}
