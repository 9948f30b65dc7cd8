// prepare() for sm_80 and newer: q, k and v to the shared-memory images that attend/csrc/frame.cuh (with bulk copies)
// and mma_frame.cuh load. Host side: ../cuda_sm90.py, ../cuda_mma.py. Must match ../reference.py.
//
// Where a key sits: key 32 a + 4 i + b of a tile (scale group a) is row 16 i + 8 (b / 2) + 2 a + b % 2 of the K
// image, so that the accumulator columns of one lane are one scale group; and byte 16 i + 4 a + b of a channel's row
// in the V image, so that the lane's packed probabilities are the A fragment of the second product as they are.
// With INT8 values the keys of a tile are first put in the order of falling size, and 16 neighbours share a scale (C3):
// keys of like size lose less to it. V follows, and a tile's mean does not care.
// Absent keys of a last tile: the K image repeats the last real key (their scores change no maximum), the V image has
// zero codes and zero ones (they add nothing).
// Bound by: memory traffic; one read and one write per operand, and one more read of k and v for their statistics.
#include "tiles.cuh"

constexpr int SCALES = USE_INT8_VALUES ? 8 : 4;  // of a K tile
constexpr int KEY_RECORD = 16384 + 4 * SCALES;
constexpr int MEAN_RECORD = 4096;
constexpr int CHUNK = 1024;                // keys whose statistics one block takes
constexpr int AT_ONCE = USE_ROPE ? 1 : 2;  // of them, by a quad; angles take the registers of a second

struct Job {
  Rows q, k, v;
  Rope rope;
  const int* order;      // [B H][Lk] or null: token order
  int* by_size;          // [B H][Lk]: order, the keys of each tile by falling size; INT8 values only
  const int* key_count;  // [B] or null: all keys
  float* partial;        // [2][B H][chunks][128]: k sums, |v| maxima
  float* k_mean;         // [B H][128]
  int* k_top;            // [B H] bits of the largest K scale of keys that are not 0 (or of a NaN, C7); 0 before
  float* v_scale;        // [B H][128]
  char* q_image;         // [B H][blocks * 3][8192]
  float* q_scale;        // [B H][blocks * 192]
  char* k_image;         // [B H][T][KEY_RECORD]
  char* v_image;         // [B H][T][v_record]
  char* means;           // [B H][ceil(T / 16)][MEAN_RECORD]
  float* lse_shift;      // [B H][Lq] or null
  i64 queries, keys;     // Lq, Lk
  int heads, tiles, blocks, chunks;
  u32 signs[4];
  float softmax_scale;
  float largest;    // what the scales of a query and a key may multiply to
  float value_top;  // code of the largest |v|; fp8 values only
  int rotate, smooth_k, demean;
};
static_assert(sizeof(Job) == 304, "JOB of ../cuda_sm90.py packs it");

// What a block takes: which part of which head, blockIdx.x and .y; with angles heads go fastest, since blocks that run
// together then read the same ones.
struct Place {
  int part, bh;
};
DEVICE Place place() {
  if (!USE_ROPE) return {(int)blockIdx.x, (int)blockIdx.y};
  const u32 at = blockIdx.y * gridDim.x + blockIdx.x;
  return {(int)(at / gridDim.y), (int)(at % gridDim.y)};
}

// Row of the K image of key 32 a + 4 i + b of a tile
DEVICE int image_row(int key) { return key % 32 / 4 * 16 + key % 4 / 2 * 8 + key / 32 * 2 + key % 2; }

// amax over the code that it gets, 1 for zeros, NaN for what is not finite (C7)
DEVICE float scale_of(float amax, float top) { return amax == 0.f ? 1.f : fmaf(0.f, amax, amax / top); }
template <bool INT8>
DEVICE float scale_of(float amax) { return scale_of(amax, INT8 ? 127.f : 448.f); }
// A scale of rotated rows, whose rotation left out its norm; 1 for a group of zeros
DEVICE float stored_scale(const Job& job, float amax, float scale) {
  return job.rotate && amax > 0.f ? scale * ROTATION_NORM : scale;
}

