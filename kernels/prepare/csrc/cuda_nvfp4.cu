// prepare() for NVFP4 (NUMERICS.md N1 to N6): q, k and v to the fragments that attend/csrc/cuda_nvfp4_sm120.cu loads.
// Host side: ../cuda_nvfp4.py. Must match ../reference.py.
// Switches: USE_TWIN (nvfp4.cuh), INPUT (Bf16, Fp16 or float), USE_ROPE, USE_WIDE (16-byte rows).
//
// Where things lie: nvfp4.cuh has the fragments, and a word of codes is 8 consecutive channels (of values: keys).
// Key 32 a + 8 b + 2 c + d of a tile is column 2 b + d of octant 4 a + c of the K record; channel 8 j + n of the values
// is column n of octant j of the V record, its contraction runs over the keys in tile order.
// Absent keys of a last tile have code and scale 0; tiles without keys are not written, and nobody reads them.
// Two passes, because the factor g of a head needs its largest magnitude first: pass 0 finds it, pass 1 writes codes.
// Bound by: q and k by the sequence of 128 roundings of a row; v by memory traffic, two reads.
#define USE_TENSOR_ROTATION 0
#include "nvfp4_shaping.cuh"
#include "tiles.cuh"

constexpr int CHUNK = 1024;  // keys whose sums one block takes
constexpr int ROWS = 128;    // rows of a block of queries or keys, four lanes each

struct Job {
  Rows q, k, v;
  Rope rope;
  const int* order;      // [B H][Lk] or null: token order
  const int* key_count;  // [B] or null: all keys
  float* partial;        // [B H][chunks][128]: sums of k
  float* k_mean;         // [B H][128]
  float* amax;           // [3][B H], 0 at first: largest magnitudes of q, k and the residual
  u32* q_codes;          // [B H][blocks * 8][32][8]
  u32* q_scale;          // [B H][blocks * 8][32]
  char* k_record;        // [B H][T][TILE_RECORD]
  char* v_record;        // [B H][T][TILE_RECORD]
  u16* means;            // [B H][T][128]
  float* lse_shift;      // [B H][Lq] or null
  float* q_means;        // [B H][blocks][128] or null: queries as they are
  u32* k_centred;        // [B H][T * 128][64] pairs of bf16 or null, as q_means
  float* moments;        // [2][B H][128][128]: of q and k, their means taken off
  float* balance;        // [2][B H][128]: what the channels of q and k are multiplied with
  float* feedback;       // [2][B H][128][128]: what a channel's error adds to later ones of q and k
  i64 queries, keys;     // Lq, Lk
  int heads, tiles, blocks, chunks;
  u32 signs[4];
  float softmax_scale;
  int rotate, smooth_k, demean;
};
static_assert(sizeof(Job) == 320, "JOB of ../cuda_nvfp4.py packs it");

// Sum of each channel over the rows of the block's quads, in a fixed order, into row[128]. N: warps of the block
template <int N>
DEVICE void sum_rows(float (&x)[32], float (&warps)[N][HEAD_DIM], float (&row)[HEAD_DIM]) {
  const int lane = threadIdx.x & 3, warp = threadIdx.x / 32;
#pragma unroll
  for (int step = 4; step < 32; step *= 2)
#pragma unroll
    for (int i = 0; i < 32; i++) x[i] += __shfl_xor_sync(~0u, x[i], step);
  if ((threadIdx.x & 31) < 4)
#pragma unroll
    for (int i = 0; i < 32; i++) warps[warp][32 * (i / 8) + 8 * lane + i % 8] = x[i];
  __syncthreads();
  if (threadIdx.x < HEAD_DIM) {
    float t = 0.f;
    for (int w = 0; w < N; w++) t += warps[w][threadIdx.x];
    row[threadIdx.x] = t;
  }
  __syncthreads();
}

