// Keys by tile, as both preparations read them; and a tile of values through shared memory: rows come in, each of 256
// threads takes channels c = 2 (thread / 4) and c + 1 of the 32 keys from 32 a, a = thread % 4, and the record goes out.
#pragma once
#include "rows.cuh"

template <typename Job>
DEVICE int count_of(const Job& job, int batch) {
  return job.key_count ? __ldg(job.key_count + batch) : (int)job.keys;
}
// Token of entry i of a head's order
template <typename Job>
DEVICE i64 token_at(const Job& job, int bh, i64 i) {
  return job.order ? __ldg(job.order + bh * job.keys + i) : i;
}

template <typename T>
struct __align__(2 * sizeof(T)) Pair {
  u32 words[sizeof(T) / 2];
};
// pairs: [128 keys][64], a row of group a turned by 8 a: no bank conflict either way. Absent keys are zero for the sum.
template <typename T>
DEVICE void put_row(Pair<T>* pairs, int key, int count, Eight<T>& loaded) {
  if (key >= count)
#pragma unroll
    for (u32& word : loaded.words) word = 0;
  *(Eight<T>*)(pairs + key * 64 + (threadIdx.x % 16 * 4 + 8 * (key / 32)) % 64) = loaded;
}
template <typename T>
DEVICE void take_channels(const Pair<T>* pairs, float (&x)[32], float (&y)[32], float& sum_x, float& sum_y) {
  const int a = threadIdx.x & 3, pair = threadIdx.x / 4;
  sum_x = sum_y = 0.f;
#pragma unroll
  for (int k = 0; k < 32; k++) {
    const Pair<T> p = pairs[(32 * a + k) * 64 + (pair + 8 * a) % 64];
    sum_x += x[k] = element<T>(p.words, 0);
    sum_y += y[k] = element<T>(p.words, 1);
  }
}
template <int BYTES>
DEVICE void write_record(char* to, const char* from) {
  for (int i = threadIdx.x; i < BYTES / 16; i += 256) ((uint4*)to)[i] = ((const uint4*)from)[i];
}