// Statistics of a chunk of keys. place: chunk, B H; blockIdx.z: what (0: sums of k, 1: maxima of |v|; a NaN stays in
// its code)
template <typename T>
DEVICE void chunk_statistics(const Job& job, bool of_v) {
  __shared__ float shared[8][HEAD_DIM];
  const auto [chunk, bh] = place();
  const int batch = bh / job.heads, head = bh % job.heads, lane = threadIdx.x & 3, warp = threadIdx.x / 32;
  const Rows& rows = of_v ? job.v : job.k;
  const i64 first = (i64)chunk * CHUNK;
  const i64 last = min(first + CHUNK, (i64)count_of(job, batch));
  float total[32], x[32];
#pragma unroll
  for (int i = 0; i < 32; i++) total[i] = 0.f;
#pragma unroll AT_ONCE
  for (i64 r = first + threadIdx.x / 4; r < last; r += 64) {
    // without a key list the order does not matter, and rows in place read faster
    const i64 token = job.key_count ? token_at(job, bh, r) : r;
    load_row(row_of<T>(rows, batch, head, token), lane, x);
    if (!of_v) apply_rope(job.rope, batch, token, lane, x);
#pragma unroll
    for (int i = 0; i < 32; i++) total[i] = of_v ? fmaxf(total[i], fabsf(x[i])) : total[i] + x[i];
  }
#pragma unroll
  for (int step = 4; step < 32; step *= 2)
#pragma unroll
    for (int i = 0; i < 32; i++) {
      const float other = __shfl_xor_sync(~0u, total[i], step);
      total[i] = of_v ? fmaxf(total[i], other) : total[i] + other;
    }
  if ((threadIdx.x & 31) < 4)
#pragma unroll
    for (int i = 0; i < 32; i++) shared[warp][32 * (i / 8) + 8 * lane + i % 8] = total[i];
  __syncthreads();
  if (threadIdx.x < HEAD_DIM) {
    float t = shared[0][threadIdx.x];
    for (int w = 1; w < 8; w++) t = of_v ? fmaxf(t, shared[w][threadIdx.x]) : t + shared[w][threadIdx.x];
    float* partial = job.partial + (of_v ? (i64)gridDim.y * job.chunks * HEAD_DIM : 0);
    partial[((i64)bh * job.chunks + chunk) * HEAD_DIM + threadIdx.x] = t;
  }
}

// Mean of k and scale of v (F1) from the chunks, in a fixed order; the mean rotated where keys are rotated before it
// is taken off. blockIdx: B H; 128 threads
extern "C" __global__ void finish_statistics(const __grid_constant__ Job job) {
  const int bh = blockIdx.x, channel = threadIdx.x;
  const float *sums = job.partial + (i64)bh * job.chunks * HEAD_DIM + channel,
              *maxima = sums + (i64)gridDim.x * job.chunks * HEAD_DIM;
  const int count = count_of(job, bh / job.heads);
  float sum = 0.f, top = 0.f;
#pragma unroll 8
  for (int c = 0; c < job.chunks; c++) {
    if (job.smooth_k) sum += sums[(i64)c * HEAD_DIM];
    if (job.v_scale) top = fmaxf(top, maxima[(i64)c * HEAD_DIM]);
  }
  float mean = sum / (float)max(count, 1);
#if USE_TENSOR_ROTATION
  __shared__ float row[HEAD_DIM];
  if (job.signs[channel / 32] >> channel % 32 & 1) mean = -mean;
  for (int step = 1; step < HEAD_DIM; step *= 2) {
    row[channel] = mean;
    __syncthreads();
    mean = (channel & step) ? row[channel ^ step] - mean : mean + row[channel ^ step];
    __syncthreads();
  }
#endif
  if (job.smooth_k) job.k_mean[bh * HEAD_DIM + channel] = mean;
  if (job.v_scale) job.v_scale[bh * HEAD_DIM + channel] = scale_of(top, job.value_top);
}

