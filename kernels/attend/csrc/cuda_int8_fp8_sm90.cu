// attend() for sm_90a with E4M3 values: `int8_fp8` (USE_INT8_QK=1) and `fp8_fp8` (USE_INT8_QK=0) of the recipes.
// Host side: ../cuda_int8_fp8_sm90.py. Must match ../reference.py. Switches: USE_INT8_QK, USE_EXPCAST, USE_MEANS.
//
// A warpgroup's tile: S = Q K; probabilities as E4M3 bytes against the true running maximum; T = P [R | 1] into a
// fresh accumulator, whose 8 extra columns of ones (zero at absent keys) give the row sum of the decoded bytes;
// O = alpha O + T in fp32, so that no more than 128 keys stay in the tensor core's short accumulator. Absent keys
// repeat the last real key of the tile and have zero value and zero one: nothing is masked here.
// Means: (row sum, maximum) of 16 tiles wait in shared memory; one 16-bit product adds their outer products (Eq. 6).
// S and T take the same registers, so each warpgroup is serial and the three overlap one another.
// Bound by: register-file writes beside 32-bit accumulators (tests/bench/NOTES.md).
#define KEY_TAIL 16
#define VALUE_TAIL 1024
#include "frame.cuh"

#if USE_INT8_QK
typedef u32 Score;
#else
typedef float Score;
#endif

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
    const int tiles = __shfl_sync(~0u, item_of(call, index).tiles(), 0);
    const int q_row = index * BLOCK_ROWS + group * 64 + warp * 16 + lane / 4 + (second ? 8 : 0);
    const float q_scale = __ldg(call.q_scale + q_row) * call.code_scale;
    float o[64], t[68], l = 0.f, m = MINUS_INFINITY;  // l, m: row g in even lanes, g + 8 in odd ones
#pragma unroll
    for (int i = 0; i < 64; i++) o[i] = 0.f;
    if (USE_MEANS) record_sums(sums, MEAN_TILES, lane, 0.f, MINUS_INFINITY);
    barrier_wait(bar.q_full(), q_parity);
#pragma unroll 1
    for (int first = 0; first < tiles; first += MEAN_TILES) {
      const int count = min(MEAN_TILES, tiles - first);
#pragma unroll 1
      for (int j = 0; j < count; j++) {
        Score s[64];
        u32 p[16];
        preload(s);
        barrier_wait(bar.k_full(ring.slot), ring.parity);
        float a0, a1;
        const float k_scale = load_shared(shared + K_AT + ring.slot * SLOT + 16384 + (lane & 3) * 4);
        both_rows(q_scale, second, a0, a1);
        a0 *= k_scale;
        a1 *= k_scale;
        pin(s);
        wgmma_fence();
        multiply_qk(s, q, tile_descriptor(shared + K_AT + ring.slot * SLOT));
        wgmma_commit();
        wgmma_wait();
        pin(s);
        release_loaded(bar.k_empty(ring.slot), lane);

        const float raised = raise_max(s, a0, a1, m, second);
        float m0, m1, alpha0, alpha1;
        both_rows(raised, second, m0, m1);
        probabilities<USE_EXPCAST>(s, a0, a1, m0, m1, p);
        const float alpha = exp2_fast((m - raised) * 0.125f);
        m = raised;
        both_rows(alpha, second, alpha0, alpha1);

        barrier_wait(bar.v_full(ring.slot), ring.parity);
        const u64 v = tile_descriptor(shared + V_AT + ring.slot * SLOT);
        pin(p);
        wgmma_fence();
        wgmma_e4m3_136<0>(t, p, v);
        wgmma_e4m3_136<1>(t, p + 4, v + 2);
        wgmma_e4m3_136<1>(t, p + 8, v + 4);
        wgmma_e4m3_136<1>(t, p + 12, v + 6);
        wgmma_commit();
        wgmma_wait();
        pin(t);
        release(bar.v_empty(ring.slot), lane);
        ring.next();
        const float sum = second ? t[66] : t[64];
        if (USE_MEANS) record_sums(sums, j, lane, sum, m);
        else l = fmaf(l, alpha, sum);
#pragma unroll
        for (int i = 0; i < 64; i++) o[i] = fmaf(o[i], (i & 2) ? alpha1 : alpha0, t[i]);
      }
      if (USE_MEANS) {
        // not t: ptxas then pins both uses to one place, runs out of registers and serialises every product
        float u[64];
        u32 r[4], rest[4];
        gather_sums<true>(sums, lane, count, m, r, rest);
        barrier_wait(bar.mean_full(mean_ring.slot), mean_ring.parity);
        pin(r);
        wgmma_fence();
        wgmma_f16<0>(u, r, mean_descriptor(shared + MEANS_AT + mean_ring.slot * MEAN_RECORD));
        wgmma_commit();
        wgmma_wait();
        pin(u);
        release(bar.mean_empty(mean_ring.slot), lane);
        mean_ring.next();
#pragma unroll
        for (int i = 0; i < 64; i++) o[i] += u[i];
      }
    }
    release(bar.q_empty(), lane);
    if (USE_MEANS) l = total_sum(sums, lane);
    constexpr float SUM_SCALE = USE_EXPCAST ? 1.f / (256.f * 1.00928f) : 1.f / 256.f;
    // worked out again, so that no register holds it through the loop
    const Item item = item_of(call, index);
    const int row = item.block * BLOCK_ROWS + group * 64 + warp * 16 + lane / 4;
    store_rows(call, item, o, l, m, row, lane, SUM_SCALE, call.v_scale);
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) attend_e4m3(const __grid_constant__ Call call) {
  extern __shared__ char memory[];
  const u32 shared = (shared_address(memory) + 1023) & ~1023u;
  const Barriers bar{shared + BARRIERS_AT};
  if (threadIdx.x == 0) bar.init();
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
