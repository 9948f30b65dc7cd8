// What the attention kernels of sm_90a share: the call, the shared-memory plan, the loads, the mean restoration.
// Block: 192 query rows x 1 head; 3 warpgroups multiply (64 rows each), one thread of a fourth loads.
#pragma once
#include "epilogue.cuh"

constexpr int GROUPS = 3;                // multiplying warpgroups
constexpr int BLOCK_ROWS = 64 * GROUPS;  // query rows of a block
constexpr int THREADS = 128 * (GROUPS + 1);
constexpr int STAGES = 4;  // tiles in flight

constexpr int KEY_RECORD = 16384 + KEY_TAIL;      // codes of a tile, then its scales: 4, or 8
constexpr int VALUE_RECORD = 16384 + VALUE_TAIL;  // transposed codes of a tile, then 8 rows of ones or 128 scales
constexpr int MEAN_RECORD = 4096;                 // means of 16 tiles
constexpr int MEAN_TILES = 16;                    // tiles between two restorations
constexpr int SLOT = 17408;                       // a record, padded to the swizzle's 1024 bytes
// per group: [16 tiles, then all before][64 rows] (row sum, maximum)
constexpr int SUMS_BYTES = (MEAN_TILES + 1) * 512;

constexpr int Q_AT = 0;
constexpr int K_AT = Q_AT + GROUPS * 8192;
constexpr int V_AT = K_AT + STAGES * SLOT;
constexpr int MEANS_AT = V_AT + STAGES * SLOT;
constexpr int SUMS_AT = MEANS_AT + 2 * MEAN_RECORD;
constexpr int BARRIERS_AT = SUMS_AT + GROUPS * SUMS_BYTES;
// the base is rounded up to 1024
constexpr int SHARED_BYTES = BARRIERS_AT + 256 + 1024;

struct Call {
  const char* q;             // [B H][blocks * 3][8192]: 64 rows of codes, swizzled
  const float* q_scale;      // [B H][blocks * 192]
  const char* k;             // [B H][T][KEY_RECORD]
  const char* v;             // [B H][T][VALUE_RECORD]
  const char* means;         // [B H][ceil(T / 16)][MEAN_RECORD]
  const float* v_scale;      // [B H][128]; fp8 values only
  const int* key_count;      // [B] or null: all keys
  const float* lse_shift;    // [B H][Lq] or null
  float* lse;                // [B H][Lq] or null
  void* out;                 // [B][Lq][out_heads][128], at its first head
  i64 rows, tiles, keys;     // Lq, T, Lk
  int heads, blocks, items;  // H, blocks of a head, blocks in all (times 192: below 2^31)
  int out_heads;             // heads in a row of out: H, or more
  int out_type;              // 0 bf16, 1 fp16, 2 fp32
  float code_scale;          // softmax scale * 8 log2(e): score units to code units
};
static_assert(sizeof(Call) == 128, "CALL of ../cuda_int8_fp8_sm90.py packs it");

struct Item {
  int head;  // of B H
  int block, keys;
  DEVICE int tiles() const { return (keys + TILE - 1) / TILE; }
};
DEVICE Item item_of(const Call& call, int index) {
  Item item{index / call.blocks, index % call.blocks, (int)call.keys};
  if (call.key_count) item.keys = __ldg(call.key_count + item.head / call.heads);
  return item;
}

// Shared-memory barriers: "full" is completed by a copy's bytes, "empty" by one arrival of each multiplying warp.
struct Barriers {
  u32 base;
  DEVICE u32 k_full(int i) const { return base + 8 * i; }
  DEVICE u32 k_empty(int i) const { return base + 8 * (STAGES + i); }
  DEVICE u32 v_full(int i) const { return base + 8 * (2 * STAGES + i); }
  DEVICE u32 v_empty(int i) const { return base + 8 * (3 * STAGES + i); }
  DEVICE u32 mean_full(int i) const { return base + 8 * (4 * STAGES + i); }
  DEVICE u32 mean_empty(int i) const { return base + 8 * (4 * STAGES + 2 + i); }
  DEVICE u32 q_full() const { return base + 8 * (4 * STAGES + 4); }
  DEVICE u32 q_empty() const { return base + 8 * (4 * STAGES + 5); }
  DEVICE void init() const {
    for (int i = 0; i < 4 * STAGES + 6; i++) {
      const bool full = i < STAGES || (i >= 2 * STAGES && i < 3 * STAGES) || i == 4 * STAGES || i == 4 * STAGES + 1 ||
                        i == 4 * STAGES + 4;
      barrier_init(base + 8 * i, full ? 1 : 4 * GROUPS);
    }
    barrier_init_done();
  }
};
// Position in a ring of N slots; parity flips once a round.
template <int N>
struct Ring {
  int slot = 0;
  u32 parity = 0;
  DEVICE void next() {
    if (++slot == N) slot = 0, parity ^= 1;
  }
};

// This warp is done with a slot that only its products read.
DEVICE void release(u32 empty, int lane) {
  __syncwarp();
  if (lane == 0) barrier_arrive(empty);
}
// The same for a slot that its lanes loaded from: the arrival alone does not wait for loads in flight, and the copy that
// it lets go overtook them (tests/bench/NOTES.md, "Checks"). ready: a condition that holds, for the arrival to wait for.
DEVICE void release_loaded(u32 empty, int lane, bool ready = true) {
  proxy_fence();
  __syncwarp();
  if (lane == 0 && ready) barrier_arrive(empty);
}

