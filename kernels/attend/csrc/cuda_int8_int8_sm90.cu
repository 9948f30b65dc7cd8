// attend() for sm_90a, `int8_int8` (I1 to I6): U8 probabilities against the tile's own maximum, S8 values with a
// scale per tile and channel, exact int32 products, fp32 across tiles.
// Host side: ../cuda_int8_int8_sm90.py. Must match ../reference.py. Switches: USE_MEANS, USE_F16_MEANS (else bf16).
//
// Same frame as cuda_int8_fp8_sm90.cu. Both products start from preloaded accumulators, so neither needs a conversion.
// Half of the preload comes from the end of the slot, half by moves.
// Keys of a tile come by falling size, 16 to a scale, so a lane has two scales a tile. With means the row sum is that of
// the probabilities before rounding: what rounding takes from a tile comes back as its mean. Without means numerator
// and sum must lose alike: dp4a over the bytes. Absent keys repeat a real one; a short last tile clears their bytes.
// O is rescaled only in tiles where a maximum of the warp moved.
// Bound by: instruction issue, 776 a tile and warp with means, 720 without (tests/bench/NOTES.md).
#define KEY_TAIL 32
#define VALUE_TAIL 512
#include "frame.cuh"

constexpr int SPARE = SLOT - 16;  // the end of every slot, which no copy reaches: PRELOAD four times
static_assert(KEY_RECORD <= SPARE && VALUE_RECORD <= SPARE, "a record reaches the spare bytes");

// o += v_scale * w * n; scales: this lane's first pair of the tile's [128] scales. Returns the last one.
DEVICE float merge_tile(float (&o)[64], const u32 (&n)[64], float w0, float w1, u32 scales) {
  const float c0 = -PRELOADED * w0, c1 = -PRELOADED * w1;
  float x, y;
#pragma unroll
  for (int j = 0; j < 16; j++) {
    load_shared2(scales + 32 * j, x, y);
    o[4 * j] = fmaf(fmaf(value(n[4 * j]), w0, c0), x, o[4 * j]);
    o[4 * j + 1] = fmaf(fmaf(value(n[4 * j + 1]), w0, c0), y, o[4 * j + 1]);
    o[4 * j + 2] = fmaf(fmaf(value(n[4 * j + 2]), w1, c1), x, o[4 * j + 2]);
    o[4 * j + 3] = fmaf(fmaf(value(n[4 * j + 3]), w1, c1), y, o[4 * j + 3]);
  }
  return y;
}

// o += sums of 16 tiles times their 16-bit means; the sums in two parts, so that they lose nothing
DEVICE void restore_means(float (&o)[64], u32 sums, int lane, int count, float m, u64 means) {
  float u[64];
  u32 r[4], rest[4];
  gather_sums<USE_F16_MEANS>(sums, lane, count, m, r, rest);
  pin(r);
  pin(rest);
  wgmma_fence();
#if USE_F16_MEANS
  wgmma_f16<0>(u, r, means);
  wgmma_f16<1>(u, rest, means);
#else
  wgmma_bf16<0>(u, r, means);
  wgmma_bf16<1>(u, rest, means);
#endif
  wgmma_commit();
  wgmma_wait();
  pin(u);
#pragma unroll
  for (int i = 0; i < 64; i++) o[i] += u[i];
}

// Row g of a thread's accumulators, in its block
DEVICE int row_of(u32 thread) { return thread / 32 * 16 + thread % 32 / 4; }

