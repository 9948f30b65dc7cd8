// Rows of q, k and v on their way to codes: strided loads, rotary embedding, Hadamard rotation, byte packing.
// Four lanes hold one row of 128 channels: lane l of the quad has channels 32 i + 8 l + w as x[8 i + w].
#pragma once
#include "hopper.cuh"

// A strided tensor [B, H, L, 128]; strides in elements, the last one 1.
struct Rows {
  const void* data;
  i64 batch, head, row;
};
// cos, sin: fp32 [B or 1, L, 64], on 16 bytes; batch: elements between batches, or 0; layout 1 interleaved, 2 half
struct Rope {
  const float *cos, *sin;
  i64 batch;
  int layout;
};
struct Bf16 { u16 bits; };
struct Fp16 { u16 bits; };
template <typename T> struct is_fp16 { static constexpr bool value = false; };
template <> struct is_fp16<Fp16> { static constexpr bool value = true; };
// Element i of packed words: 2 to a word, or 1 if 32 bits wide
template <typename T> DEVICE float element(const u32* words, int i);
template <> DEVICE float element<Bf16>(const u32* words, int i) {
  return __uint_as_float(i % 2 ? words[i / 2] & 0xFFFF0000u : words[i / 2] << 16);
}
template <> DEVICE float element<Fp16>(const u32* words, int i) {
  return low_f16(i % 2 ? words[i / 2] >> 16 : words[i / 2]);
}
template <> DEVICE float element<float>(const u32* words, int i) { return __uint_as_float(words[i]); }

template <typename T>
DEVICE const T* row_of(const Rows& rows, int batch, int head, i64 row) {
  return (const T*)rows.data + batch * rows.batch + head * rows.head + row * rows.row;
}
// Eight consecutive elements, as they are. USE_WIDE: every row starts on 16 bytes, so whole vectors can be read.
template <typename T>
struct __align__(16) Eight {
  u32 words[2 * sizeof(T)];
  DEVICE float operator[](int i) const { return element<T>(words, i); }
};
template <typename T>
DEVICE Eight<T> load_eight(const T* p) {
  Eight<T> r;
  if (USE_WIDE) {
#pragma unroll
    for (int i = 0; i < (int)sizeof(r) / 16; i++) ((uint4*)&r)[i] = __ldg((const uint4*)p + i);
  } else if (sizeof(T) == 4) {
#pragma unroll
    for (int i = 0; i < 8; i++) r.words[i % (2 * sizeof(T))] = ((const u32*)p)[i];
  } else {
#pragma unroll
    for (int i = 0; i < 4; i++) r.words[i] = ((const u16*)p)[2 * i] | (u32)((const u16*)p)[2 * i + 1] << 16;
  }
  return r;
}
template <typename T>
DEVICE void load_row(const T* row, int lane, float (&x)[32]) {
  Eight<T> r[4];
#pragma unroll
  for (int i = 0; i < 4; i++) r[i] = load_eight(row + 32 * i + 8 * lane);
#pragma unroll
  for (int i = 0; i < 32; i++) x[i] = r[i / 8][i % 8];
}

// Fused by hand, so that every compiler rounds alike
DEVICE void turn(float& a, float& b, float c, float s) {
  const float x = fmaf(a, c, -(b * s));
  b = fmaf(a, s, b * c);
  a = x;
}
DEVICE void apply_rope(const Rope& rope, int batch, i64 row, int lane, float (&x)[32]) {
  if (!USE_ROPE) return;
  const bool interleaved = rope.layout == 1;
  const i64 first = batch * rope.batch + row * 64;
  const float4 *cos = (const float4*)(rope.cos + first), *sin = (const float4*)(rope.sin + first);
  alignas(16) float c[16], s[16];
  // all of them before their first use, and no load behind a branch: their latencies then overlap
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const int at = interleaved ? 4 * i + lane : 8 * (i / 2) + 2 * lane + i % 2;
    *(float4*)(c + 4 * i) = __ldg(cos + at);
    *(float4*)(s + 4 * i) = __ldg(sin + at);
  }
  // pairs (2 p, 2 p + 1) with p = 16 i' + 4 l + w', or (p, p + 64) with p = 32 i' + 8 l + w: both of one lane
  if (interleaved)
#pragma unroll
    for (int i = 0; i < 16; i++) turn(x[2 * i], x[2 * i + 1], c[i], s[i]);
  else