// Rows g and g + 8 of a warp's 16: q's or k's tokens, k centred, rotated as the call says.
// dot: of each row and the mean of k, for lse (C6).
template <typename T>
DEVICE void load_two(const Job& job, const Rows& rows, int bh, const i64 (&token)[2], bool of_k, float (&x)[2][32],
                     float (&dot)[2]) {
  const int lane = threadIdx.x & 3, batch = bh / job.heads, head = bh % job.heads;
  const float* mean = job.k_mean + bh * HEAD_DIM;
#if USE_TENSOR_ROTATION
  u32 words[2][16];
#pragma unroll
  for (int i = 0; i < 8; i++) {
    const Eight<T> e = load_eight(row_of<T>(rows, batch, head, token[i / 4]) + 32 * (i % 4) + 8 * lane);
#pragma unroll
    for (int j = 0; j < 4; j++) words[i / 4][4 * (i % 4) + j] = e.words[j];
  }
  rotate_two<is_fp16<T>::value>(job.signs, threadIdx.x & 31, words, x);
#else
#pragma unroll
  for (int r = 0; r < 2; r++) load_row(row_of<T>(rows, batch, head, token[r]), lane, x[r]);
#pragma unroll
  for (int r = 0; r < 2; r++) apply_rope(job.rope, batch, token[r], lane, x[r]);
#endif
#pragma unroll
  for (int r = 0; r < 2; r++) {
    // two rotated rows have 128 times the dot product, for their norm is left out
    constexpr float UNIT = USE_TENSOR_ROTATION ? 1.f / 128.f : 1.f;
    if (!of_k && job.lse_shift) dot[r] = job.smooth_k ? quad_dot(x[r], mean, lane) * UNIT : 0.f;
    if (of_k && job.smooth_k) subtract(x[r], mean, lane);
    if (!USE_TENSOR_ROTATION && job.rotate) rotate(job.signs, lane, x[r]);
  }
}

// place: 64-row block of a head, B H; 128 threads
template <typename T, bool INT8>
DEVICE void quantize_q(const Job& job) {
  const auto [part, bh] = place();
  const int lane = threadIdx.x & 3;
  const i64 block = (i64)bh * gridDim.x + part;
  i64 row[2], token[2];
  float x[2][32], dot[2];
#pragma unroll
  for (int i = 0; i < 2; i++) {
    row[i] = (i64)part * 64 + threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4 + 8 * i;
    token[i] = min(row[i], job.queries - 1);
  }
  load_two<T>(job, job.q, bh, token, false, x, dot);
#pragma unroll
  for (int i = 0; i < 2; i++) {
    const bool real = row[i] < job.queries;
    const float amax = quad_amax(x[i]), scale = scale_of<INT8>(amax);
    store_codes<INT8>(job.q_image + block * 8192, row[i] % 64, lane, x[i], real ? 1.f / scale : 0.f);
    // past job.largest the multiply-add that makes a code could round past its range; such rows see one key anyway
    const float most = job.largest / __int_as_float(__ldg(job.k_top + bh));
    if (lane == 0) job.q_scale[block * 64 + row[i] % 64] = real ? min_nan(stored_scale(job, amax, scale), most) : 0.f;
    if (lane == 0 && real && job.lse_shift) job.lse_shift[bh * job.queries + row[i]] = dot[i] * job.softmax_scale;
  }
}