// blockIdx: chunk of keys, B H; 256 threads
extern "C" __global__ void __launch_bounds__(256) sum_k(const __grid_constant__ Job job) {
  __shared__ float warps[8][HEAD_DIM], row[HEAD_DIM];
  const int bh = blockIdx.y, batch = bh / job.heads, head = bh % job.heads, lane = threadIdx.x & 3;
  const i64 first = (i64)blockIdx.x * CHUNK, last = min(first + CHUNK, (i64)count_of(job, batch));
  float total[32], x[32];
#pragma unroll
  for (int i = 0; i < 32; i++) total[i] = 0.f;
  for (i64 r = first + threadIdx.x / 4; r < last; r += 64) {
    // without a key list the order does not matter, and rows in place read faster
    const i64 token = job.key_count ? token_at(job, bh, r) : r;
    load_row(row_of<INPUT>(job.k, batch, head, token), lane, x);
    apply_rope(job.rope, batch, token, lane, x);
#pragma unroll
    for (int i = 0; i < 32; i++) total[i] += x[i];
  }
  sum_rows<8>(total, warps, row);
  float* partial = job.partial + ((i64)bh * job.chunks + blockIdx.x) * HEAD_DIM;
  if (threadIdx.x < HEAD_DIM) partial[threadIdx.x] = row[threadIdx.x];
}
// blockIdx: B H; 128 threads
extern "C" __global__ void __launch_bounds__(128) mean_k(const __grid_constant__ Job job) {
  const float* sums = job.partial + (i64)blockIdx.x * job.chunks * HEAD_DIM + threadIdx.x;
  float sum = 0.f;
  for (int c = 0; c < job.chunks; c++) sum += sums[(i64)c * HEAD_DIM];
  job.k_mean[blockIdx.x * HEAD_DIM + threadIdx.x] = sum / (float)max(count_of(job, blockIdx.x / job.heads), 1);
}
// Means of 128 query rows. blockIdx: block, B H; 512 threads
extern "C" __global__ void __launch_bounds__(512) mean_q(const __grid_constant__ Job job) {
  __shared__ float warps[16][HEAD_DIM], row[HEAD_DIM];
  const int bh = blockIdx.y, batch = bh / job.heads, head = bh % job.heads, lane = threadIdx.x & 3;
  const i64 first = (i64)blockIdx.x * ROWS, r = first + threadIdx.x / 4;
  float x[32];
  load_row(row_of<INPUT>(job.q, batch, head, min(r, job.queries - 1)), lane, x);
  apply_rope(job.rope, batch, min(r, job.queries - 1), lane, x);
#pragma unroll
  for (int i = 0; i < 32; i++) x[i] = r < job.queries ? x[i] : 0.f;
  sum_rows<16>(x, warps, row);
  const float count = (float)min((i64)ROWS, job.queries - first);
  float* means = job.q_means + ((i64)bh * job.blocks + blockIdx.x) * HEAD_DIM;
  if (threadIdx.x < HEAD_DIM) means[threadIdx.x] = row[threadIdx.x] / count;
}

