// What the attention kernels of sm_80 and newer share: the call, the shared-memory plan, the loads, the product of
// queries and keys, the mean restoration. Block: 16 query rows a warp x 1 head; every thread loads.
// A kernel gives KEY_SCALES of a tile, 4 or 8, VALUE_RECORD, and VALUE_BYTES, the part of that which it loads.
#pragma once
#include "epilogue.cuh"
#include "mma.cuh"

#ifndef WARPS
#define WARPS 12
#endif
constexpr int BLOCK_ROWS = 16 * WARPS;
constexpr int THREADS = 32 * WARPS;
constexpr int STAGES = 2;  // tiles in shared memory: one in use, one on its way

constexpr int KEY_RECORD = 16384 + 4 * KEY_SCALES;  // codes of a tile, then its scales
constexpr int KEY_SLOT = 16384 + 128;
constexpr int VALUE_SLOT = (VALUE_BYTES + 127) / 128 * 128;
constexpr int MEAN_RECORD = 4096;  // means of 16 tiles
constexpr int MEAN_TILES = 8;      // tiles between two restorations
constexpr int MEAN_BYTES = 256 * MEAN_TILES;

constexpr int Q_AT = 0;
constexpr int K_AT = Q_AT + BLOCK_ROWS * HEAD_DIM;
constexpr int V_AT = K_AT + STAGES * KEY_SLOT;
constexpr int MEANS_AT = V_AT + STAGES * VALUE_SLOT;
constexpr int BARRIERS_AT = MEANS_AT + STAGES * MEAN_BYTES;
constexpr int SOURCE_AT = BARRIERS_AT + 64;
constexpr int Q_SCALES_AT = SOURCE_AT + 64;
constexpr int SHARED_BYTES = Q_SCALES_AT + 4 * BLOCK_ROWS;

struct Call {
  const char* q;             // [B H][q_rows / 64][8192]: 64 rows of codes, swizzled
  const float* q_scale;      // [B H][q_rows]
  const char* k;             // [B H][T][KEY_RECORD]
  const char* v;             // [B H][T][VALUE_RECORD]
  const char* means;         // [B H][ceil(T / 16)][MEAN_RECORD]
  const float* v_scale;      // [B H][128]; fp8 values only
  const int* key_count;      // [B] or null: all keys
  const float* lse_shift;    // [B H][Lq] or null
  float* lse;                // [B H][Lq] or null
  void* out;                 // [B][Lq][out_heads][128], at its first head
  i64 rows, tiles, keys;     // Lq, T, Lk
  i64 q_rows;                // Lq, padded to whole blocks
  int heads, blocks;         // H, blocks of a head
  int out_heads;             // heads in a row of out: H, or more
  int out_type;              // 0 bf16, 1 fp16, 2 fp32
  float score_scale;         // softmax scale * log2(e), times 8 where the kernel counts in codes
};
static_assert(sizeof(Call) == 136, "CALL of ../cuda_mma.py packs it");

template <int BYTES>
DEVICE void copy_bytes(u32 shared, const char* global) {
  constexpr int ROUND = 16 * THREADS, WHOLE = BYTES / ROUND;
  shared += threadIdx.x * 16;
  global += threadIdx.x * 16;
#pragma unroll
  for (int i = 0; i < WHOLE; i++) copy_16(shared + i * ROUND, global + i * ROUND);
  if (threadIdx.x < (BYTES - WHOLE * ROUND) / 16) copy_16(shared + WHOLE * ROUND, global + WHOLE * ROUND);
}
// This block's head of B H and rows. Read anew where it is called: nothing of it stands in registers in between.
struct Place {
  int bh, block;
};
DEVICE Place place_of(const Call& call) {
  int index;
  asm volatile("mov.u32 %0,%%ctaid.x;" : "=r"(index));
  return Place{index / call.blocks, index % call.blocks};
}
// The same of this thread: what is worked out of it is worked out again in every tile.
DEVICE int thread_now() {
  int thread;
  asm volatile("mov.u32 %0,%%tid.x;" : "=r"(thread));
  return thread;
}
// Where a head's records lie. In shared memory: in registers they would stand through the loop for one use a tile.
struct Source {
  const char *k, *v, *means;
};
DEVICE const char* load_pointer(u32 at) {
  u64 p;
  asm volatile("ld.shared.u64 %0,[%1];" : "=l"(p) : "r"(at));
  return (const char*)p;
}

// A block's operands on their way through shared memory. Tile j's keys and values have a slot each, that of tile j - 2:
// a slot is "full" when every thread arrived with its copies, "empty" when every warp is done with it. So the warps
// need not run in step; the fastest is at most a tile ahead.
struct Block {
  u32 shared;
  int keys;