// place: group of 32 keys, B H; 64 threads
template <typename T, bool INT8>
DEVICE void quantize_k(const Job& job) {
  __shared__ float maxima[2];
  const auto [part, bh] = place();
  const int lane = threadIdx.x & 3, group = part % 4;
  const i64 tile = part / 4, first = tile * TILE;
  const int count = min((i64)TILE, count_of(job, bh / job.heads) - first);
  if (count <= 0) return;
  const int last = count - 1, source = min(group, last / 32), key = threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4;
  float x[2][32], dot[2];
  i64 token[2];
  for (int i = 0; i < 2; i++) token[i] = token_at(job, bh, first + min(32 * source + key + 8 * i, last));
  load_two<T>(job, job.k, bh, token, true, x, dot);
  float amax = max_nan(quad_amax(x[0]), quad_amax(x[1]));
#pragma unroll
  for (int step = 4; step < 32; step *= 2) amax = max_nan(amax, __shfl_xor_sync(~0u, amax, step));
  if ((threadIdx.x & 31) == 0) maxima[threadIdx.x / 32] = amax;
  __syncthreads();
  const float top = max_nan(maxima[0], maxima[1]), scale = scale_of<INT8>(top);
  if (group != source) {
    // a group without keys repeats the last key, codes and scale: its scores are then that key's, bit for bit
    token[0] = token[1] = token_at(job, bh, first + last);
    load_two<T>(job, job.k, bh, token, true, x, dot);
  }
  char* record = job.k_image + ((i64)bh * job.tiles + tile) * KEY_RECORD;
#pragma unroll
  for (int r = 0; r < 2; r++) store_codes<INT8>(record, image_row(32 * group + key + 8 * r), lane, x[r], 1.f / scale);
  if (threadIdx.x == 0) {
    const float stored = stored_scale(job, top, scale);
    ((float*)(record + 16384))[group] = stored;
    if (top != 0.f) atomicMax(job.k_top + bh, __float_as_int(stored));
  }
}

// The same with the keys of the tile by falling size, 16 to a scale. place: tile, B H; 256 threads
template <typename T, bool INT8>
DEVICE void quantize_k_by_size(const Job& job) {
  __shared__ int size[TILE], ranked[TILE];  // bits of numbers >= 0, which order alike, NaN above all
  const auto [tile, bh] = place();
  const int lane = threadIdx.x & 3, key = threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4;
  const i64 first = (i64)tile * TILE;
  const int count = min((i64)TILE, count_of(job, bh / job.heads) - first), last = count - 1;
  if (count <= 0) return;
  float x[2][32], dot[2];
  i64 token[2];
  int rank[2] = {0, 0};
#pragma unroll
  for (int r = 0; r < 2; r++) token[r] = token_at(job, bh, first + min(key + 8 * r, last));
  load_two<T>(job, job.k, bh, token, true, x, dot);
#pragma unroll
  for (int r = 0; r < 2; r++) {
    const float top = quad_amax(x[r]);
    if (lane == 0) size[key + 8 * r] = key + 8 * r < count ? __float_as_int(top) : -1;
  }
  __syncthreads();
#pragma unroll
  for (int r = 0; r < 2; r++) {
    const int mine = size[key + 8 * r];
#pragma unroll 8
    for (int other = lane; other < TILE; other += 4)
      rank[r] += size[other] > mine || (size[other] == mine && other < key + 8 * r);
    rank[r] += __shfl_xor_sync(~0u, rank[r], 1);
    rank[r] += __shfl_xor_sync(~0u, rank[r], 2);
    if (lane == 0) ranked[rank[r]] = mine;
  }
  __syncthreads();
  char* record = job.k_image + ((i64)bh * job.tiles + tile) * KEY_RECORD;
#pragma unroll
  for (int r = 0; r < 2; r++) {
    if (rank[r] > last) continue;
    const float inverse = 1.f / scale_of<INT8>(__int_as_float(ranked[rank[r] / 16 * 16]));
    if (lane == 0) job.by_size[bh * job.keys + first + rank[r]] = (int)token[r];
    // absent keys repeat the last one
    const int end = rank[r] == last ? TILE : rank[r] + 1;
    for (int at = rank[r]; at < end; at++) store_codes<INT8>(record, image_row(at), lane, x[r], inverse);
  }
  if (threadIdx.x < SCALES) {
    const float top = __int_as_float(ranked[min((int)threadIdx.x, last / 16) * 16]);
    const float stored = stored_scale(job, top, scale_of<INT8>(top));
    ((float*)(record + 16384))[threadIdx.x] = stored;
    if (threadIdx.x == 0 && top != 0.f) atomicMax(job.k_top + bh, __float_as_int(stored));
  }
}