// Second moments of a sample of the rows of q (which 0) or k (1). blockIdx: 32 rows of them, B H; 256 threads
extern "C" __global__ void __launch_bounds__(256, 1) moments(const __grid_constant__ Job job, int which) {
  __shared__ __align__(16) float chunk[CHUNK_ROWS][HEAD_DIM];
  const int bh = blockIdx.y, batch = bh / job.heads, head = bh % job.heads;
  const int count = which ? count_of(job, batch) : (int)job.queries, rows = min(count, SAMPLE);
  const auto load = [&](int sample, int lane, float(&x)[32]) {
    // as for the mean: rows in place without a key list
    const i64 row = (i64)sample * count / rows, token = which && job.key_count ? token_at(job, bh, row) : row;
    load_row(row_of<INPUT>(which ? job.k : job.q, batch, head, token), lane, x);
    apply_rope(job.rope, batch, token, lane, x);
    if (which && job.smooth_k) subtract(x, job.k_mean + bh * HEAD_DIM, lane);
    if (!which && job.q_means) subtract(x, job.q_means + ((i64)bh * job.blocks + row / ROWS) * HEAD_DIM, lane);
  };
  float* out = job.moments + ((i64)which * gridDim.y + bh) * SQUARE;
  second_moments(load, rows, blockIdx.x * MOMENT_ROWS, chunk, out);
}
// Balance and feedback of a head. blockIdx: B H, 0 for q or 1 for k; 512 threads
extern "C" __global__ void __launch_bounds__(512) shape(const __grid_constant__ Job job) {
  extern __shared__ __align__(16) float h[];  // [128] rows of PITCH
  __shared__ float factors[HEAD_DIM], damping;
  const int which = blockIdx.y, bh = blockIdx.x, t = threadIdx.x;
  const i64 own = (i64)which * gridDim.x + bh;
  const float* of_q = job.moments + (i64)bh * SQUARE;
  const float* of_k = of_q + (i64)gridDim.x * SQUARE;
  balance_channels(of_q, of_k, factors);
  if (t < HEAD_DIM) job.balance[own * HEAD_DIM + t] = which ? 1.f / factors[t] : factors[t];
  const auto sign = [&](int c) { return job.signs[c / 32] >> c % 32 & (u32)job.rotate; };
  for (int n = t; n < SQUARE; n += 512) {
    // of the other operand, as it is multiplied with this one's errors
    const int i = n / HEAD_DIM, j = n % HEAD_DIM;
    const float pair = factors[i] * factors[j], x = which ? of_q[n] * pair : of_k[n] / pair;
    h[i * PITCH + j] = sign(i) ^ sign(j) ? -x : x;
  }
  __syncthreads();
  if (job.rotate) {
    // 128 times what the rotation makes of it: M depends on no factor
    transform(h, false, 512);
    transform(h, true, 512);
  }
  if (t == 0) {
    float sum = 0.f;
    for (int i = 0; i < HEAD_DIM; i++) sum += h[i * (PITCH + 1)];
    damping = sum > 0.f ? sum / HEAD_DIM * DAMPING : 1.f;
  }
  __syncthreads();
  if (t < HEAD_DIM) h[t * (PITCH + 1)] += damping;
  __syncthreads();
  factorize(h, 512);
  for (int n = t; n < SQUARE; n += 512) {
    const int i = n / HEAD_DIM, j = n % HEAD_DIM;
    const float d = h[j * (PITCH + 1)];
    job.feedback[own * SQUARE + n] = i < j && d > 0.f ? h[i * PITCH + j] / d : 0.f;
  }
}

// The largest of the threads' 32 numbers each into *amax, which is >= 0, so that bits order as numbers: a NaN is more
// than all others
DEVICE void raise_amax(const float (&x)[32], float* amax) {
  float most = 0.f;
#pragma unroll
  for (int i = 0; i < 32; i++) most = max_nan(most, fabsf(x[i]));
#pragma unroll
  for (int step = 1; step < 32; step *= 2) most = max_nan(most, __shfl_xor_sync(~0u, most, step));
  if ((threadIdx.x & 31) == 0) atomicMax((int*)amax, __float_as_int(most));
}

// The feedback of an operand's head into the block's memory, complete after __syncthreads. 512 threads
DEVICE const float* load_feedback(const float* from) {
  extern __shared__ __align__(16) float feedback[];
#pragma unroll
  for (int i = 0; i < SQUARE / 4 / 512; i++)
    ((float4*)feedback)[512 * i + threadIdx.x] = __ldg((const float4*)from + 512 * i + threadIdx.x);
  return feedback;
}

