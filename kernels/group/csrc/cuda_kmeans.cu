// group_tokens() on sm_80 and newer: Lloyd steps on a sample of the tokens, one assignment of all, a counting sort.
// Host side: ../cuda_kmeans.py. Same meaning as ../reference.py, which steps on all tokens.
// Switches: INPUT (Bf16, Fp16 or float), CLUSTERS (padded to 16), USE_UPDATE, USE_WIDE.
//
// Products: affinity = X C^T - |C|^2 / 2, and cluster sums = onehot^T X, both with mma.sync in 16 bits. The contraction
// over channels is permuted so that a lane's 16-byte loads are its fragments: lane t of a quad has channels
// 8 (t + 4 s) to + 7, which serve steps 2 s and 2 s + 1.
// No atomics on floats: equal inputs give equal orders.
// Bound by: memory traffic of the one full pass.
#define USE_ROPE 0
#define USE_TENSOR_ROTATION 0
#include "rows.cuh"

constexpr int TOKENS = 128;       // of a tile: 8 warps x 16
constexpr int CHUNK_TILES = 8;    // tiles of a block
constexpr int CHUNK = TOKENS * CHUNK_TILES;
constexpr int C_STRIDE = 320;     // bytes between centroids in shared memory: two rows are all banks
constexpr int X_STRIDE = 272;     // bytes between tokens: eight rows of 16 bytes are all banks
constexpr int SLICES = (CLUSTERS / 16 + 7) / 8;  // 16-cluster slices of a warp
constexpr int BUCKETS = CLUSTERS + 1;            // and one for keys that do not exist

struct Job {
  Rows v;
  const u8* exists;    // [B][L] or null: all
  const int* seeds;    // [B][clusters] tokens
  float* centroids;    // [B H][clusters][128]
  u16* narrow;         // [B H][CLUSTERS][128], in 16 bits
  float* half_norms;   // [B H][CLUSTERS]: |c|^2 / 2, +inf for padding
  float* sums;         // [B H][sample chunks][CLUSTERS][128]
  int* counts;         // [B H][chunks][BUCKETS]
  u16* labels;         // [B H][L]
  int* offsets;        // [B H][chunks][BUCKETS]
  int* order;          // [B H][L]
  i64 tokens;          // L
  int heads, clusters, chunks, stride;  // stride: of the sample
};
static_assert(sizeof(Job) == 136, "JOB of ../cuda_kmeans.py packs it");

constexpr bool F16 = is_fp16<INPUT>::value;

template <typename T>
DEVICE uint4 to_16_bits(const Eight<T>& x) {
  if (sizeof(T) == 2) return *(const uint4*)&x;
  return make_uint4(pack_bf16(x[0], x[1]), pack_bf16(x[2], x[3]), pack_bf16(x[4], x[5]), pack_bf16(x[6], x[7]));
}
// One element of a row
template <typename T>
DEVICE float load_one(const T* p) {
  const u32 word = sizeof(T) == 4 ? *(const u32*)p : *(const u16*)p;
  return element<T>(&word, 0);
}
DEVICE void mma(float (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
#define MMA(type)                                                                                                       \
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." type ".f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"  \
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1))
  if (F16) MMA("f16.f16");
  else MMA("bf16.bf16");
}
DEVICE void load_transposed(u32 address, u32& b0, u32& b1, u32& b2, u32& b3) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3},[%4];"
               : "=r"(b0), "=r"(b1), "=r"(b2), "=r"(b3) : "r"(address));
}
DEVICE bool token_exists(const Job& job, int batch, i64 token) {
  return token < job.tokens && (!job.exists || job.exists[batch * job.tokens + token]);
}