// The lowest bytes of a word, as many as there are keys
DEVICE u32 real_bytes(int keys) { return keys >= 4 ? ~0u : (1u << 8 * max(keys, 0)) - 1; }
// Codes of a channel's 32 steps of one lane into its row of the image; word i of it is 4 keys from 32 a + 4 i.
template <bool INT8>
DEVICE void store_channel(char* image, int channel, int a, int count, const float (&steps)[32]) {
#pragma unroll
  for (int i = 0; i < 8; i++) {
    const float* y = steps + 4 * i;
    u32 codes = pack_codes<INT8>(y[0], y[1], y[2], y[3]);
    if (count < TILE) codes &= real_bytes(count - 32 * a - 4 * i);
    *(u32*)(image + channel * 128 + ((i ^ (channel & 7)) * 16) + a * 4) = codes;
  }
}
DEVICE float round_f16(float x) {
  float y;
  asm("{.reg .b16 h; cvt.rn.f16.f32 h,%1; cvt.f32.f16 %0,h;}" : "=f"(y) : "f"(x));
  return y;
}
DEVICE float round_bf16(float x) { return __uint_as_float(pack_bf16(0.f, x) & 0xFFFF0000u); }

// blockIdx: tile (padded to 16), B H; 256 threads. A thread holds channels c and c + 1 of keys 32 a to 32 a + 31.
// F16: means in fp16, else bf16 (int8 only)
template <typename T, bool INT8, bool F16>
DEVICE void quantize_v(const Job& job) {
  extern __shared__ char memory[];
  Pair<T>* pairs = (Pair<T>*)memory;
  const int bh = blockIdx.y, batch = bh / job.heads, head = bh % job.heads;
  const int a = threadIdx.x & 3, pair = threadIdx.x / 4, c = 2 * pair;
  const i64 first = (i64)blockIdx.x * TILE, index = (i64)bh * job.tiles + blockIdx.x;
  const int count = max((i64)0, min((i64)TILE, count_of(job, batch) - first));
  // means of tile j: row j % 16 of a 128-byte-swizzled [16][128] 16-bit image, halves of 64 channels
  const int slot = blockIdx.x % 16, half = c / 64, chunk = (c % 64) / 8 ^ (slot & 7);
  u32* mean_at = (u32*)(job.means + ((i64)bh * (gridDim.x / 16) + blockIdx.x / 16) * MEAN_RECORD + half * 2048 +
                        slot / 8 * 1024 + slot % 8 * 128 + chunk * 16 + (c % 8) * 2);
  if (count == 0) {
    if (job.demean && a == 0) *mean_at = 0;
    return;
  }
  Eight<T> loaded[8];
#pragma unroll
  for (int n = 0; n < 8; n++) {
    const int key = 16 * n + threadIdx.x / 16;
    const i64 at = first + min(key, count - 1);
    const i64 token = INT8 ? __ldg(job.by_size + bh * job.keys + at) : token_at(job, bh, at);
    loaded[n] = load_eight(row_of<T>(job.v, batch, head, token) + threadIdx.x % 16 * 8);
  }
#pragma unroll
  for (int n = 0; n < 8; n++) put_row(pairs, 16 * n + threadIdx.x / 16, count, loaded[n]);
  __syncthreads();
  float x[32], y[32], sum_x, sum_y;
  take_channels(pairs, x, y, sum_x, sum_y);
  float sx = 1.f, sy = 1.f, mx = 0.f, my = 0.f;
  if (!INT8) sx = __ldg(job.v_scale + bh * HEAD_DIM + c), sy = __ldg(job.v_scale + bh * HEAD_DIM + c + 1);
  if (job.demean) {
    mx = quad_total(sum_x) / (float)count / sx;
    my = quad_total(sum_y) / (float)count / sy;
    if (a == 0) *mean_at = F16 ? pack_f16(mx, my) : pack_bf16(mx, my);
    mx = (F16 ? round_f16(mx) : round_bf16(mx)) * sx;
    my = (F16 ? round_f16(my) : round_bf16(my)) * sy;
  }
  float top_x = 0.f, top_y = 0.f;
#pragma unroll
  for (int k = 0; k < 32; k++) {
    x[k] -= mx;
    y[k] -= my;
    const bool real = count == TILE || 32 * a + k < count;
    if (INT8 && real) top_x = max_nan(top_x, fabsf(x[k])), top_y = max_nan(top_y, fabsf(y[k]));
  }
  __syncthreads();
  char* image = memory;
  if (INT8) {
    for (int step = 1; step < 4; step *= 2) {
      top_x = max_nan(top_x, __shfl_xor_sync(~0u, top_x, step));
      top_y = max_nan(top_y, __shfl_xor_sync(~0u, top_y, step));
    }
    // 0 for a channel of zeros: the rounding of its sums' conversion in attend() then reaches no output
    sx = top_x / 127.f, sy = top_y / 127.f;
    if (a == 0) ((float2*)(image + 16384))[pair] = make_float2(sx, sy);
  } else if (threadIdx.x < 64) {
    // eight equal rows of ones, zero at absent keys: they sum the probabilities
    const int r = threadIdx.x / 8, i = threadIdx.x % 8;
    u32 ones[4];
#pragma unroll
    for (int g = 0; g < 4; g++) ones[g] = 0x38383838u & real_bytes(count - 32 * g - 4 * i);
    *(uint4*)(image + 16384 + r * 128 + (i ^ r) * 16) = make_uint4(ones[0], ones[1], ones[2], ones[3]);
  }
  to_steps<INT8>(x, sx, count, 32 * a);
  to_steps<INT8>(y, sy, count, 32 * a);
  store_channel<INT8>(image, c, a, count, x);
  store_channel<INT8>(image, c + 1, a, count, y);
  __syncthreads();
  constexpr int RECORD = 16384 + (INT8 ? 512 : 1024);
  write_record<RECORD>(job.v_image + index * RECORD, image);
}

// Switches: INPUT (Bf16, Fp16 or float), USE_INT8_QK, USE_INT8_VALUES, USE_ROPE, USE_WIDE (16-byte rows),
// USE_TENSOR_ROTATION (16-bit q and k, rotated, no rope)
constexpr bool MEAN_F16 = !USE_INT8_VALUES || is_fp16<INPUT>::value;
extern "C" __global__ void __launch_bounds__(256) statistics(const __grid_constant__ Job job, int first) {
  chunk_statistics<INPUT>(job, blockIdx.z + first);
}
extern "C" __global__ void __launch_bounds__(128) codes_q(const __grid_constant__ Job job) {
  quantize_q<INPUT, USE_INT8_QK>(job);
}
extern "C" __global__ void __launch_bounds__(USE_INT8_VALUES ? 256 : 64) codes_k(const __grid_constant__ Job job) {
  if constexpr (USE_INT8_VALUES) quantize_k_by_size<INPUT, USE_INT8_QK>(job);
  else quantize_k<INPUT, USE_INT8_QK>(job);
}
extern "C" __global__ void __launch_bounds__(256, 2) codes_v(const __grid_constant__ Job job) {
  quantize_v<INPUT, USE_INT8_VALUES, MEAN_F16>(job);
}
