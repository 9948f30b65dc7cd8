// sm_90a instructions that CUDA C++ has no name for: wgmma, mbarriers, bulk copies, packed conversions.
// Header-free: NVRTC compiles it from memory, with no include path.
#pragma once

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;
#define DEVICE __device__ __forceinline__

constexpr int TILE = 128;      // keys of a tile
constexpr int HEAD_DIM = 128;  // channels; a shared-memory row of codes is 128 bytes

// ---- wgmma: accumulator lists ----

#define L8(a, b, c, d, e, f, g, h) "%" #a ",%" #b ",%" #c ",%" #d ",%" #e ",%" #f ",%" #g ",%" #h ","
#define L64                                                                                             \
  L8(0, 1, 2, 3, 4, 5, 6, 7) L8(8, 9, 10, 11, 12, 13, 14, 15) L8(16, 17, 18, 19, 20, 21, 22, 23)        \
  L8(24, 25, 26, 27, 28, 29, 30, 31) L8(32, 33, 34, 35, 36, 37, 38, 39)                                 \
  L8(40, 41, 42, 43, 44, 45, 46, 47) L8(48, 49, 50, 51, 52, 53, 54, 55) "%56,%57,%58,%59,%60,%61,%62,%63"
#define O8(t, d, i)                                                                                     \
  t(d[i]), t(d[i + 1]), t(d[i + 2]), t(d[i + 3]), t(d[i + 4]), t(d[i + 5]), t(d[i + 6]), t(d[i + 7])
#define O64(t, d)                                                                                       \
  O8(t, d, 0), O8(t, d, 8), O8(t, d, 16), O8(t, d, 24), O8(t, d, 32), O8(t, d, 40), O8(t, d, 48), O8(t, d, 56)

// d (+)= a b, 64 x 128 over 32 codes. a, b: descriptors of K-major 128-byte-swizzled images. ACC: 0 starts afresh.
template <int ACC>
DEVICE void wgmma_s8(u32 (&d)[64], u64 a, u64 b) {
  asm volatile("{.reg .pred p; setp.ne.b32 p,%66,0;\n"
               "wgmma.mma_async.sync.aligned.m64n128k32.s32.s8.s8 {" L64 "},%64,%65,p;}"
               : O64("+r", d) : "l"(a), "l"(b), "n"(ACC));
}
template <int ACC>
DEVICE void wgmma_e4m3(float (&d)[64], u64 a, u64 b) {
  asm volatile("{.reg .pred p; setp.ne.b32 p,%66,0;\n"
               "wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3 {" L64 "},%64,%65,p,1,1;}"
               : O64("+f", d) : "l"(a), "l"(b), "n"(ACC));
}
// 64 x 136, a in registers
template <int ACC>
DEVICE void wgmma_e4m3_136(float (&d)[68], const u32* a, u64 b) {
  asm volatile("{.reg .pred p; setp.ne.b32 p,%73,0;\n"
               "wgmma.mma_async.sync.aligned.m64n136k32.f32.e4m3.e4m3 {" L64 ",%64,%65,%66,%67},"
               "{%68,%69,%70,%71},%72,p,1,1;}"
               : O64("+f", d), "+f"(d[64]), "+f"(d[65]), "+f"(d[66]), "+f"(d[67])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(ACC));
}
// 64 x 128 over 32 codes, a unsigned in registers, b signed
template <int ACC>
DEVICE void wgmma_u8s8(u32 (&d)[64], const u32* a, u64 b) {
  asm volatile("{.reg .pred p; setp.ne.b32 p,%69,0;\n"
               "wgmma.mma_async.sync.aligned.m64n128k32.s32.u8.s8 {" L64 "},{%64,%65,%66,%67},%68,p;}"
               : O64("+r", d) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(ACC));
}
// 64 x 128 over 16 means, a in registers, b [16][128] N-major
#define WGMMA_16BIT(name, type)                                                                         \
  template <int ACC>                                                                                    \
  DEVICE void name(float* d, const u32* a, u64 b) {                                                     \
    asm volatile("{.reg .pred p; setp.ne.b32 p,%69,0;\n"                                                \
                 "wgmma.mma_async.sync.aligned.m64n128k16.f32." type " {" L64 "},{%64,%65,%66,%67},"    \
                 "%68,p,1,1,1;}"                                                                        \
                 : O64("+f", d) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(ACC));        \
  }
WGMMA_16BIT(wgmma_f16, "f16.f16")
WGMMA_16BIT(wgmma_bf16, "bf16.bf16")

