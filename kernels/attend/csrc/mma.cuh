// Warp-wide products of sm_80 and newer, and the copies and barriers that feed them.
//
// Fragments of a lane with g = lane / 4, t = lane % 4, in products of 32 bytes (m16n8k32): A is row g, bytes 4 t to + 3;
// row g + 8, the same bytes; then both 16 bytes further. B is column g, bytes 4 t to + 3, then 16 further. C is row g,
// columns 2 t and 2 t + 1, then row g + 8. Operands lie in 128-byte-swizzled images, rows of 128 bytes whose 16-byte
// chunk c is at 16 (c ^ row % 8): A's rows are rows, B's columns are rows.
#pragma once
#include "hopper.cuh"

// ---- fragments ----

DEVICE void load_matrices(u32 at, u32 (&r)[4]) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3},[%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(at));
}
DEVICE void load_matrices_transposed(u32 at, u32 (&r)[4]) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3},[%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(at));
}
// Where this lane points load_matrices, for the first 32 bytes of an image's rows (the image starts on 1024 bytes):
// as A, one fragment of 16 rows; as B, fragments of 8 and the next 8 rows, two registers each.
DEVICE u32 a_address(u32 image, int lane) {
  return image + (lane & 15) * 128 + (((lane >> 4) ^ (lane & 7)) << 4);
}
DEVICE u32 b_address(u32 image, int lane) {
  return image + ((lane & 7) + (lane >> 4) * 8) * 128 + (((lane >> 3 & 1) ^ (lane & 7)) << 4);
}
// The same for bytes 32 step to 32 step + 31: the swizzle is an exclusive or, so a step is one too.
DEVICE u32 step_address(u32 first, int step) { return first ^ (step << 5); }

// d = c + a b. c may be other registers than d: a constant start then costs nothing.
DEVICE void mma_s8(u32* d, const u32 (&a)[4], u32 b0, u32 b1, const u32* c) {
  asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%10,%11,%12,%13};"
      : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "r"(c[0]), "r"(c[1]), "r"(c[2]), "r"(c[3]));
}
DEVICE void mma_u8s8(u32* d, const u32* a, u32 b0, u32 b1, const u32* c) {
  asm("mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%10,%11,%12,%13};"
      : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "r"(c[0]), "r"(c[1]), "r"(c[2]), "r"(c[3]));
}
// E4M3 with f16 sums: d[0] is row g, d[1] row g + 8, two columns each
DEVICE void mma_e4m3_f16(u32* d, const u32* a, u32 b0, u32 b1, const u32* c) {
  asm("mma.sync.aligned.m16n8k32.row.col.f16.e4m3.e4m3.f16 {%0,%1},{%2,%3,%4,%5},{%6,%7},{%8,%9};"
      : "=r"(d[0]), "=r"(d[1])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "r"(c[0]), "r"(c[1]));
}
// d += a b over 16 elements of 16 bits: a word holds two
template <bool FP16>
DEVICE void mma_16bit(float* d, const u32 (&a)[4], u32 b0, u32 b1) {
#define MMA_16BIT(type)                                                                                                \
  asm("mma.sync.aligned.m16n8k16.row.col.f32." type ".f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"          \
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1))
  if (FP16) MMA_16BIT("f16.f16");
  else MMA_16BIT("bf16.bf16");
}
DEVICE float high_f16(u32 x) {
  float y;
  asm("{.reg .b16 l,h; mov.b32 {l,h},%1; cvt.f32.f16 %0,h;}" : "=f"(y) : "r"(x));
  return y;
}
// x in registers that the compiler takes for variables: it neither folds them nor makes them again
template <int N>
DEVICE void opaque(u32 (&r)[N], u32 x) {
#pragma unroll
  for (int i = 0; i < N; i++) asm volatile("mov.b32 %0,%1;" : "=r"(r[i]) : "r"(x));
}

// ---- copies and barriers ----

DEVICE void copy_16(u32 shared, const void* global) {
  asm volatile("cp.async.cg.shared.global [%0],[%1],16;" ::"r"(shared), "l"(global) : "memory");
}
// This thread's arrival, once all its copies so far have landed
DEVICE void arrive_with_copies(u32 bar) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(bar) : "memory");
}
DEVICE void arrive(u32 bar) {
  asm volatile("{.reg .b64 state; mbarrier.arrive.shared.b64 state,[%0];}" ::"r"(bar) : "memory");
}
// USE_TRY_WAIT: waiting that suspends the warp; older cards ask again and again. (A test sets it.)
#ifndef USE_TRY_WAIT
#define USE_TRY_WAIT (__CUDA_ARCH__ >= 900)
#endif
DEVICE void wait_phase(u32 bar, u32 parity) {
#if USE_TRY_WAIT
  barrier_wait(bar, parity);
#else
  asm volatile("{.reg .pred p; WAIT: mbarrier.test_wait.parity.shared.b64 p,[%0],%1; @p bra DONE; bra WAIT;"
               " DONE: }" ::"r"(bar), "r"(parity) : "memory");
#endif
}