#pragma unroll
    for (int i = 0; i < 16; i++) turn(x[i], x[i + 16], c[i], s[i]);
}

// Rotation of C2 times sqrt(128): signs, then the Hadamard matrix. signs: bit c of 128 negates channel c.
constexpr float ROTATION_NORM = 0.08838834764831845f;
DEVICE void rotate(const u32 (&signs)[4], int lane, float (&x)[32]) {
#pragma unroll
  for (int i = 0; i < 32; i++) {
    const u32 mine = signs[i / 8] >> (8 * lane);
    x[i] = __uint_as_float(__float_as_uint(x[i]) ^ ((mine << (31 - i % 8)) & 0x80000000u));
  }
#pragma unroll
  for (int step = 1; step < 32; step *= 2)
#pragma unroll
    for (int i = 0; i < 32; i++)
      if (!(i & step)) {
        const float a = x[i], b = x[i + step];
        x[i] = a + b;
        x[i + step] = a - b;
      }
#pragma unroll
  for (int step = 1; step < 4; step *= 2) {
    const float sign = (lane & step) ? -1.f : 1.f;
#pragma unroll
    for (int i = 0; i < 32; i++) x[i] = fmaf(x[i], sign, __shfl_xor_sync(~0u, x[i], step));
  }
}
#if USE_TENSOR_ROTATION
// The same of two rows, 16-bit inputs: channel c = 32 i + 8 l + w, and the Hadamard matrix over bits l and the low two
// of w is a 16 x 16 product of exact +1 and -1, whose fragments are the words as loaded and whose result is x's
// layout; the other three bits are sums within a lane. A warp's 16 rows: words[r] is row g + 8 r.
template <bool F16>
DEVICE void mma_ones(float (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
#define MMA_ONES(type)                                                                                                  \
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." type ".f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"  \
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1))
  if (F16) MMA_ONES("f16.f16");
  else MMA_ONES("bf16.bf16");
}
template <bool F16>
DEVICE void rotate_two(const u32 (&signs)[4], int lane32, u32 (&words)[2][16], float (&x)[2][32]) {
  const int g = lane32 / 4, t = lane32 % 4;
  constexpr u32 ONE = F16 ? 0x3C00 : 0x3F80;
  // column n = 8 nt + g goes to lane g / 2 as its element 2 nt + g % 2
  u32 b[2][2];
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const int nt = i / 2, half = i % 2, out = 2 * nt + g % 2;
    const u32 even = __popc(t & (g / 2)) + __popc((2 * half) & out), odd = even + (out & 1);
    b[nt][half] = (ONE | (even & 1) << 15) | (ONE | (odd & 1) << 15) << 16;
  }
#pragma unroll
  for (int j = 0; j < 16; j++) {
    const u32 pair = signs[j / 4] >> (8 * t + 2 * (j % 4)), flip = (pair & 1) << 15 | (pair & 2) << 30;
    words[0][j] ^= flip;
    words[1][j] ^= flip;
  }
#pragma unroll
  for (int j = 0; j < 16; j += 2)
#pragma unroll
    for (int nt = 0; nt < 2; nt++) {
      float d[4] = {0.f, 0.f, 0.f, 0.f};
      mma_ones<F16>(d, words[0][j], words[1][j], words[0][j + 1], words[1][j + 1], b[nt][0], b[nt][1]);
      x[0][2 * j + 2 * nt] = d[0], x[0][2 * j + 2 * nt + 1] = d[1];
      x[1][2 * j + 2 * nt] = d[2], x[1][2 * j + 2 * nt + 1] = d[3];
    }
#pragma unroll
  for (int step = 4; step < 32; step *= 2)
#pragma unroll
    for (int i = 0; i < 64; i++)
      if (!(i & step)) {
        const float u = x[i / 32][i % 32], v = x[i / 32][i % 32 + step];
        x[i / 32][i % 32] = u + v;
        x[i / 32][i % 32 + step] = u - v;
      }
}
#endif
// This lane's share of a row of 128 floats
DEVICE float4 four_of(const float* row, int lane, int i) {
  return __ldg((const float4*)(row + 32 * (i / 2) + 8 * lane + 4 * (i % 2)));
}