DEVICE void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DEVICE void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
DEVICE void wgmma_wait() { asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory"); }

// Keeps the compiler from moving register traffic of an asynchronous product across this line.
template <int N>
DEVICE void pin(float (&d)[N]) {
#pragma unroll
  for (int i = 0; i < N; i++) asm volatile("" : "+f"(d[i])::"memory");
}
template <int N>
DEVICE void pin(u32 (&d)[N]) {
#pragma unroll
  for (int i = 0; i < N; i++) asm volatile("" : "+r"(d[i])::"memory");
}

// Rows of 128 bytes, 128-byte swizzle, groups of 8 rows 1024 bytes apart. One 32-code step is +2 on the descriptor.
DEVICE u64 tile_descriptor(u32 shared) {
  return (u64)((shared & 0x3FFFF) >> 4) | (1ull << 16) | (64ull << 32) | (1ull << 62);
}
// 16-bit [16][128] N-major, 128-byte swizzle: halves of 64 channels 2048 bytes apart, groups of 8 rows 1024.
DEVICE u64 mean_descriptor(u32 shared) {
  return (u64)((shared & 0x3FFFF) >> 4) | (128ull << 16) | (64ull << 32) | (1ull << 62);
}

// ---- barriers and copies ----

DEVICE u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }
DEVICE void barrier_init(u32 bar, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0],%1;" ::"r"(bar), "r"(arrivals));
}
DEVICE void barrier_init_done() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  asm volatile("fence.proxy.async;" ::: "memory");
}
DEVICE void barrier_expect(u32 bar, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _,[%0],%1;" ::"r"(bar), "r"(bytes) : "memory");
}
DEVICE void barrier_arrive(u32 bar) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _,[%0];" ::"r"(bar) : "memory");
}
DEVICE void barrier_wait(u32 bar, u32 parity) {
  asm volatile("{.reg .pred p; WAIT: mbarrier.try_wait.parity.shared::cta.b64 p,[%0],%1; @p bra DONE; bra WAIT;"
               " DONE: }" ::"r"(bar), "r"(parity) : "memory");
}
DEVICE void bulk_load(u32 shared, const void* global, u32 bytes, u32 bar) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0],[%1],%2,[%3];" ::"r"(shared),
               "l"(global), "r"(bytes), "r"(bar) : "memory");
}
// Orders this thread's ordinary accesses of shared memory before asynchronous copies that follow.
DEVICE void proxy_fence() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
template <int REGISTERS>
DEVICE void take_registers() { asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS)); }
template <int REGISTERS>
DEVICE void give_registers() { asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(REGISTERS)); }
DEVICE float load_shared(u32 address) {
  float x;
  asm volatile("ld.shared.f32 %0,[%1];" : "=f"(x) : "r"(address));
  return x;
}
DEVICE void load_shared2(u32 address, float& x, float& y) {
  asm volatile("ld.shared.v2.f32 {%0,%1},[%2];" : "=f"(x), "=f"(y) : "r"(address));
}
DEVICE void store_shared2(u32 address, float x, float y) {
  asm volatile("st.shared.v2.f32 [%0],{%1,%2};" ::"r"(address), "f"(x), "f"(y) : "memory");
}

// threadIdx.x, read anew at every use: what is made of it then needs no register through a loop.
DEVICE u32 thread_anew() {
  u32 x;
  asm volatile("mov.u32 %0,%%tid.x;" : "=r"(x));
  return x;
}

// ---- arithmetic ----

DEVICE float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0,%1;" : "=f"(y) : "f"(x));
  return y;
}
DEVICE float log2_fast(float x) {
  float y;
  asm("lg2.approx.f32 %0,%1;" : "=f"(y) : "f"(x));
  return y;
}
// Four floats to bytes, round to nearest even, saturating to 0..255, x0 lowest. ptxas fuses it to two F2IP.
DEVICE u32 pack_u8(float x0, float x1, float x2, float x3) {
  u32 d;
  asm("{.reg .s32 a,b,c,e; .reg .b32 t;\n"
      "cvt.rni.s32.f32 a,%1; cvt.rni.s32.f32 b,%2; cvt.rni.s32.f32 c,%3; cvt.rni.s32.f32 e,%4;\n"
      "cvt.pack.sat.u8.s32.b32 t,e,c,0; cvt.pack.sat.u8.s32.b32 %0,b,a,t;}"
      : "=r"(d) : "f"(x0), "f"(x1), "f"(x2), "f"(x3));
  return d;
}
DEVICE u32 pack_e4m3(float x0, float x1, float x2, float x3) {
  u32 d;
  asm("{.reg .b16 l,h; cvt.rn.satfinite.e4m3x2.f32 l,%2,%1; cvt.rn.satfinite.e4m3x2.f32 h,%4,%3; mov.b32 %0,{l,h};}"
      : "=r"(d) : "f"(x0), "f"(x1), "f"(x2), "f"(x3));
  return d;
}
DEVICE u32 pack_f16(float lo, float hi) {
  u32 d;
  asm("cvt.rn.f16x2.f32 %0,%1,%2;" : "=r"(d) : "f"(hi), "f"(lo));
  return d;
}
DEVICE u32 pack_bf16(float lo, float hi) {
  u32 d;
  asm("cvt.rn.bf16x2.f32 %0,%1,%2;" : "=r"(d) : "f"(hi), "f"(lo));
  return d;
}
DEVICE float low_f16(u32 x) {
  float y;
  asm("{.reg .b16 l,h; mov.b32 {l,h},%1; cvt.f32.f16 %0,l;}" : "=f"(y) : "r"(x));
  return y;
}
// sum + the four unsigned bytes of x
DEVICE int add_bytes(u32 x, int sum) {
  int y;
  asm("dp4a.u32.u32 %0,%1,%2,%3;" : "=r"(y) : "r"(x), "r"(0x01010101u), "r"(sum));
  return y;
}