DEVICE void load_block(const Call& call, u32 shared, Barriers bar, bool means) {
  Ring<STAGES> ring;
  Ring<2> mean_ring;
  u32 q_parity = 1;
#pragma unroll 1
  for (int index = blockIdx.x; index < call.items; index += gridDim.x, q_parity ^= 1) {
    const Item item = item_of(call, index);
    const char* k = call.k + item.head * call.tiles * KEY_RECORD;
    const char* v = call.v + item.head * call.tiles * VALUE_RECORD;
    const char* mean = call.means + item.head * ((call.tiles + MEAN_TILES - 1) / MEAN_TILES) * MEAN_RECORD;
    barrier_wait(bar.q_empty(), q_parity);
    barrier_expect(bar.q_full(), GROUPS * 8192);
    const char* q = call.q + ((i64)item.head * call.blocks + item.block) * GROUPS * 8192;
    bulk_load(shared + Q_AT, q, GROUPS * 8192, bar.q_full());
#pragma unroll 1
    for (int j = 0; j < item.tiles(); j++) {
      barrier_wait(bar.k_empty(ring.slot), ring.parity ^ 1);
      barrier_expect(bar.k_full(ring.slot), KEY_RECORD);
      bulk_load(shared + K_AT + ring.slot * SLOT, k, KEY_RECORD, bar.k_full(ring.slot));
      barrier_wait(bar.v_empty(ring.slot), ring.parity ^ 1);
      barrier_expect(bar.v_full(ring.slot), VALUE_RECORD);
      bulk_load(shared + V_AT + ring.slot * SLOT, v, VALUE_RECORD, bar.v_full(ring.slot));
      k += KEY_RECORD;
      v += VALUE_RECORD;
      ring.next();
      if (means && j % MEAN_TILES == 0) {
        barrier_wait(bar.mean_empty(mean_ring.slot), mean_ring.parity ^ 1);
        barrier_expect(bar.mean_full(mean_ring.slot), MEAN_RECORD);
        bulk_load(shared + MEANS_AT + mean_ring.slot * MEAN_RECORD, mean, MEAN_RECORD, bar.mean_full(mean_ring.slot));
        mean += MEAN_RECORD;
        mean_ring.next();
      }
    }
  }
}

// A row's (sum, maximum) of a tile, kept until the tile means are restored; even lanes write row g, odd ones g + 8.
// sums: this lane's row g of tile 0. Place 16 holds the sum over all tiles before: that saves a register in the loop.
DEVICE void record_sums(u32 sums, int tile, int lane, float sum, float m) {
  if (!(lane & 2)) store_shared2(sums + tile * 512 + (lane & 1) * 64, sum, m);
}
// The recorded sums as an A fragment, moved to the maximum m (of this lane's own row); tiles from count on are 0.
// rest: what rounding left, so that fragment + rest keep at least 16 bits.
template <bool FP16>
DEVICE void gather_sums(u32 sums, int lane, int count, float m, u32 (&r)[4], u32 (&rest)[4]) {
  const bool second = lane & 1;
  float maxima[2], total[2] = {0.f, 0.f}, before, m_before;
  both_rows(m, second, maxima[0], maxima[1]);
  __syncwarp();
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const int tile = (lane & 3) * 2 + (i >> 1) * 8;
    const u32 at = sums + tile * 512 + (i & 1) * 64;
    float x, y, mx, my;
    load_shared2(at, x, mx);
    load_shared2(at + 512, y, my);
    x = tile < count ? x * exp2_fast((mx - maxima[i & 1]) * 0.125f) : 0.f;
    y = tile + 1 < count ? y * exp2_fast((my - maxima[i & 1]) * 0.125f) : 0.f;
    total[i & 1] += x + y;
    r[i] = FP16 ? pack_f16(x, y) : pack_bf16(x, y);
    if (FP16) rest[i] = pack_f16(x - low_f16(r[i]), y - low_f16(r[i] >> 16));
    else rest[i] = pack_bf16(x - __uint_as_float(r[i] << 16), y - __uint_as_float(r[i] & 0xFFFF0000u));
  }
  load_shared2(sums + MEAN_TILES * 512 + (lane & 1) * 64, before, m_before);
  before = before * exp2_fast((m_before - m) * 0.125f) + quad_sum(total[0], total[1], second);
  __syncwarp();
  record_sums(sums, MEAN_TILES, lane, before, m);
}

DEVICE float total_sum(u32 sums, int lane) {
  __syncwarp();
  return load_shared(sums + MEAN_TILES * 512 + (lane & 1) * 64);
}

// out and lse of this warp's rows. row: this lane's row g; m in codes; the rest as in epilogue.cuh
template <typename Scales>
DEVICE void store_rows(const Call& call, const Item& item, const float (&o)[64], float l, float m, i64 row, int lane,
                       float sum_scale, Scales v_scale) {
  store_rows(call, item.head, row, o, l, 0.125f * m, lane, sum_scale, v_scale);
}
