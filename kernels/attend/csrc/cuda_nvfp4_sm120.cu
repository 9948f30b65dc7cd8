// attend() for sm_120a and sm_121a, `nvfp4` (NUMERICS.md N1 to N5). Host side: ../cuda_nvfp4_sm120.py. Must match
// ../reference.py. Switches: USE_TWIN (nvfp4.cuh), USE_MEANS, USE_F16_MEANS (else bf16), USE_SHIFT (smoothed queries).
//
// Block: 128 query rows x 1 head, a warp for 16 rows; tiles of 128 keys through a ring of 3 slots in shared memory.
// The K image has its keys in such columns that a lane's probabilities are its A fragment of the second product as
// they are (prepare/csrc/cuda_nvfp4.cu): column 2 t + e of octant j is key 32 (j / 4) + 8 t + 2 (j % 4) + e, so lane t
// of a quad has 8 consecutive keys of each 32, and lanes t and t ^ 1 have a group of 16 that shares a scale.
// A tile's products start from zero and join the row's sums in fp32. The row sum is that of the numbers before they
// are rounded where means are restored, else a product of the codes with ones (N4).
// Bound by: not measured on the card.
#include "nvfp4.cuh"

constexpr int THREADS = 256;
constexpr int BLOCK_ROWS = 128;
constexpr int UNIT = 16;  // blocks of a head whose shifts are made together
constexpr int STAGES = 3;
constexpr int K_AT = 0, V_AT = TILE_RECORD, MEAN_AT = 2 * TILE_RECORD, SHIFT_AT = MEAN_AT + 256;
constexpr int SLOT = SHIFT_AT + 512;
constexpr float LOG2_448 = 8.807354922057604f, LOG2_2688 = 11.392317422778762f;
#define MINUS_INFINITY __int_as_float(0xFF800000)

struct Call {
  const uint4* q;          // [B H][blocks * 8][32 lanes][2]: A fragments of 16 rows, step by step
  const u32* q_scale;      // [B H][blocks * 8][32]: lane 4 g + 2 s + r has row g + 8 r, step s
  const char* k;           // [B H][T][TILE_RECORD]
  const char* v;           // [B H][T][TILE_RECORD]
  const u16* means;        // [B H][T][128]
  const float* amax;       // [3][B H]: of q, k and the residual
  const float* q_means;    // [B H][blocks][128] with USE_SHIFT
  const u32* k_centred;    // [B H][T * 128][64]: pairs of bf16, with USE_SHIFT
  float* shift;            // [units of this launch * 16][T * 128]: log2 units, with USE_SHIFT
  const int* key_count;    // [B] or null: all keys
  const float* lse_shift;  // [B H][Lq] or null
  float* lse;              // [B H][Lq] or null
  void* out;               // [B][Lq][out_heads][128], at its first head
  i64 rows, tiles, keys;   // Lq, T, Lk
  int heads, blocks, all_heads, first_unit;
  int out_heads, out_type;  // heads in a row of out; 0 bf16, 1 fp16, 2 fp32
  float score_scale;        // softmax scale * log2(e)
};
static_assert(sizeof(Call) == 160, "CALL of ../cuda_nvfp4_sm120.py packs it");

struct Item {
  int head, block, keys;  // head: of B H
};
DEVICE Item item_of(const Call& call, int unit, int place) {
  const int units = (call.blocks + UNIT - 1) / UNIT;
  Item item{unit / units, unit % units * UNIT + place, (int)call.keys};
  if (call.key_count) item.keys = __ldg(call.key_count + item.head / call.heads);
  return item;
}

