// Codes of queries and keys whose errors stay out of the scores (NUMERICS.md N6). Must match ../nvfp4_shaping.py.
#pragma once
#include "rows.cuh"

#include "nvfp4.cuh"

constexpr int SAMPLE = 16381;      // rows at most that second moments are taken of
constexpr float DAMPING = 0.01f;   // of the mean diagonal, on each diagonal element
constexpr float SPREAD = 1e-4f;    // of the mean square over channels, added to each channel's
constexpr int CHUNK_ROWS = 64;     // rows of the sample in shared memory at a time
constexpr int MOMENT_ROWS = 32;    // rows of the moments that one block makes
constexpr int SQUARE = HEAD_DIM * HEAD_DIM;
constexpr int PITCH = HEAD_DIM + 1;  // of a matrix in shared memory whose columns are read, too

// Sum of x' x over the rows r < rows, rows first to first + 31 of it, into out [128][128]. load(r, lane, x): row r of
// the sample as rows.cuh holds it. In the order of the rows, so that nothing but them matters. 256 threads
template <class Load>
DEVICE void second_moments(Load load, int rows, int first, float (&chunk)[CHUNK_ROWS][HEAD_DIM], float* out) {
  const int lane = threadIdx.x & 3, own = threadIdx.x / 4, row = first + threadIdx.x / 32 * 4;
  const int column = threadIdx.x % 32 * 4;
  float sums[4][4] = {};
  for (int from = 0; from < rows; from += CHUNK_ROWS) {
    float x[32];
    load(min(from + own, rows - 1), lane, x);
#pragma unroll
    for (int i = 0; i < 32; i++) x[i] = from + own < rows ? x[i] : 0.f;
    __syncthreads();
#pragma unroll
    for (int i = 0; i < 8; i++)
      *(float4*)(chunk[own] + 32 * (i / 2) + 8 * lane + 4 * (i % 2)) =
          make_float4(x[4 * i], x[4 * i + 1], x[4 * i + 2], x[4 * i + 3]);
    __syncthreads();
#pragma unroll 4
    for (int r = 0; r < CHUNK_ROWS; r++) {
      const float4 a = *(const float4*)(chunk[r] + row), b = *(const float4*)(chunk[r] + column);
      const float u[4] = {a.x, a.y, a.z, a.w}, v[4] = {b.x, b.y, b.z, b.w};
#pragma unroll
      for (int i = 0; i < 16; i++) sums[i / 4][i % 4] = fmaf(u[i / 4], v[i % 4], sums[i / 4][i % 4]);
    }
  }
#pragma unroll
  for (int i = 0; i < 4; i++)
    *(float4*)(out + (row + i) * HEAD_DIM + column) = make_float4(sums[i][0], sums[i][1], sums[i][2], sums[i][3]);
}

// Factors that make the channels of q as large as those of k are under their inverse, into factors[128]
DEVICE void balance_channels(const float* of_q, const float* of_k, float (&factors)[HEAD_DIM]) {
  __shared__ float squares[2][HEAD_DIM], means[2];
  const int c = threadIdx.x;
  if (c < HEAD_DIM) squares[0][c] = of_q[c * PITCH], squares[1][c] = of_k[c * PITCH];
  __syncthreads();
  if (c < 2) {
    float sum = 0.f;
    for (int i = 0; i < HEAD_DIM; i++) sum += squares[c][i];
    means[c] = sum / HEAD_DIM;
  }
  __syncthreads();
  if (c < HEAD_DIM) {
    const float q = means[0] > 0.f ? squares[0][c] / means[0] + SPREAD : 1.f;
    const float k = means[1] > 0.f ? squares[1][c] / means[1] + SPREAD : 1.f;
    factors[c] = sqrtf(sqrtf(k / q));
  }
  __syncthreads();
}
// The Hadamard matrix over the rows of h or, across, its columns; all threads
DEVICE void transform(float* h, bool across, int threads) {
  const int along = across ? PITCH : 1, other = across ? 1 : PITCH;
  for (int step = 1; step < HEAD_DIM; step *= 2) {
    for (int n = threadIdx.x; n < SQUARE / 2; n += threads) {
      const int i = n % 64, low = i / step * 2 * step + i % step;
      float* at = h + n / 64 * other + low * along;
      const float a = at[0], b = at[step * along];
      at[0] = a + b;
      at[step * along] = a - b;
    }
    __syncthreads();
  }
}
// h [128] rows of PITCH, its upper triangle: into (1 + M) diag (1 + M)', M_ij at h_ij times diag_j, diag on the diagonal
DEVICE void factorize(float* h, int threads) {
  const int k = threadIdx.x % HEAD_DIM;
  for (int j = HEAD_DIM - 1; j > 0; j--) {
    if (k < j) {
      const float d = h[j * PITCH + j], times = d > 0.f ? h[k * PITCH + j] / d : 0.f;
      for (int i = threadIdx.x / HEAD_DIM; i <= k; i += threads / HEAD_DIM)
        h[i * PITCH + k] = fmaf(-h[i * PITCH + j], times, h[i * PITCH + k]);
    }
    __syncthreads();
  }
}