// blockIdx: 128 query rows, B H; 512 threads. Rows past the end repeat the last one in no maximum, and have codes 0.
extern "C" __global__ void __launch_bounds__(512) codes_q(const __grid_constant__ Job job, int pass) {
  const int bh = blockIdx.y, batch = bh / job.heads, head = bh % job.heads, lane = threadIdx.x & 3;
  const i64 row = (i64)blockIdx.x * ROWS + threadIdx.x / 4, token = min(row, job.queries - 1);
  const bool real = row < job.queries;
  float x[32];
  load_row(row_of<INPUT>(job.q, batch, head, token), lane, x);
  apply_rope(job.rope, batch, token, lane, x);
  if (pass == 1 && job.lse_shift) {
    const float dot = job.smooth_k ? quad_dot(x, job.k_mean + bh * HEAD_DIM, lane) : 0.f;
    if (real && lane == 0) job.lse_shift[bh * job.queries + row] = dot * job.softmax_scale;
  }
  if (job.q_means) subtract(x, job.q_means + ((i64)bh * job.blocks + blockIdx.x) * HEAD_DIM, lane);
  scale_channels(x, job.balance + (i64)bh * HEAD_DIM, lane);
  if (job.rotate) rotate(job.signs, lane, x);
  const float norm = real ? (job.rotate ? ROTATION_NORM : 1.f) : 0.f;
#pragma unroll
  for (int i = 0; i < 32; i++) x[i] *= norm;
  float* amax = job.amax + bh;
  if (pass == 0) return raise_amax(x, amax);
  const float* feedback = load_feedback(job.feedback + (i64)bh * SQUARE);
  __syncthreads();
  u32 words[4], scales[2];
  quantize_row(x, global_scale(*amax), feedback, words, scales);
  const int r = threadIdx.x / 4 % 16, g = r % 8, half = r / 8;
  const i64 rows16 = ((i64)bh * job.blocks + blockIdx.x) * 8 + threadIdx.x / 64;
#pragma unroll
  for (int i = 0; i < 4; i++) job.q_codes[(rows16 * 32 + 4 * g + lane) * 8 + i / 2 * 4 + i % 2 * 2 + half] = words[i];
  if (lane < 2) job.q_scale[rows16 * 32 + 4 * g + 2 * lane + half] = lane ? scales[1] : scales[0];
}

// blockIdx: tile, B H; 512 threads
extern "C" __global__ void __launch_bounds__(512) codes_k(const __grid_constant__ Job job, int pass) {
  const int bh = blockIdx.y, batch = bh / job.heads, head = bh % job.heads, lane = threadIdx.x & 3;
  const int key = threadIdx.x / 4;
  const i64 first = (i64)blockIdx.x * TILE;
  const int count = min((i64)TILE, count_of(job, batch) - first);
  if (count <= 0) return;
  const i64 token = token_at(job, bh, first + min(key, count - 1));
  float x[32];
  load_row(row_of<INPUT>(job.k, batch, head, token), lane, x);
  apply_rope(job.rope, batch, token, lane, x);
  if (job.smooth_k) subtract(x, job.k_mean + bh * HEAD_DIM, lane);
#pragma unroll
  for (int i = 0; i < 32; i++) x[i] = key < count ? x[i] : 0.f;
  if (pass == 1 && job.k_centred) {
    uint4* centred = (uint4*)(job.k_centred + (((i64)bh * job.tiles + blockIdx.x) * TILE + key) * 64);
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const float* y = x + 8 * i;
      const u32 low = pack_bf16(y[0], y[1]), high = pack_bf16(y[4], y[5]);
      centred[4 * i + lane] = make_uint4(low, pack_bf16(y[2], y[3]), high, pack_bf16(y[6], y[7]));
    }
  }
  scale_channels(x, job.balance + ((i64)gridDim.y + bh) * HEAD_DIM, lane);
  if (job.rotate) {
    rotate(job.signs, lane, x);
#pragma unroll
    for (int i = 0; i < 32; i++) x[i] *= ROTATION_NORM;
  }
  float* amax = job.amax + gridDim.y + bh;
  if (pass == 0) return raise_amax(x, amax);
  const float* feedback = load_feedback(job.feedback + ((i64)gridDim.y + bh) * SQUARE);
  __syncthreads();
  u32 words[4], scales[2];
  quantize_row(x, global_scale(*amax), feedback, words, scales);
  char* record = job.k_record + ((i64)bh * job.tiles + blockIdx.x) * TILE_RECORD;
  const int octant = key / 32 * 4 + key % 8 / 2, column = key / 8 % 4 * 2 + key % 2;
  ((uint4*)record)[octant * 32 + 4 * column + lane] = make_uint4(words[0], words[1], words[2], words[3]);
  uint2* packed = (uint2*)(record + TILE_CODES) + (4 * column + octant % 4) * 4 + octant / 4;
  if (lane == 0) *packed = make_uint2(scales[0], scales[1]);
}