DEVICE void attend_rows(const Call& call, u32 shared, Barriers bar, int group) {
  const int lane = threadIdx.x & 31, warp = (threadIdx.x >> 5) & 3;
  const bool second = lane & 1;
  const u32 sums = shared + SUMS_AT + group * SUMS_BYTES + (warp * 16 + lane / 4) * 8;
  const u64 q = tile_descriptor(shared + Q_AT + group * 8192);
  Ring<STAGES> ring;
  Ring<2> mean_ring;
  u32 q_parity = 0;
#pragma unroll 1
  for (int index = blockIdx.x; index < call.items; index += gridDim.x, q_parity ^= 1) {
    // a shuffle tells ptxas that every lane has the same count: the loop's state then lives in uniform registers
    const int keys = __shfl_sync(~0u, item_of(call, index).keys, 0), tiles = (keys + TILE - 1) / TILE;
    const int q_row = index * BLOCK_ROWS + row_of(thread_anew()) + (second ? 8 : 0);
    const float q_scale = __ldg(call.q_scale + q_row) * call.code_scale;
    float o[64], l = 0.f, m = MINUS_INFINITY;  // l, m: row g in even lanes, g + 8 in odd ones
#pragma unroll
    for (int i = 0; i < 64; i++) o[i] = 0.f;
    if (USE_MEANS) record_sums(sums, MEAN_TILES, lane, 0.f, MINUS_INFINITY);
    barrier_wait(bar.q_full(), q_parity);
#pragma unroll 1
    for (int first = 0; first < tiles; first += MEAN_TILES) {
      const int count = min(MEAN_TILES, tiles - first);
#pragma unroll 1
      for (int j = 0; j < count; j++) {
        const u32 k_at = shared + K_AT + ring.slot * SLOT, v_at = shared + V_AT + ring.slot * SLOT;
        u32 s[64], n[64], p[16];
        preload_by_halves(s, k_at + SPARE);
        barrier_wait(bar.k_full(ring.slot), ring.parity);
        float a0, a1, m0, m1, lo, hi;
        load_shared2(k_at + 16384 + (lane & 3) * 8, lo, hi);
        both_rows(q_scale, second, a0, a1);
        const HalfScales a{{{a0 * lo, a1 * lo}, {a0 * hi, a1 * hi}}};
        pin(s);
        wgmma_fence();
        multiply_qk(s, q, tile_descriptor(k_at));
        wgmma_commit();
        wgmma_wait();
        pin(s);
        release_loaded(bar.k_empty(ring.slot), lane);

        const int left = keys - (first + j) * TILE;  // real keys of this tile, if fewer than a tile
        const float absent = left < TILE ? (float)min(max(32 * (lane & 3) + 32 - left, 0), 32) : 0.f;
        float sum0, sum1;
        const float tile_top = tile_max(s, a, second);
        both_rows(tile_top, second, m0, m1);
        probabilities_u8<USE_MEANS>(s, a, m0, m1, absent, p, sum0, sum1);
        if (left < TILE) drop_absent(p, left, lane);
        if (!USE_MEANS) byte_sums(p, sum0, sum1);

        preload_by_halves(n, v_at + SPARE);
        barrier_wait(bar.v_full(ring.slot), ring.parity);
        const u64 v = tile_descriptor(v_at);
        pin(n);
        pin(p);
        wgmma_fence();
        wgmma_u8s8<1>(n, p, v);
        wgmma_u8s8<1>(n, p + 4, v + 2);
        wgmma_u8s8<1>(n, p + 8, v + 4);
        wgmma_u8s8<1>(n, p + 12, v + 6);
        wgmma_commit();
        const float raised = fmaxf(m, tile_top), alpha = exp2_fast((m - raised) * 0.125f);
        const float w = exp2_fast((tile_top - raised) * 0.125f) * (1.f / 255.f);
        const float sum = quad_sum(sum0, sum1, second);
        m = raised;
        wgmma_wait();
        pin(n);
        if (__any_sync(~0u, alpha != 1.f)) {
          float alpha0, alpha1;
          both_rows(alpha, second, alpha0, alpha1);
#pragma unroll
          for (int i = 0; i < 64; i++) o[i] *= (i & 2) ? alpha1 : alpha0;
        }
        float w0, w1;
        both_rows(w, second, w0, w1);
        const float scale = merge_tile(o, n, w0, w1, v_at + 16384 + (lane & 3) * 8);
        // no scale is negative; asking makes ptxas place loads and fence so that the loop is 3% faster with means
        release_loaded(bar.v_empty(ring.slot), lane, !(scale < 0.f));
        ring.next();
        if (USE_MEANS) record_sums(sums, j, lane, sum * (1.f / 255.f), tile_top);
        else l = fmaf(l, alpha, w * sum);
      }
      if (USE_MEANS) {
        barrier_wait(bar.mean_full(mean_ring.slot), mean_ring.parity);
        const u64 means = mean_descriptor(shared + MEANS_AT + mean_ring.slot * MEAN_RECORD);
        restore_means(o, sums, lane, count, m, means);
        release(bar.mean_empty(mean_ring.slot), lane);
        mean_ring.next();
      }
    }
    release(bar.q_empty(), lane);
    // worked out again, so that no register holds it through the loop
    const Item item = item_of(call, index);
    const int row = item.block * BLOCK_ROWS + row_of(thread_anew());
    if (USE_MEANS) l = total_sum(sums, lane);
    store_rows(call, item, o, l, m, row, lane, 1.f, nullptr);
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) attend_u8s8(const __grid_constant__ Call call) {
  extern __shared__ char memory[];
  const u32 shared = (shared_address(memory) + 1023) & ~1023u;
  const Barriers bar{shared + BARRIERS_AT};
  if (threadIdx.x == 0) bar.init();
  if (threadIdx.x < 4 * STAGES)  // two threads for each slot of keys and of values
    store_shared2(shared + K_AT + threadIdx.x / 2 * SLOT + SPARE + threadIdx.x % 2 * 8, PRELOADED, PRELOADED);
  __syncthreads();
  const int group = __shfl_sync(~0u, threadIdx.x / 128, 0);
  if (group == GROUPS) {
    give_registers<32>();
    if (threadIdx.x == GROUPS * 128) load_block(call, shared, bar, USE_MEANS);
  } else {
    take_registers<160>();
    attend_rows(call, shared, bar, group);
  }
}