// A centroid from its sum: all widths of it. blockIdx: padded cluster, B H; 128 threads
DEVICE void write_centroid(const Job& job, float x) {
  __shared__ float norms[4];
  const int c = blockIdx.x, bh = blockIdx.y, channel = threadIdx.x;
  const i64 padded = (i64)bh * CLUSTERS + c;
  const u32 bits = F16 ? pack_f16(x, 0.f) : pack_bf16(x, 0.f);
  job.narrow[padded * HEAD_DIM + channel] = (u16)bits;
  const float narrow = F16 ? low_f16(bits) : __uint_as_float(bits << 16);
  float norm = narrow * narrow;
  for (int step = 16; step; step /= 2) norm += __shfl_xor_sync(~0u, norm, step);
  if (channel % 32 == 0) norms[channel / 32] = norm;
  __syncthreads();
  if (c < job.clusters) job.centroids[((i64)bh * job.clusters + c) * HEAD_DIM + channel] = x;
  if (channel == 0)
    job.half_norms[padded] =
        c < job.clusters ? 0.5f * (norms[0] + norms[1] + norms[2] + norms[3]) : __int_as_float(0x7F800000);
}
// First centroids: given ones, or the tokens named by seeds
extern "C" __global__ void start_centroids(const __grid_constant__ Job job) {
  const int c = blockIdx.x, bh = blockIdx.y, batch = bh / job.heads, head = bh % job.heads;
  float x = 0.f;
  if (c < job.clusters) {
    if (job.seeds) x = load_one(row_of<INPUT>(job.v, batch, head, job.seeds[batch * job.clusters + c]) + threadIdx.x);
    else x = job.centroids[((i64)bh * job.clusters + c) * HEAD_DIM + threadIdx.x];
  }
  write_centroid(job, x);
}
// Means of the sampled tokens; an empty cluster keeps its centroid
extern "C" __global__ void move_centroids(const __grid_constant__ Job job) {
  const int c = blockIdx.x, bh = blockIdx.y;
  float sum = 0.f;
  int count = 0;
#pragma unroll 4
  for (int i = 0; i < job.chunks; i++) {
    const i64 chunk = (i64)bh * job.chunks + i;
    sum += job.sums[(chunk * CLUSTERS + c) * HEAD_DIM + threadIdx.x];
    count += job.counts[chunk * BUCKETS + c];
  }
  float x = 0.f;
  if (c < job.clusters)
    x = count ? sum / (float)count : job.centroids[((i64)bh * job.clusters + c) * HEAD_DIM + threadIdx.x];
  write_centroid(job, x);
}

// Fragments of a warp's 16 tokens: a[s] = 16 bytes of rows g and g + 8
struct Tokens {
  uint4 a[4][2];
};
// Nearest centroid of rows g and g + 8, in every lane of the quad; the lowest index wins a tie
DEVICE void nearest(const Tokens& x, const char* centroids, const float* half_norms, int lane, int (&label)[2]) {
  const int g = lane / 4, t = lane % 4;
  float best[2] = {__int_as_float(0xFF800000), __int_as_float(0xFF800000)};
  label[0] = label[1] = 0;
#pragma unroll 2
  for (int n = 0; n < CLUSTERS; n += 8) {
    const float2 h = *(const float2*)(half_norms + n + 2 * t);
    float d[4] = {-h.x, -h.y, -h.x, -h.y};
#pragma unroll
    for (int s = 0; s < 4; s++) {
      const uint4 b = *(const uint4*)(centroids + (n + g) * C_STRIDE + (t + 4 * s) * 16);
      mma(d, x.a[s][0].x, x.a[s][1].x, x.a[s][0].y, x.a[s][1].y, b.x, b.y);
      mma(d, x.a[s][0].z, x.a[s][1].z, x.a[s][0].w, x.a[s][1].w, b.z, b.w);
    }
#pragma unroll
    for (int i = 0; i < 4; i++)
      if (d[i] > best[i / 2]) best[i / 2] = d[i], label[i / 2] = n + 2 * t + i % 2;
  }
#pragma unroll
  for (int r = 0; r < 2; r++)
#pragma unroll
    for (int step = 1; step < 4; step *= 2) {
      const float y = __shfl_xor_sync(~0u, best[r], step);
      const int c = __shfl_xor_sync(~0u, label[r], step);
      if (y > best[r] || (y == best[r] && c < label[r])) best[r] = y, label[r] = c;
    }
}