  // Starts the copies of the queries and tile 0
  DEVICE Block(const Call& call, char* memory) {
    shared = shared_address(memory);
    const Place place = place_of(call);
    // a shuffle tells ptxas that every lane has the same: the loop's state then lives in uniform registers
    keys = __shfl_sync(~0u, call.key_count ? __ldg(call.key_count + place.bh / call.heads) : (int)call.keys, 0);
    if (threadIdx.x == 0) {
      for (int i = 0; i < 8; i++) barrier_init(shared + BARRIERS_AT + 8 * i, i < 4 ? THREADS : WARPS);
      Source* source = (Source*)(memory + SOURCE_AT);
      source->k = call.k + place.bh * call.tiles * KEY_RECORD;
      source->v = call.v + place.bh * call.tiles * VALUE_RECORD;
      source->means = call.means + place.bh * ((call.tiles + 15) / 16) * MEAN_RECORD;
    }
    const i64 row = place.bh * call.q_rows + place.block * BLOCK_ROWS;
    if (threadIdx.x < BLOCK_ROWS)
      ((float*)(memory + Q_SCALES_AT))[threadIdx.x] = call.score_scale * __ldg(call.q_scale + row + threadIdx.x);
    __syncthreads();
    copy_bytes<BLOCK_ROWS * HEAD_DIM>(shared + Q_AT, call.q + row * HEAD_DIM);
    if (keys > 0) load_keys(0);
    if (keys > 0) load_values(0, call.means);
  }
  DEVICE u32 k_full(int j) const { return shared + BARRIERS_AT + (j & 1) * 8; }
  DEVICE u32 v_full(int j) const { return shared + BARRIERS_AT + 16 + (j & 1) * 8; }
  DEVICE u32 k_empty(int j) const { return shared + BARRIERS_AT + 32 + (j & 1) * 8; }
  DEVICE u32 v_empty(int j) const { return shared + BARRIERS_AT + 48 + (j & 1) * 8; }
  DEVICE u32 k_slot(int j) const { return shared + K_AT + (j & 1) * KEY_SLOT; }
  DEVICE u32 v_slot(int j) const { return shared + V_AT + (j & 1) * VALUE_SLOT; }

  DEVICE void load_keys(int j) const {
    wait_phase(k_empty(j), (j >> 1 & 1) ^ 1);
    copy_bytes<KEY_RECORD>(k_slot(j), load_pointer(shared + SOURCE_AT) + (i64)j * KEY_RECORD);
    arrive_with_copies(k_full(j));
  }
  // Before the first of 8 tiles also their means. The slot of those was last read with tile j - 9.
  DEVICE void load_values(int j, bool with_means) const {
    wait_phase(v_empty(j), (j >> 1 & 1) ^ 1);
    copy_bytes<VALUE_BYTES>(v_slot(j), load_pointer(shared + SOURCE_AT + 8) + (i64)j * VALUE_RECORD);
    if (with_means && j % MEAN_TILES == 0 && threadIdx.x < MEAN_BYTES / 16) {
      // half a record: 8 rows of 64 channels, then the same rows of the other 64
      const u32 at = threadIdx.x * 16;
      const char* from = load_pointer(shared + SOURCE_AT + 16) + (i64)(j / 16) * MEAN_RECORD + j / 8 % 2 * 1024;
      copy_16(means(j) + at, from + (at + at / 1024 * 1024));
    }
    arrive_with_copies(v_full(j));
  }
  // The slot of tile j, once it has landed; the copies of the next tile start first
  DEVICE u32 acquire_keys(int j) const {
    if ((j + 1) * TILE < keys) load_keys(j + 1);
    wait_phase(k_full(j), j >> 1 & 1);
    return k_slot(j);
  }
  DEVICE u32 acquire_values(int j, bool with_means) const {
    if ((j + 1) * TILE < keys) load_values(j + 1, with_means);
    wait_phase(v_full(j), j >> 1 & 1);
    return v_slot(j);
  }
  // This warp is done with a slot: no lane still reads it.
  DEVICE void release(u32 empty) const {
    __syncwarp();
    if ((threadIdx.x & 31) == 0) arrive(empty);
  }
  DEVICE void release_keys(int j) const { release(k_empty(j)); }
  DEVICE void release_values(int j) const { release(v_empty(j)); }

  // Of the 8 tiles that j is one of, and whether they are due: j is the last of them, or of all
  DEVICE u32 means(int j) const { return shared + MEANS_AT + j / MEAN_TILES % 2 * MEAN_BYTES; }
  DEVICE bool means_due(int j) const { return j % MEAN_TILES == MEAN_TILES - 1 || (j + 1) * TILE >= keys; }
  DEVICE u32 q_address() const {
    const int thread = thread_now();
    return a_address(shared + Q_AT + thread / 32 * 2048, thread & 31);
  }
  // Factor of this lane's row g; that of g + 8 is 32 bytes further
  DEVICE u32 q_scales() const { return shared + Q_SCALES_AT + (threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4) * 4; }
};

// s = PRELOAD + q k, 16 rows x 128 keys; start: four words of PRELOAD
DEVICE void multiply_qk(u32 (&s)[64], u32 q, u32 k, const u32 (&start)[4]) {
#pragma unroll
  for (int step = 0; step < 4; step++) {
    u32 a[4];
    load_matrices(step_address(q, step), a);
#pragma unroll
    for (int i = 0; i < 64; i += 8) {
      u32 b[4];
      load_matrices(step_address(k, step) + i * 256, b);
      mma_s8(s + i, a, b[0], b[1], step ? s + i : start);
      mma_s8(s + i + 4, a, b[2], b[3], step ? s + i + 4 : start);
    }
  }
}