DEVICE void copy_async(u32 shared, const void* from) {
  asm volatile("cp.async.cg.shared.global [%0],[%1],16;" ::"r"(shared), "l"(from) : "memory");
}
DEVICE void copy_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int PENDING>
DEVICE void copy_wait() { asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory"); }

// A tile's K and V records, means and shifts into a slot
DEVICE void load_tile(const Call& call, u32 slot, i64 index, const float* shift) {
  constexpr int VECTORS = TILE_RECORD / 16;
  const char* k = call.k + index * TILE_RECORD;
  const char* v = call.v + index * TILE_RECORD;
  for (int i = threadIdx.x; i < VECTORS; i += THREADS) {
    copy_async(slot + K_AT + 16 * i, k + 16 * i);
    copy_async(slot + V_AT + 16 * i, v + 16 * i);
  }
  const int i = threadIdx.x;
  if (USE_MEANS && i < 16) copy_async(slot + MEAN_AT + 16 * i, call.means + index * HEAD_DIM + 8 * i);
  if (USE_SHIFT && i < 32) copy_async(slot + SHIFT_AT + 16 * i, shift + 4 * i);
}

// Products of a 16 x 128 A (two steps of 64) with a record's 128 rows; octant j of the columns lands in d[4 j] to + 3.
template <int SB>
DEVICE void multiply_octant(float* d, const u32 (&a)[2][4], u32 scale_a, const uint4* codes, const u32* scales) {
  const uint4 b = codes[(threadIdx.x & 31)];
  mma_nvfp4<0, SB>(d, a[0], b.x, b.y, scale_a, scales[0]);
  mma_nvfp4<1, SB>(d, a[1], b.z, b.w, scale_a, scales[1]);
}
DEVICE void multiply(float (&d)[64], const u32 (&a)[2][4], u32 scale_a, const char* record) {
  const uint4* codes = (const uint4*)record;
  const uint4* packed = (const uint4*)(record + TILE_CODES) + 2 * (threadIdx.x & 31);
  const uint4 low = packed[0], high = packed[1];
  const u32 scales[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
  for (int i = 0; i < 64; i++) d[i] = 0.f;
#pragma unroll
  for (int i = 0; i < 4; i++) {
    multiply_octant<0>(d + 16 * i, a, scale_a, codes + 32 * (4 * i), scales + 2 * i);
    multiply_octant<1>(d + 16 * i + 4, a, scale_a, codes + 32 * (4 * i + 1), scales + 2 * i);
    multiply_octant<2>(d + 16 * i + 8, a, scale_a, codes + 32 * (4 * i + 2), scales + 2 * i);
    multiply_octant<3>(d + 16 * i + 12, a, scale_a, codes + 32 * (4 * i + 3), scales + 2 * i);
  }
}

// s in units of 1 / scale: with smoothed queries the shift joins first, and keys from count on go.
DEVICE void finish_scores(float (&s)[64], float scale, const float* shift, int count) {
  const int t = threadIdx.x & 3;
#pragma unroll
  for (int j = 0; j < 16; j++)
#pragma unroll
    for (int e = 0; e < 2; e++) {
      const int key = 32 * (j / 4) + 8 * t + 2 * (j % 4) + e;
      if (USE_SHIFT) {
        const float more = shift[key];
        s[4 * j + e] = fmaf(s[4 * j + e], scale, more);
        s[4 * j + 2 + e] = fmaf(s[4 * j + 2 + e], scale, more);
      }
      if (count < TILE && key >= count) s[4 * j + e] = s[4 * j + 2 + e] = MINUS_INFINITY;
    }
}

// Two rows of a lane, g and g + 8
struct Running {
  float m[2], l[2];
};
// N4: A fragments p of the probabilities and their scale word, running maxima raised; alpha: what the past keeps.
// mass: with USE_MEANS, the rows' sums over the tile before rounding.
DEVICE void probabilities(const float (&s)[64], float scale, Running& run, float (&alpha)[2], u32 (&p)[2][4],
                          u32& scale_p, float (&mass)[2]) {
  const int t = threadIdx.x & 3;
  u32 words[2][2];  // [row][step]: the bytes that this lane knows
#pragma unroll
  for (int r = 0; r < 2; r++) {
    float top[4], x[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
      top[i] = MINUS_INFINITY;
#pragma unroll
      for (int j = 4 * i; j < 4 * i + 4; j++) top[i] = fmaxf(top[i], fmaxf(s[4 * j + 2 * r], s[4 * j + 2 * r + 1]));
      top[i] = fmaxf(top[i], __shfl_xor_sync(~0u, top[i], 1));
    }
    float best = fmaxf(fmaxf(top[0], top[1]), fmaxf(top[2], top[3]));
    best = fmaxf(best, __shfl_xor_sync(~0u, best, 2));
    const float raised = fmaxf(run.m[r], best * scale);
    alpha[r] = exp2_fast(run.m[r] - raised);
    run.m[r] = raised;
#pragma unroll
    for (int i = 0; i < 4; i++) x[i] = exp2_fast(fmaf(top[i], scale, LOG2_448 - raised));
    const u32 codes = pack_ue4m3(x[0], x[1], x[2], x[3]);
    mass[r] = 0.f;
    words[r][0] = __byte_perm(codes, 0, t < 2 ? 0x4140 : 0x1404);
    words[r][1] = __byte_perm(codes, 0, t < 2 ? 0x4342 : 0x3424);
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const float sigma = ue4m3_value(codes >> 8 * i);
      const float offset = sigma > 0.f ? LOG2_2688 - raised - log2_fast(sigma) : MINUS_INFINITY;
      float y[8];
#pragma unroll
      for (int n = 0; n < 8; n++) y[n] = exp2_fast(fmaf(s[16 * i + 4 * (n / 2) + 2 * r + n % 2], scale, offset));
      p[i / 2][2 * (i % 2) + r] = pack_e2m1(y);
      const float sum = ((y[0] + y[1]) + (y[2] + y[3])) + ((y[4] + y[5]) + (y[6] + y[7]));
      mass[r] = fmaf(sigma, sum, mass[r]);
    }
  }
  if (USE_MEANS)
#pragma unroll
    for (float& sum : mass) {
      sum += __shfl_xor_sync(~0u, sum, 1);
      sum += __shfl_xor_sync(~0u, sum, 2);
    }
  // lane t keeps row t % 2, step t / 2, and gives lane t ^ 2 its half of the other step
  const u32 mine0 = t & 1 ? words[1][0] : words[0][0], mine1 = t & 1 ? words[1][1] : words[0][1];
  scale_p = (t & 2 ? mine1 : mine0) | __shfl_xor_sync(~0u, t & 2 ? mine0 : mine1, 2);
}

DEVICE void store_pair(const Call& call, i64 at, float x, float y) {
  if (call.out_type == 0) ((u32*)call.out)[at / 2] = pack_bf16(x, y);
  if (call.out_type == 1) ((u32*)call.out)[at / 2] = pack_f16(x, y);
  if (call.out_type == 2) ((float2*)call.out)[at / 2] = make_float2(x, y);
}
// out = g_v o / l and lse (C6). nothing: 0, or NaN where a factor of the head is not finite (C7)
DEVICE void store_rows(const Call& call, const Item& item, const float (&o)[64], const Running& run, float g_v,
                       float nothing) {
  const int batch = item.head / call.heads, head = item.head % call.heads, lane = threadIdx.x & 31;
#pragma unroll
  for (int r = 0; r < 2; r++) {
    const i64 row = (i64)item.block * BLOCK_ROWS + threadIdx.x / 32 * 16 + lane / 4 + 8 * r;
    if (row >= call.rows) continue;
    const bool seen = item.keys > 0;
    const float n = seen ? (g_v + nothing) / run.l[r] : 0.f;
    const i64 at = ((batch * call.rows + row) * call.out_heads + head) * HEAD_DIM + lane % 4 * 2;
#pragma unroll
    for (int j = 0; j < 16; j++) store_pair(call, at + 8 * j, o[4 * j + 2 * r] * n, o[4 * j + 2 * r + 1] * n);
    if (call.lse && lane % 4 == 0) {
      const i64 i = item.head * call.rows + row;
      const float shift = call.lse_shift ? call.lse_shift[i] : 0.f;
      const float value = 0.6931471805599453f * (run.m[r] + log2_fast(run.l[r] * (1.f / NVFP4_MAX))) + shift;
      call.lse[i] = seen ? value + nothing : MINUS_INFINITY;
    }
  }
}

// o = alpha o + n + row sum / g_v * mean. means: the tile's 128
DEVICE void merge_tile(float (&o)[64], const float (&n)[64], const float (&alpha)[2], const float (&mass)[2],
                       const char* means) {
  const u32* pairs = (const u32*)means + (threadIdx.x & 3);
#pragma unroll
  for (int j = 0; j < 16; j++) {
    float x = 0.f, y = 0.f;
    if (USE_MEANS) {
      const u32 pair = pairs[4 * j];
      x = USE_F16_MEANS ? low_f16(pair) : __uint_as_float(pair << 16);
      y = USE_F16_MEANS ? low_f16(pair >> 16) : __uint_as_float(pair & 0xFFFF0000u);
    }
#pragma unroll
    for (int r = 0; r < 2; r++) {
      float* at = o + 4 * j + 2 * r;
      at[0] = fmaf(at[0], alpha[r], n[4 * j + 2 * r]);
      at[1] = fmaf(at[1], alpha[r], n[4 * j + 2 * r + 1]);
      if (USE_MEANS) at[0] = fmaf(mass[r], x, at[0]), at[1] = fmaf(mass[r], y, at[1]);
    }
  }
}

// blockIdx: blocks of the launch's units
extern "C" __global__ void __launch_bounds__(THREADS, 1) attend_nvfp4(const __grid_constant__ Call call) {
  extern __shared__ __align__(16) char memory[];
  const u32 shared = shared_address(memory);
  const Item item = item_of(call, call.first_unit + blockIdx.x / UNIT, blockIdx.x % UNIT);
  if (item.block >= call.blocks) return;
  const int lane = threadIdx.x & 31, tiles = (item.keys + TILE - 1) / TILE;
  const i64 first = item.head * call.tiles;
  const float* shift = call.shift + (i64)blockIdx.x * call.tiles * TILE;
  const i64 rows16 = ((i64)item.head * call.blocks + item.block) * 8 + threadIdx.x / 32;
  const u32 scale_q = __ldg(call.q_scale + rows16 * 32 + lane);
  u32 q[2][4];
#pragma unroll
  for (int step = 0; step < 2; step++) {
    const uint4 words = __ldg(call.q + rows16 * 64 + lane * 2 + step);
    q[step][0] = words.x, q[step][1] = words.y, q[step][2] = words.z, q[step][3] = words.w;
  }
  const float g_q = global_scale(__ldg(call.amax + item.head));
  const float g_k = global_scale(__ldg(call.amax + call.all_heads + item.head));
  const float g_v = global_scale(__ldg(call.amax + 2 * call.all_heads + item.head));
  const float score_scale = g_q * g_k * call.score_scale, unit = USE_SHIFT ? 1.f : score_scale;
  float o[64];
  Running run{{MINUS_INFINITY, MINUS_INFINITY}, {0.f, 0.f}};
#pragma unroll
  for (int i = 0; i < 64; i++) o[i] = 0.f;
#pragma unroll 1
  for (int j = 0; j < STAGES - 1; j++) {
    if (j < tiles) load_tile(call, shared + j * SLOT, first + j, shift + j * TILE);
    copy_commit();
  }
#pragma unroll 1
  for (int j = 0; j < tiles; j++) {
    copy_wait<STAGES - 2>();
    __syncthreads();  // the tile is there for all, and nobody reads the one before any more
    const int next = j + STAGES - 1;
    if (next < tiles) load_tile(call, shared + next % STAGES * SLOT, first + next, shift + (i64)next * TILE);
    copy_commit();
    const char* slot = memory + j % STAGES * SLOT;
    float s[64], alpha[2], mass[2];
    u32 p[2][4], scale_p;
    multiply(s, q, scale_q, slot + K_AT);
    const int count = item.keys - j * TILE;
    if (USE_SHIFT || count < TILE) finish_scores(s, score_scale, (const float*)(slot + SHIFT_AT), count);
    probabilities(s, unit, run, alpha, p, scale_p, mass);
    if (!USE_MEANS) {
      float sums[4] = {0.f, 0.f, 0.f, 0.f};
      mma_nvfp4<0, 0>(sums, p[0], 0x22222222u, 0x22222222u, scale_p, 0x38383838u);
      mma_nvfp4<1, 0>(sums, p[1], 0x22222222u, 0x22222222u, scale_p, 0x38383838u);
      mass[0] = sums[0], mass[1] = sums[2];
    }
    multiply(s, p, scale_p, slot + V_AT);
#pragma unroll
    for (int r = 0; r < 2; r++) {
      run.l[r] = fmaf(run.l[r], alpha[r], mass[r]);
      mass[r] /= g_v;
    }
    merge_tile(o, s, alpha, mass, slot + MEAN_AT);
  }
  store_rows(call, item, o, run, g_v, 0.f * score_scale);
}

#if USE_SHIFT
DEVICE void mma_bf16(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
// Delta S of N3: means of 16 query blocks times the centred keys of a tile. blockIdx: tile, unit of the launch
extern "C" __global__ void __launch_bounds__(THREADS) query_shift(const __grid_constant__ Call call) {
  const Item item = item_of(call, call.first_unit + blockIdx.y, 0);
  const int lane = threadIdx.x & 31, g = lane / 4, t = lane % 4;
  if ((i64)blockIdx.x * TILE >= item.keys) return;
  const float* means = call.q_means + (i64)item.head * call.blocks * HEAD_DIM;
  const i64 key = (i64)blockIdx.x * TILE + threadIdx.x / 32 * 16;
  const u32* keys = call.k_centred + (item.head * call.tiles * TILE + key + g) * 64 + t;
  float d[2][4] = {};
#pragma unroll
  for (int step = 0; step < 8; step++) {
    u32 a[4], rest[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const int block = min(item.block + g + 8 * (i & 1), call.blocks - 1);
      const float2 x = __ldg((const float2*)(means + (i64)block * HEAD_DIM + 16 * step + 8 * (i / 2) + 2 * t));
      a[i] = pack_bf16(x.x, x.y);
      rest[i] = pack_bf16(x.x - __uint_as_float(a[i] << 16), x.y - __uint_as_float(a[i] & 0xFFFF0000u));
    }
#pragma unroll
    for (int n = 0; n < 2; n++) {
      const u32 b0 = __ldg(keys + n * 8 * 64 + 8 * step), b1 = __ldg(keys + n * 8 * 64 + 8 * step + 4);
      mma_bf16(d[n], a, b0, b1);
      mma_bf16(d[n], rest, b0, b1);
    }
  }
  float* out = call.shift + (i64)blockIdx.y * UNIT * call.tiles * TILE + key + 2 * t;
#pragma unroll
  for (int n = 0; n < 2; n++)
#pragma unroll
    for (int r = 0; r < 2; r++)
      *(float2*)(out + (g + 8 * r) * call.tiles * TILE + 8 * n) =
          make_float2(d[n][2 * r] * call.score_scale, d[n][2 * r + 1] * call.score_scale);
}
#endif