// blockIdx: chunk, B H; 256 threads. With USE_UPDATE: sums and counts of a chunk of the sample. Without: labels and
// counts of a chunk of all tokens.
extern "C" __global__ void __launch_bounds__(256, USE_UPDATE ? (SLICES == 1 ? 2 : 1) : 3) assign(const __grid_constant__ Job job) {
  extern __shared__ __align__(16) char memory[];
  char* centroids = memory;
  float* half_norms = (float*)(centroids + CLUSTERS * C_STRIDE);
  int* counts = (int*)(half_norms + CLUSTERS);
  u16* tile_labels = (u16*)(counts + CLUSTERS + 16);
  char* x_tile = (char*)(tile_labels + TOKENS);
  const int bh = blockIdx.y, batch = bh / job.heads, head = bh % job.heads;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
  for (int i = threadIdx.x; i < CLUSTERS * 16; i += 256)
    *(uint4*)(centroids + i / 16 * C_STRIDE + i % 16 * 16) =
        ((const uint4*)(job.narrow + (i64)bh * CLUSTERS * HEAD_DIM))[i];
  for (int i = threadIdx.x; i < CLUSTERS; i += 256) half_norms[i] = job.half_norms[(i64)bh * CLUSTERS + i];
  for (int i = threadIdx.x; i < BUCKETS; i += 256) counts[i] = 0;
  __syncthreads();
#if USE_UPDATE
  float sums[SLICES][16][4];
#pragma unroll
  for (int i = 0; i < SLICES * 64; i++) sums[i / 64][i / 4 % 16][i % 4] = 0.f;
#endif
#pragma unroll 1
  for (int tile = 0; tile < CHUNK_TILES; tile++) {
    const i64 first = ((i64)blockIdx.x * CHUNK + tile * TOKENS) * job.stride;
    if (first >= job.tokens) break;
    Tokens x;
#if USE_UPDATE
    for (int i = threadIdx.x; i < TOKENS * 16; i += 256) {
      const i64 token = first + (i64)(i / 16) * job.stride;
      uint4 e = make_uint4(0, 0, 0, 0);
      if (token_exists(job, batch, token))
        e = to_16_bits(load_eight(row_of<INPUT>(job.v, batch, head, token) + i % 16 * 8));
      *(uint4*)(x_tile + i / 16 * X_STRIDE + i % 16 * 16) = e;
    }
    __syncthreads();
#endif
#pragma unroll
    for (int i = 0; i < 8; i++) {
      const int r = 16 * warp + 8 * (i % 2) + g, chunk = t + 4 * (i / 2);
#if USE_UPDATE
      x.a[i / 2][i % 2] = *(const uint4*)(x_tile + r * X_STRIDE + chunk * 16);
#else
      const i64 token = min(first + r, job.tokens - 1);
      x.a[i / 2][i % 2] = to_16_bits(load_eight(row_of<INPUT>(job.v, batch, head, token) + chunk * 8));
#endif
    }
    int label[2];
    nearest(x, centroids, half_norms, lane, label);
    if (t < 2) {
      const int row = 16 * warp + 8 * t + g;
      const i64 token = first + (i64)row * job.stride;
      const int c = token_exists(job, batch, token) ? (t ? label[1] : label[0]) : CLUSTERS;
      tile_labels[row] = c;
      if (token < job.tokens) {
        atomicAdd(counts + c, 1);
        if (!USE_UPDATE) job.labels[bh * job.tokens + token] = c;
      }
    }
#if USE_UPDATE
    __syncthreads();
#pragma unroll 1
    for (int k = 0; k < TOKENS; k += 16) {
      u32 one[4];  // tokens k + 2 t, + 1, + 8, + 9 of this lane's fragments
      const u32 l0 = *(const u32*)(tile_labels + k + 2 * t), l1 = *(const u32*)(tile_labels + k + 2 * t + 8);
      constexpr u32 ONE = F16 ? 0x3C00 : 0x3F80;
#pragma unroll
      for (int slice = 0; slice < SLICES; slice++) {
        const u32 c = 16 * (warp + 8 * slice) + g;
        auto hot = [&](u32 l, u32 cluster) {
          return ((l & 0xFFFF) == cluster ? ONE : 0) | ((l >> 16) == cluster ? ONE << 16 : 0);
        };
        one[0] = hot(l0, c), one[1] = hot(l0, c + 8), one[2] = hot(l1, c), one[3] = hot(l1, c + 8);
#pragma unroll
        for (int n = 0; n < 16; n += 2) {
          u32 b0, b1, b2, b3;
          const char* at = x_tile + (k + lane % 16) * X_STRIDE + (n + lane / 16) * 16;
          load_transposed(shared_address(at), b0, b1, b2, b3);
          mma(sums[slice][n], one[0], one[1], one[2], one[3], b0, b1);
          mma(sums[slice][n + 1], one[0], one[1], one[2], one[3], b2, b3);
        }
      }
    }
    __syncthreads();
#endif
  }
  __syncthreads();
  const i64 chunk = (i64)bh * job.chunks + blockIdx.x;
  for (int i = threadIdx.x; i < BUCKETS; i += 256) job.counts[chunk * BUCKETS + i] = counts[i];
#if USE_UPDATE
#pragma unroll
  for (int i = 0; i < SLICES * 32; i++) {
    const int slice = i / 32, n = i / 2 % 16, second = i % 2, c = 16 * (warp + 8 * slice) + g + 8 * second;
    if (c < CLUSTERS)
      *(float2*)(job.sums + (chunk * CLUSTERS + c) * HEAD_DIM + 8 * n + 2 * t) =
          make_float2(sums[slice][n][2 * second], sums[slice][n][2 * second + 1]);
  }
#endif
}

