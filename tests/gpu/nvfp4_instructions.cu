// For test_cuda_nvfp4.py: the product and the conversions of nvfp4.cuh on their own. A warp a block.
#include "nvfp4.cuh"

template <int SA>
DEVICE void multiply(float* d, const u32 (&a)[4], u32 b0, u32 b1, u32 scale_a, u32 scale_b, int select_b) {
  if (select_b == 0) mma_nvfp4<SA, 0>(d, a, b0, b1, scale_a, scale_b);
  if (select_b == 1) mma_nvfp4<SA, 1>(d, a, b0, b1, scale_a, scale_b);
  if (select_b == 2) mma_nvfp4<SA, 2>(d, a, b0, b1, scale_a, scale_b);
  if (select_b == 3) mma_nvfp4<SA, 3>(d, a, b0, b1, scale_a, scale_b);
}
struct Products {
  const u32 *a, *b, *scale_a, *scale_b;  // [n][32][4], [n][32][2], [n][32], [n][32]
  float* d;                              // [n][32][4], in and out
  int select_a, select_b;
};
static_assert(sizeof(Products) == 48, "test_cuda_nvfp4.py packs it");
extern "C" __global__ void __launch_bounds__(32) products(const __grid_constant__ Products job) {
  const int i = blockIdx.x * 32 + threadIdx.x;
  u32 a[4];
  float d[4];
#pragma unroll
  for (int n = 0; n < 4; n++) a[n] = job.a[4 * i + n], d[n] = job.d[4 * i + n];
  const u32 b0 = job.b[2 * i], b1 = job.b[2 * i + 1];
  if (job.select_a == 0) multiply<0>(d, a, b0, b1, job.scale_a[i], job.scale_b[i], job.select_b);
  else multiply<1>(d, a, b0, b1, job.scale_a[i], job.scale_b[i], job.select_b);
#pragma unroll
  for (int n = 0; n < 4; n++) job.d[4 * i + n] = d[n];
}

struct Numbers {
  const float* x;  // [blocks * 32][8]
  u32 *codes, *scales;  // E2M1 of the eight; E4M3 of the first four, without sign
};
static_assert(sizeof(Numbers) == 24, "test_cuda_nvfp4.py packs it");
extern "C" __global__ void __launch_bounds__(32) conversions(const __grid_constant__ Numbers job) {
  const int i = blockIdx.x * 32 + threadIdx.x;
  float x[8];
#pragma unroll
  for (int n = 0; n < 8; n++) x[n] = job.x[8 * i + n];
  job.codes[i] = pack_e2m1(x);
  job.scales[i] = pack_ue4m3(fabsf(x[0]), fabsf(x[1]), fabsf(x[2]), fabsf(x[3]));
}
