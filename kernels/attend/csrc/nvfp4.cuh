// NVFP4 (NUMERICS.md N1 to N5): E2M1 codes with an E4M3 scale for 16 of them, and the instruction that multiplies
// them. Two instructions exist on sm_120a and sm_121a only, the product and the conversion to E2M1. USE_TWIN 1 puts
// software in their place, with the same operands in the same lanes: so that everything around them can be tested
// on other cards.
//
// Fragments of m16n8k64 with scale_vec::4X, lane 4 g + t (PTX ISA, "Warp Level Matrix Multiply-Accumulate"):
//   a[2 h + r]  row g + 8 r, columns 32 h + 8 t to + 7, the first one in the low nibble
//   b[h]        column g, rows 32 h + 8 t to + 7
//   d[2 r + e]  row g + 8 r, column 2 t + e
//   scales      byte i belongs to 16 i to 16 i + 15 of the contraction. Of A, lane 2 SA + r of quad g has row g + 8 r;
//               of B, lane SB of quad g has column g. SA (0, 1) and SB (0 to 3) are the instruction's thread
//               selectors, so one register serves two products on the A side and four on the B side.
// The same maps in Python: tests/kernels/attend/nvfp4_fragments.py.
#pragma once
#include "hopper.cuh"

constexpr int TILE_CODES = 8192;               // 128 rows of 128 codes, as B fragments: [16 octants][32 lanes][16]
constexpr int TILE_RECORD = TILE_CODES + 1024;  // then their scales: [32 lanes][4 J][2 steps] words
constexpr float NVFP4_MAX = 2688.f;            // largest code times largest scale

// The factor beside codes and scales (N2), from the largest magnitude of a head; not finite if that is not (C7)
DEVICE float global_scale(float amax) { return amax == 0.f ? 1.f : amax / NVFP4_MAX; }
// Value of an E4M3 byte without sign: its bits, moved to the place of a float's, are 2^-120 of it, subnormals too
DEVICE float ue4m3_value(u32 code) { return __uint_as_float((code & 0x7F) << 20) * __uint_as_float(247u << 23); }
// Four numbers >= 0 to E4M3 bytes, round to nearest even, saturating; x0 lowest
DEVICE u32 pack_ue4m3(float x0, float x1, float x2, float x3) {
#if __CUDA_ARCH__ >= 890
  return pack_e4m3(x0, x1, x2, x3);
#else
  u32 packed = 0;
  const float x[4] = {x0, x1, x2, x3};
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const float y = fminf(x[i], 448.f);
    const u32 bits = __float_as_uint(y);
    const u32 normal = ((bits + 0x7FFFFu + ((bits >> 20) & 1)) >> 20) - (120u << 3);
    packed |= (y < 0.015625f ? (u32)__float2int_rn(y * 512.f) : normal) << 8 * i;
  }
  return packed;
#endif
}

#if USE_TWIN
DEVICE u32 e2m1_code(float x) {
  const u32 bits = __float_as_uint(x) & 0x7FFFFFFFu;
  // below 1 the steps are halves; from there on one bit of the mantissa stays
  const u32 normal = ((bits + 0x1FFFFFu + ((bits >> 22) & 1)) >> 22) - 252u;
  const u32 code = bits < 0x3F800000u ? (u32)__float2int_rn(2.f * __uint_as_float(bits)) : normal;
  return min(code, 7u) | (__float_as_uint(x) >> 28 & 8);
}
#endif
// Eight numbers to E2M1 codes, round to nearest even, saturating; x[0] in the lowest nibble
DEVICE u32 pack_e2m1(const float (&x)[8]) {
  u32 d = 0;
#if USE_TWIN
#pragma unroll
  for (int i = 0; i < 8; i++) d |= e2m1_code(x[i]) << 4 * i;
#else
  asm("{.reg .b8 a,b,c,e;\n"
      "cvt.rn.satfinite.e2m1x2.f32 a,%2,%1; cvt.rn.satfinite.e2m1x2.f32 b,%4,%3;\n"
      "cvt.rn.satfinite.e2m1x2.f32 c,%6,%5; cvt.rn.satfinite.e2m1x2.f32 e,%8,%7; mov.b32 %0,{a,b,c,e};}"
      : "=r"(d) : "f"(x[0]), "f"(x[1]), "f"(x[2]), "f"(x[3]), "f"(x[4]), "f"(x[5]), "f"(x[6]), "f"(x[7]));
#endif
  return d;
}

// One number's code
DEVICE u32 e2m1_of(float x) {
#if USE_TWIN
  return e2m1_code(x);
#else
  u32 d;
  asm("{.reg .b8 a;\n cvt.rn.satfinite.e2m1x2.f32 a,%1,%1; mov.b32 %0,{a,a,a,a};}" : "=r"(d) : "f"(x));
  return d & 15;
#endif
}
// Twice the value of the lowest code
DEVICE int e2m1_doubled(u32 code) {
  const int magnitude = (int)(0x0C08060403020100ull >> 8 * (code & 7)) & 15;
  return code & 8 ? -magnitude : magnitude;
}
// d += a b, 16 x 8 over 64 codes. Order of the twin's sum: d first, then the groups of 16 in ascending order. A
// group's sum is exact, so that is one rounding a group.
template <int SA, int SB>
DEVICE void mma_nvfp4(float* d, const u32 (&a)[4], u32 b0, u32 b1, u32 scale_a, u32 scale_b) {
#if USE_TWIN
  const int lane = threadIdx.x & 31, row = lane & 28, column = lane % 4 * 8;  // first lanes of the quads asked
  u32 scales[4];
#pragma unroll
  for (int i = 0; i < 2; i++) {
    scales[i] = __shfl_sync(~0u, scale_a, row + 2 * SA + i);
    scales[2 + i] = __shfl_sync(~0u, scale_b, column + 4 * i + SB);
  }
#pragma unroll 1
  for (int group = 0; group < 4; group++) {
    int sums[4] = {0, 0, 0, 0};
#pragma unroll 1
    for (int t = group % 2 * 2; t < group % 2 * 2 + 2; t++) {
      u32 x0 = __shfl_sync(~0u, group < 2 ? a[0] : a[2], row + t);
      u32 x1 = __shfl_sync(~0u, group < 2 ? a[1] : a[3], row + t);
      u32 y0 = __shfl_sync(~0u, group < 2 ? b0 : b1, column + t);
      u32 y1 = __shfl_sync(~0u, group < 2 ? b0 : b1, column + 4 + t);
#pragma unroll 1
      for (int i = 0; i < 8; i++) {
        const int p0 = e2m1_doubled(x0), p1 = e2m1_doubled(x1), q0 = e2m1_doubled(y0), q1 = e2m1_doubled(y1);
        sums[0] += p0 * q0, sums[1] += p0 * q1, sums[2] += p1 * q0, sums[3] += p1 * q1;
        x0 >>= 4, x1 >>= 4, y0 >>= 4, y1 >>= 4;
      }
    }
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const float scale = ue4m3_value(scales[i / 2] >> 8 * group) * ue4m3_value(scales[2 + i % 2] >> 8 * group);
      d[i] = fmaf(0.25f * (float)sums[i], scale, d[i]);
    }
  }
#else
  asm volatile("mma.sync.aligned.kind::mxf4nvf4.block_scale.scale_vec::4X.m16n8k64.row.col.f32.e2m1.e2m1.f32.ue4m3 "
               "{%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3},{%10},{0,%12},{%11},{0,%13};"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "r"(scale_a), "r"(scale_b), "n"(SA),
                 "n"(SB));
#endif
}