// Where each chunk's tokens of each bucket start: buckets in order, chunks in order. blockIdx: B H; 512 threads
extern "C" __global__ void __launch_bounds__(512) scan_counts(const __grid_constant__ Job job) {
  __shared__ int totals[512];
  const int bucket = threadIdx.x;
  const i64 base = (i64)blockIdx.x * job.chunks * BUCKETS + bucket;
  int total = 0;
  if (bucket < BUCKETS)
#pragma unroll 8
    for (int i = 0; i < job.chunks; i++) total += job.counts[base + (i64)i * BUCKETS];
  totals[bucket] = total;
  __syncthreads();
  for (int step = 1; step < 512; step *= 2) {
    const int before = bucket >= step ? totals[bucket - step] : 0;
    __syncthreads();
    totals[bucket] += before;
    __syncthreads();
  }
  int at = totals[bucket] - total;
  if (bucket < BUCKETS)
#pragma unroll 8
    for (int i = 0; i < job.chunks; i++) {
      job.offsets[base + (i64)i * BUCKETS] = at;
      at += job.counts[base + (i64)i * BUCKETS];
    }
}

// A stable counting sort's last step. blockIdx: chunk, B H; CHUNK threads
extern "C" __global__ void __launch_bounds__(CHUNK) scatter(const __grid_constant__ Job job) {
  __shared__ u16 before[CHUNK / 32][BUCKETS];
  const int bh = blockIdx.y, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const i64 token = (i64)blockIdx.x * CHUNK + threadIdx.x;
  for (int i = threadIdx.x; i < CHUNK / 32 * BUCKETS; i += CHUNK) before[i / BUCKETS][i % BUCKETS] = 0;
  __syncthreads();
  const bool real = token < job.tokens;
  const int label = real ? job.labels[bh * job.tokens + token] : CLUSTERS + 1;
  const u32 same = __match_any_sync(~0u, label);
  const int rank = __popc(same & ((1u << lane) - 1));
  if (real && rank == 0) before[warp][label] = __popc(same);
  __syncthreads();
  if (threadIdx.x < BUCKETS) {
    int sum = 0;
    for (int w = 0; w < CHUNK / 32; w++) {
      const int mine = before[w][threadIdx.x];
      before[w][threadIdx.x] = sum;
      sum += mine;
    }
  }
  __syncthreads();
  if (real) {
    const int start = job.offsets[((i64)bh * job.chunks + blockIdx.x) * BUCKETS + label];
    const int at = start + before[warp][label] + rank;
    job.order[bh * job.tokens + at] = token;
  }
}