// A lane's factors of its scores: keys of a tile are 4 or 8 scale groups, so the lane's 32 columns are one or two.
// of[group][0] is row g's, of[group][1] row g + 8's.
constexpr int GROUPS = KEY_SCALES / 4;
struct Factors {
  float of[GROUPS][2];
  DEVICE float row(int column, int r) const { return of[column / (32 / GROUPS)][r]; }
};
// q_scales: the query factor of row g; k_scales: the tile's
DEVICE Factors factors_of(u32 q_scales, u32 k_scales, int lane) {
  const float q0 = load_shared(q_scales), q1 = load_shared(q_scales + 32);
  Factors a;
#pragma unroll
  for (int i = 0; i < GROUPS; i++) {
    const float k = load_shared(k_scales + ((lane & 3) * GROUPS + i) * 4);
    a.of[i][0] = q0 * k;
    a.of[i][1] = q1 * k;
  }
  return a;
}
// Largest score of the tile, scaled, of row g in even lanes and g + 8 in odd ones. The scores' bits are those of positive
// floats, so they order like integers.
DEVICE float largest(const u32 (&s)[64], const Factors& a, bool second) {
  float top[2];
#pragma unroll
  for (int group = 0; group < GROUPS; group++) {
    constexpr int COLUMNS = 32 / GROUPS;
    const u32* of = s + 2 * COLUMNS * group;
    int x0 = max((int)of[0], (int)of[1]), x1 = max((int)of[2], (int)of[3]);
#pragma unroll
    for (int i = 4; i < 2 * COLUMNS; i += 4) {
      x0 = max3(x0, (int)of[i], (int)of[i + 1]);
      x1 = max3(x1, (int)of[i + 2], (int)of[i + 3]);
    }
    const float y0 = (__int_as_float(x0) - PRELOADED) * a.of[group][0];
    const float y1 = (__int_as_float(x1) - PRELOADED) * a.of[group][1];
    top[0] = group ? fmaxf(top[0], y0) : y0;
    top[1] = group ? fmaxf(top[1], y1) : y1;
  }
  return quad_max(top[0], top[1], second);
}

// Row masses of up to 8 tiles, in the units of the running maximum, until their means are restored: lane t of a quad
// keeps tiles 2 t and 2 t + 1 of its rows g (x[0], x[1]) and g + 8 (x[2], x[3]).
struct Masses {
  float x[4];
  DEVICE void clear() { x[0] = x[1] = x[2] = x[3] = 0.f; }
  DEVICE void rescale(float alpha0, float alpha1) {
    x[0] *= alpha0, x[1] *= alpha0, x[2] *= alpha1, x[3] *= alpha1;
  }
  DEVICE void record(int tile, int lane, float mass0, float mass1) {
    const bool mine = (lane & 3) == (tile >> 1), odd = tile & 1;
    if (mine && !odd) x[0] = mass0, x[2] = mass1;
    if (mine && odd) x[1] = mass0, x[3] = mass1;
  }
};
// o += masses times the 16-bit means of their tiles, of which j is the last; no mass is left then. A's second half is what
// rounding the first left, over the same means: the masses keep at least 16 bits.
template <bool FP16>
DEVICE void restore_means(float (&o)[64], Masses& masses, const Block& block, int j, int lane) {
  u32 a[4];
#pragma unroll
  for (int i = 0; i < 2; i++) {
    const float x = masses.x[2 * i], y = masses.x[2 * i + 1];
    a[i] = FP16 ? pack_f16(x, y) : pack_bf16(x, y);
    if (FP16) a[2 + i] = pack_f16(x - low_f16(a[i]), y - low_f16(a[i] >> 16));
    else a[2 + i] = pack_bf16(x - __uint_as_float(a[i] << 16), y - __uint_as_float(a[i] & 0xFFFF0000u));
  }
  const u32 row = block.means(j) + (lane & 7) * 128;
#pragma unroll
  for (int n = 0; n < 16; n += 4) {
    // four groups of 8 channels: chunk n % 8 + lane / 8 of the row's half
    u32 b[4];
    load_matrices_transposed(row + n / 8 * 1024 + (((n % 8 + (lane >> 3)) ^ (lane & 7)) << 4), b);
#pragma unroll
    for (int i = 0; i < 4; i++) mma_16bit<FP16>(o + 4 * (n + i), a, b[i], b[i]);
  }
  masses.clear();
}

// out and lse of this warp's rows; the arguments as in epilogue.cuh
template <typename Scales>
DEVICE void store_rows(const Call& call, const float (&o)[64], float l, float m, int lane, float sum_scale,
                       Scales v_scale) {
  const Place place = place_of(call);
  const int row = place.block * BLOCK_ROWS + threadIdx.x / 32 * 16 + lane / 4;
  store_rows(call, place.bh, row, o, l, m, lane, sum_scale, v_scale);
}
