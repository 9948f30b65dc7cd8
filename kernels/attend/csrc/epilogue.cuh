// The end of the attention kernels with 8-bit values: output and log-sum-exp of a warp's 16 rows.
#pragma once
#include "softmax.cuh"

template <typename Call>
DEVICE void store_pair(const Call& call, i64 at, float x, float y) {
  if (call.out_type == 0) ((u32*)call.out)[at / 2] = pack_bf16(x, y);
  if (call.out_type == 1) ((u32*)call.out)[at / 2] = pack_f16(x, y);
  if (call.out_type == 2) ((float2*)call.out)[at / 2] = make_float2(x, y);
}
// Scales of two channels; without any, which is known when compiling, no lane asks.
DEVICE float2 scales_at(const float* v_scale, int at) { return __ldg((const float2*)(v_scale + at)); }
DEVICE float2 scales_at(decltype(nullptr), int) { return make_float2(1.f, 1.f); }
// out = v_scale * o / l and lse (C6). bh: head of B H. row: this lane's row g. l, m: of row g in even lanes, g + 8 in odd
// ones; m in octaves, l * sum_scale in units of the largest probability. v_scale: [B H][128], or nullptr for none.
template <typename Call, typename Scales>
DEVICE void store_rows(const Call& call, int bh, i64 row, const float (&o)[64], float l, float m, int lane,
                       float sum_scale, Scales v_scale) {
  const int batch = bh / call.heads, head = bh % call.heads;
  const bool second = lane & 1;
  float n0, n1;
  both_rows(l == 0.f ? 0.f : 1.f / l, second, n0, n1);
  const i64 at = ((batch * call.rows + row) * call.out_heads + head) * HEAD_DIM + (lane & 3) * 2;
  const i64 next = (i64)8 * call.out_heads * HEAD_DIM;
  const bool in0 = row < call.rows, in1 = row + 8 < call.rows;
#pragma unroll
  for (int j = 0; j < 16; j++) {
    const float2 s = scales_at(v_scale, bh * HEAD_DIM + 8 * j + (lane & 3) * 2);
    if (in0) store_pair(call, at + 8 * j, o[4 * j] * n0 * s.x, o[4 * j + 1] * n0 * s.y);
    if (in1) store_pair(call, at + next + 8 * j, o[4 * j + 2] * n1 * s.x, o[4 * j + 3] * n1 * s.y);
  }
  if (call.lse && (lane & 3) < 2 && (second ? in1 : in0)) {
    const i64 r = bh * call.rows + row + (second ? 8 : 0);
    const float shift = call.lse_shift ? call.lse_shift[r] : 0.f;
    call.lse[r] = l == 0.f ? MINUS_INFINITY : 0.6931471805599453f * (m + log2_fast(l * sum_scale)) + shift;
  }
}