constexpr bool MEAN_F16 = is_fp16<INPUT>::value;
// A channel's residuals of 32 keys, x minus the stored mean; absent keys 0
DEVICE void residuals(float (&x)[32], float mean, int keys) {
#pragma unroll
  for (int k = 0; k < 32; k++) x[k] = k < keys ? x[k] - mean : 0.f;
}
// 32 keys from 32 a of a channel into the record. Returns what their codes leave, summed
DEVICE float store_channel(char* record, int channel, int a, const float (&x)[32], float g) {
  const int octant = channel / 8, column = channel % 8;
  u32 bytes = 0;
  float sum = 0.f;
#pragma unroll
  for (int half = 0; half < 2; half++) {
    const u32 both = microscales(largest(x + 16 * half, 16), g);
    float errors[2] = {0.f, 0.f}, left[2] = {0.f, 0.f};
    u32 codes[2][2];
#pragma unroll
    for (int which = 0; which < 2; which++)
#pragma unroll
      for (int t = 0; t < 2; t++)
        codes[which][t] = codes_at(x + 16 * half + 8 * t, both >> 8 * which, g, errors[which], left[which]);
    const bool better = errors[1] < errors[0];
    bytes |= ((better ? both >> 8 : both) & 0xFF) << 8 * half;
    sum += better ? left[1] : left[0];
#pragma unroll
    for (int t = 0; t < 2; t++)
      ((u32*)record)[(octant * 32 + 4 * column + 2 * half + t) * 4 + a] = better ? codes[1][t] : codes[0][t];
  }
  u16* packed = (u16*)(record + TILE_CODES + (4 * column + octant % 4) * 32 + octant / 4 * 8);
  packed[a] = bytes;
  return sum;
}
DEVICE u32 pack_means(float x, float y) { return MEAN_F16 ? pack_f16(x, y) : pack_bf16(x, y); }

// blockIdx: tile, B H; 256 threads. A thread holds channels c and c + 1 of keys 32 a to 32 a + 31.
extern "C" __global__ void __launch_bounds__(256) codes_v(const __grid_constant__ Job job, int pass) {
  extern __shared__ __align__(16) char memory[];
  Pair<INPUT>* pairs = (Pair<INPUT>*)memory;
  const int bh = blockIdx.y, batch = bh / job.heads, head = bh % job.heads;
  const int a = threadIdx.x & 3, pair = threadIdx.x / 4, c = 2 * pair;
  const i64 first = (i64)blockIdx.x * TILE, index = (i64)bh * job.tiles + blockIdx.x;
  const int count = min((i64)TILE, count_of(job, batch) - first);
  if (count <= 0) return;
#pragma unroll 4
  for (int n = 0; n < 8; n++) {
    const int key = 16 * n + threadIdx.x / 16;
    const i64 token = token_at(job, bh, first + min(key, count - 1));
    Eight<INPUT> loaded = load_eight(row_of<INPUT>(job.v, batch, head, token) + threadIdx.x % 16 * 8);
    put_row(pairs, key, count, loaded);
  }
  __syncthreads();
  float x[32], y[32], sum_x, sum_y;
  take_channels(pairs, x, y, sum_x, sum_y);
  float mx = 0.f, my = 0.f;
  if (job.demean) {
    const u32 rounded = pack_means(quad_total(sum_x) / (float)count, quad_total(sum_y) / (float)count);
    mx = MEAN_F16 ? low_f16(rounded) : __uint_as_float(rounded << 16);
    my = MEAN_F16 ? low_f16(rounded >> 16) : __uint_as_float(rounded & 0xFFFF0000u);
    residuals(x, mx, count - 32 * a);
    residuals(y, my, count - 32 * a);
  }
  float* amax = job.amax + 2 * gridDim.y + bh;
  if (pass == 0) {
    raise_amax(x, amax);
    return raise_amax(y, amax);
  }
  __syncthreads();
  const float g = global_scale(*amax);
  const float left_x = quad_total(store_channel(memory, c, a, x, g));
  const float left_y = quad_total(store_channel(memory, c + 1, a, y, g));
  // the mean that is added back makes up for the mean of what the codes leave
  if (job.demean && a == 0)
    ((u32*)job.means)[index * 64 + pair] = pack_means(mx + left_x / (float)count, my + left_y / (float)count);
  __syncthreads();
  write_record<TILE_RECORD>(job.v_record + index * TILE_RECORD, memory);
}