// x minus a row of 128 floats, and the quad's dot product with one
DEVICE void subtract(float (&x)[32], const float* row, int lane) {
#pragma unroll
  for (int i = 0; i < 8; i++) {
    const float4 y = four_of(row, lane, i);
    x[4 * i] -= y.x;
    x[4 * i + 1] -= y.y;
    x[4 * i + 2] -= y.z;
    x[4 * i + 3] -= y.w;
  }
}
DEVICE float quad_dot(const float (&x)[32], const float* row, int lane) {
  float dot = 0.f;
#pragma unroll
  for (int i = 0; i < 8; i++) {
    const float4 y = four_of(row, lane, i);
    dot = fmaf(x[4 * i], y.x, fmaf(x[4 * i + 1], y.y, fmaf(x[4 * i + 2], y.z, fmaf(x[4 * i + 3], y.w, dot))));
  }
  dot += __shfl_xor_sync(~0u, dot, 1);
  return dot + __shfl_xor_sync(~0u, dot, 2);
}

// The larger or smaller of two; NaN if one is, which fmaxf and fminf drop
DEVICE float max_nan(float a, float b) {
  float y;
  asm("max.NaN.f32 %0,%1,%2;" : "=f"(y) : "f"(a), "f"(b));
  return y;
}
DEVICE float min_nan(float a, float b) {
  float y;
  asm("min.NaN.f32 %0,%1,%2;" : "=f"(y) : "f"(a), "f"(b));
  return y;
}
DEVICE float quad_amax(const float (&x)[32]) {
  float a = 0.f;
#pragma unroll
  for (int i = 0; i < 32; i++) a = max_nan(a, fabsf(x[i]));
  a = max_nan(a, __shfl_xor_sync(~0u, a, 1));
  return max_nan(a, __shfl_xor_sync(~0u, a, 2));
}
DEVICE float quad_total(float x) {
  x += __shfl_xor_sync(~0u, x, 1);
  return x + __shfl_xor_sync(~0u, x, 2);
}
// Values of one channel over their scale, ready to be rounded; a lane of the quad has keys first to first + 31 of a
// tile's count. INT8: with what rounding all keys misses spread over them (I1; 32: formats.ROUNDING_PRIOR).
template <bool INT8>
DEVICE void to_steps(float (&x)[32], float scale, int count, int first) {
  constexpr float MAGIC = 12582912.f;  // 1.5 * 2^23: added and taken away, it rounds to nearest even
  const float inverse = scale > 0.f ? 1.f / scale : 0.f;
  float missed = 0.f;
#pragma unroll
  for (int k = 0; k < 32; k++) {
    x[k] *= inverse;
    if (INT8 && (count == TILE || first + k < count)) missed += x[k] - __fsub_rn(__fadd_rn(x[k], MAGIC), MAGIC);
  }
  if (!INT8) return;
  missed = quad_total(missed) / (float)(count + 32);
#pragma unroll
  for (int k = 0; k < 32; k++) x[k] += missed;
}
DEVICE u32 pack_s8(float x0, float x1, float x2, float x3) {
  u32 d;
  asm("{.reg .s32 a,b,c,e; .reg .b32 t;\n"
      "cvt.rni.s32.f32 a,%1; cvt.rni.s32.f32 b,%2; cvt.rni.s32.f32 c,%3; cvt.rni.s32.f32 e,%4;\n"
      "cvt.pack.sat.s8.s32.b32 t,e,c,0; cvt.pack.sat.s8.s32.b32 %0,b,a,t;}"
      : "=r"(d) : "f"(x0), "f"(x1), "f"(x2), "f"(x3));
  return d;
}
template <bool INT8>
DEVICE u32 pack_codes(float x0, float x1, float x2, float x3) {
  return INT8 ? pack_s8(x0, x1, x2, x3) : pack_e4m3(x0, x1, x2, x3);
}

// A row's codes into a 128-byte-swizzled image whose row r starts at image + 128 r.
template <bool INT8>
DEVICE void store_codes(char* image, int r, int lane, const float (&x)[32], float inverse) {
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const float* y = x + 8 * i;
    const int chunk = (2 * i + lane / 2) ^ (r & 7);
    uint2 codes;
    codes.x = pack_codes<INT8>(y[0] * inverse, y[1] * inverse, y[2] * inverse, y[3] * inverse);
    codes.y = pack_codes<INT8>(y[4] * inverse, y[5] * inverse, y[6] * inverse, y[7] * inverse);
    *(uint2*)(image + r * 128 + chunk * 16 + (lane & 1) * 8) = codes;
  }
}