// This lane's share of a row, times a row of 128 floats
DEVICE void scale_channels(float (&x)[32], const float* row, int lane) {
#pragma unroll
  for (int i = 0; i < 8; i++) {
    const float4 y = four_of(row, lane, i);
    x[4 * i] *= y.x;
    x[4 * i + 1] *= y.y;
    x[4 * i + 2] *= y.z;
    x[4 * i + 3] *= y.w;
  }
}

// The two scales of N2 for 16 numbers whose largest magnitude is amax: it becomes a 6, or a 4. byte 0 and 1
DEVICE u32 microscales(float amax, float g) { return pack_ue4m3(amax / (6.f * g), amax / (4.f * g), 0.f, 0.f); }
DEVICE float largest(const float* x, int n) {
  float amax = 0.f;
#pragma unroll
  for (int i = 0; i < n; i++) amax = fmaxf(amax, fabsf(x[i]));
  return amax;
}
// Eight numbers' codes at a scale; what they leave of the numbers goes on top of left, and of error, squared
DEVICE u32 codes_at(const float* x, u32 scale, float g, float& error, float& left) {
  const float step = ue4m3_value(scale) * g, inverse = step > 0.f ? 1.f / step : 0.f, half = 0.5f * step;
  float y[8];
#pragma unroll
  for (int i = 0; i < 8; i++) y[i] = x[i] * inverse;
  const u32 codes = step > 0.f ? pack_e2m1(y) : 0;
#pragma unroll
  for (int i = 0; i < 8; i++) {
    const float rest = fmaf(-half, (float)e2m1_doubled(codes >> 4 * i), x[i]);
    error = fmaf(rest, rest, error);
    left += rest;
  }
  return codes;
}
// Scale of 16 numbers, 8 of this lane and 8 of its neighbour
DEVICE u32 scale_of_two(const float (&x)[8], float g) {
  float amax = largest(x, 8), errors[2] = {0.f, 0.f}, left = 0.f;
  amax = fmaxf(amax, __shfl_xor_sync(~0u, amax, 1));
  const u32 both = microscales(amax, g);
#pragma unroll
  for (int i = 0; i < 2; i++) {
    codes_at(x, both >> 8 * i, g, errors[i], left);
    errors[i] += __shfl_xor_sync(~0u, errors[i], 1);
  }
  return (errors[1] < errors[0] ? both >> 8 : both) & 0xFF;
}
// A lane's words of a row, word i channels 32 i + 8 lane to + 7, and in every lane the row's scale words of two steps.
// Channel after channel, in ascending order; matrix [128][128]: what each one's error adds to those that follow.
DEVICE void quantize_row(const float (&x)[32], float g, const float* matrix, u32 (&words)[4], u32 (&scales)[2]) {
  const int lane = threadIdx.x & 3;
  float fed[32], step = 0.f, inverse = 0.f;
  u32 bytes[4];
#pragma unroll
  for (int i = 0; i < 32; i++) fed[i] = 0.f;
#pragma unroll
  for (int i = 0; i < 4; i++) {
    words[i] = bytes[i] = 0;
#pragma unroll 1
    for (int owner = 0; owner < 4; owner++) {
      if (owner % 2 == 0) {
        float y[8];
#pragma unroll
        for (int w = 0; w < 8; w++) y[w] = x[8 * i + w] + fed[8 * i + w];
        const u32 byte = scale_of_two(y, g);
        if (lane / 2 == owner / 2) {
          bytes[i] = byte;
          step = ue4m3_value(byte) * g;
          inverse = step > 0.f ? 1.f / step : 0.f;
        }
      }
#pragma unroll
      for (int w = 0; w < 8; w++) {
        // every lane goes along with a channel of its own; the owner's counts
        const u32 code = step > 0.f ? e2m1_of((x[8 * i + w] + fed[8 * i + w]) * inverse) : 0;
        const float rest = fmaf(-0.5f * step, (float)e2m1_doubled(code), x[8 * i + w]);
        const float error = __shfl_sync(~0u, rest, owner, 4);
        if (lane == owner) words[i] |= code << 4 * w;
        const float* row = matrix + (32 * i + 8 * owner + w) * HEAD_DIM + 8 * lane;
#pragma unroll
        for (int n = 2 * i; n < 8; n++) {
          const float4 m = *(const float4*)(row + 32 * (n / 2) + 4 * (n % 2));
          fed[4 * n] = fmaf(error, m.x, fed[4 * n]);
          fed[4 * n + 1] = fmaf(error, m.y, fed[4 * n + 1]);
          fed[4 * n + 2] = fmaf(error, m.z, fed[4 * n + 2]);
          fed[4 * n + 3] = fmaf(error, m.w, fed[4 * n + 3]);
        }
      }
    }
  }
#pragma unroll
  for (int step = 0; step < 2; step++) {
    // channels 64 step + 16 c: byte c, of lanes 2 (c % 2) and the next, their word 2 step + c / 2
    const u32 known = (bytes[2 * step] | bytes[2 * step + 1] << 16) << (lane < 2 ? 0 : 8);
    scales[step] = known | __shfl_xor_sync(~0u, known, 2);
  }
}
