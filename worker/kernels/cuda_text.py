"""CUDA source that the products of planes and of blocks share: instructions, and where a sum goes."""

from collections.abc import Mapping

INSTRUCTIONS = r"""
// Integer sums that start at 0x4B400000 are, read as a float, 12582912 + sum: that saves the slow conversion.
#define MAGIC 0x4B400000
#define PIVOT 12582912.0f

__device__ __forceinline__ float half_bits(unsigned bits) {
  float value;
  asm("{ .reg .f16 h; mov.b16 h, %1; cvt.f32.f16 %0, h; }" : "=f"(value) : "h"((unsigned short)bits));
  return value;
}

__device__ __forceinline__ unsigned add_halves(unsigned a, unsigned b) {
  unsigned sum;
  asm("add.rn.f16x2 %0, %1, %2;" : "=r"(sum) : "r"(a), "r"(b));
  return sum;
}

#if __CUDA_ARCH__ >= 800
__device__ __forceinline__ void mma32(int* c, int start, const unsigned* a, const unsigned* b) {
  asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%10,%10,%10,%10};"
      : "=r"(c[0]), "=r"(c[1]), "=r"(c[2]), "=r"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "r"(start));
}

__device__ __forceinline__ void mma16(int* c, unsigned a0, unsigned a1, unsigned b) {
  asm("mma.sync.aligned.m16n8k16.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5}, {%6}, {%7,%7,%7,%7};"
      : "=r"(c[0]), "=r"(c[1]), "=r"(c[2]), "=r"(c[3]) : "r"(a0), "r"(a1), "r"(b), "r"(0));
}

__device__ __forceinline__ void mma_halves(float* c, const unsigned* a, uint2 b) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%10,%10,%10,%10};"
      : "=f"(c[0]), "=f"(c[1]), "=f"(c[2]), "=f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b.x), "r"(b.y), "f"(0.0f));
}
#else  // Turing: the same in pieces of its size, whose operands lie in threads alike
__device__ __forceinline__ void mma_piece(int* c, unsigned a, unsigned b) {
  asm("mma.sync.aligned.m8n8k16.row.col.s32.s8.s8.s32 {%0,%1}, {%2}, {%3}, {%0,%1};"
      : "+r"(c[0]), "+r"(c[1]) : "r"(a), "r"(b));
}

__device__ __forceinline__ void mma_halves_piece(float* c, unsigned a0, unsigned a1, unsigned b) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5}, {%6}, {%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a0), "r"(a1), "r"(b));
}

__device__ __forceinline__ void mma32(int* c, int start, const unsigned* a, const unsigned* b) {
  c[0] = c[1] = c[2] = c[3] = start;
  mma_piece(c, a[0], b[0]);
  mma_piece(c + 2, a[1], b[0]);
  mma_piece(c, a[2], b[1]);
  mma_piece(c + 2, a[3], b[1]);
}

__device__ __forceinline__ void mma16(int* c, unsigned a0, unsigned a1, unsigned b) {
  c[0] = c[1] = c[2] = c[3] = 0;
  mma_piece(c, a0, b);
  mma_piece(c + 2, a1, b);
}

__device__ __forceinline__ void mma_halves(float* c, const unsigned* a, uint2 b) {
  c[0] = c[1] = c[2] = c[3] = 0.0f;
  mma_halves_piece(c, a[0], a[1], b.x);
  mma_halves_piece(c, a[2], a[3], b.y);
}
#endif

// Weights pass by the nearest cache, which is for activations. Volatile: loads stay where the source has them.
__device__ __forceinline__ void stream_two(unsigned* to, const void* from) {
  asm volatile("ld.global.nc.L1::no_allocate.v2.u32 {%0,%1}, [%2];" : "=r"(to[0]), "=r"(to[1]) : "l"(from));
}

__device__ __forceinline__ unsigned stream_part(const void* from) {  // its neighbours want the rest of the sector
  unsigned word;
  asm volatile("ld.global.nc.L1::evict_first.u32 %0, [%1];" : "=r"(word) : "l"(from));
  return word;
}

__device__ __forceinline__ unsigned stream_half(const void* from) {
  unsigned short half;
  asm volatile("ld.global.nc.L1::evict_first.u16 %0, [%1];" : "=h"(half) : "l"(from));
  return half;
}

"""

COPIES = r"""
// Copies into shared memory that go on beside all else.
__device__ __forceinline__ uint4* shared_memory() {
  extern __shared__ uint4 words[];
  return words;
}

#if __CUDA_ARCH__ >= 800
__device__ __forceinline__ void copy_piece(void* to, const void* from, int bytes) {  // 16, or 0 for zeros
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;"
               :: "r"((unsigned)__cvta_generic_to_shared(to)), "l"(from), "r"(bytes) : "memory");
}

__device__ __forceinline__ void copy_word(void* to, const void* from, int bytes) {  // 4, or 0 for zeros
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;"
               :: "r"((unsigned)__cvta_generic_to_shared(to)), "l"(from), "r"(bytes) : "memory");
}

__device__ __forceinline__ void await_copies() {  // this thread's
  asm volatile("cp.async.wait_all;" ::: "memory");
}
#else  // Turing has no such copies
__device__ __forceinline__ void copy_piece(void* to, const void* from, int bytes) {
  *(uint4*)to = bytes ? __ldg((const uint4*)from) : make_uint4(0, 0, 0, 0);
}

__device__ __forceinline__ void copy_word(void* to, const void* from, int bytes) {
  *(unsigned*)to = bytes ? __ldg((const unsigned*)from) : 0;
}

__device__ __forceinline__ void await_copies() {}
#endif

"""

DELIVER = r"""
// A sum, and where it is partial to the other ranks at once, value and number in one word.
__device__ __forceinline__ void deliver(float sum, float* out, int out_stride, int n, int b,
                                        unsigned long long* const* inboxes, const int* sequence, int first, int width,
                                        int ranks, int rank) {
  out[(long)b * out_stride + n] = sum;
  if (ranks > 1) {
    int number = sequence[b] + 1;
    long to = ((long)((number & 1) * ranks + rank) * ROWS + b) * width + first + n;
    unsigned long long word = ((unsigned long long)number << 32) | __float_as_uint(sum);
#pragma unroll 1
    for (int peer = 0; peer < ranks; peer++)
      if (peer != rank) ((volatile unsigned long long*)inboxes[peer])[to] = word;
  }
}
"""


def defines(facts: Mapping[str, object]) -> str:
    return "".join(f"#define {name} {value}\n" for name, value in facts.items())
