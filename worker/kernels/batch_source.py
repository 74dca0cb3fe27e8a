'''CUDA source of the product of a quantised matrix with 2 to 16 rows of int8 activations, for NVRTC.

The codes go to the matrix units as they are: one `mma` multiplies 16 rows of the matrix by 8 of activations over 32
columns in int8, its integer sums are exact, and scales are applied to them a group at a time. So the weights are read
and unpacked once for all rows. Warps of a block share the columns of the same 16 (or 32) matrix rows; their shares are
added in warp order, so results do not depend on timing. Which thread holds which column is free as long as weights and
activations agree; here a thread takes eight neighbouring bytes (four and four where scales span 16 columns).

Integer sums start at 0x4B400000: read as a float that is 12582912 + sum, which saves the slow conversion.
'''

from .exchange import MOST_ROWS
from .quant_planes import PlaneFormat

WARPS = 8

SOURCE = r"""
#define MAGIC 0x4B400000
#define PIVOT 12582912.0f

__device__ __forceinline__ float half_bits(unsigned bits) {
  float value;
  asm("{ .reg .f16 h; mov.b16 h, %1; cvt.f32.f16 %0, h; }" : "=f"(value) : "h"((unsigned short)bits));
  return value;
}

__device__ __forceinline__ void mma32(int* c, const int* a, const int* b) {
  asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

__device__ __forceinline__ void mma16(int* c, int a0, int a1, int b) {
  asm("mma.sync.aligned.m16n8k16.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5}, {%6}, {%0,%1,%2,%3};"
      : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3]) : "r"(a0), "r"(a1), "r"(b));
}

// Two words of eight codes of one row: columns of this thread in the group's first half, and in its second.
struct Row { int low[2]; int top[2]; };

__device__ __forceinline__ Row codes_of(const unsigned char* codes, const unsigned* high, long row, int groups, int G,
                                        int t) {
  Row r;
#if BITS == 8
  const unsigned char* at = codes + row * groups * 64 + (long)G * 64 + 8 * t;
  int2 low = *(const int2*)at, top = *(const int2*)(at + 32);
  r.low[0] = low.x; r.low[1] = low.y; r.top[0] = top.x; r.top[1] = top.y;
#else
  const unsigned char* at = codes + (row * groups + G) * 32;
#if KIND == 1
  int w0 = *(const int*)(at + 4 * t), w1 = *(const int*)(at + 16 + 4 * t);
#else
  int2 both = *(const int2*)(at + 8 * t);
  int w0 = both.x, w1 = both.y;
#endif
  r.low[0] = w0 & 0x0F0F0F0F; r.low[1] = w1 & 0x0F0F0F0F;
  r.top[0] = (w0 >> 4) & 0x0F0F0F0F; r.top[1] = (w1 >> 4) & 0x0F0F0F0F;
#if HIGH == 1
  unsigned h = high[(row * groups + G) * 2 + t / 2] >> ((t & 1) * 4);
  r.low[0] |= (h & 0x01010101) << 4; r.top[0] |= ((h >> 1) & 0x01010101) << 4;
  r.low[1] |= ((h >> 2) & 0x01010101) << 4; r.top[1] |= ((h >> 3) & 0x01010101) << 4;
#elif HIGH == 2
  unsigned h = high[(row * groups + G) * 4 + t];
  r.low[0] |= (h & 0x03030303) << 4; r.top[0] |= ((h >> 2) & 0x03030303) << 4;
  r.low[1] |= ((h >> 4) & 0x03030303) << 4; r.top[1] |= ((h >> 6) & 0x03030303) << 4;
#endif
#endif
  return r;
}

// Factors of one row and group: for each half (with KIND 1 each 16 columns) what sums and activations are scaled by.
struct Factors { float scale[4]; float least[2]; };

__device__ __forceinline__ Factors factors_of(const unsigned* scales, const unsigned* supers, long row, int groups,
                                              int G) {
  Factors f;
#if KIND == 0
  unsigned packed = scales[row * groups + G], pair = supers[row * (groups / 4) + G / 4];
  float d = half_bits(pair & 0xFFFF), m = -half_bits(pair >> 16);
  f.scale[0] = d * (float)(packed & 255); f.least[0] = m * (float)((packed >> 8) & 255);
  f.scale[1] = d * (float)((packed >> 16) & 255); f.least[1] = m * (float)(packed >> 24);
#elif KIND == 1
  int packed = (int)scales[row * groups + G];
  float d = half_bits(((const unsigned short*)supers)[row * (groups / 4) + G / 4]);
  f.scale[0] = d * (float)((packed << 24) >> 24); f.scale[1] = d * (float)((packed << 16) >> 24);
  f.scale[2] = d * (float)((packed << 8) >> 24); f.scale[3] = d * (float)(packed >> 24);
#elif KIND == 2
  unsigned pair = supers[row * groups + G];
  f.scale[0] = half_bits(pair & 0xFFFF); f.scale[1] = half_bits(pair >> 16);
  f.least[0] = -ZERO * f.scale[0]; f.least[1] = -ZERO * f.scale[1];
#else
  unsigned a = supers[(row * groups + G) * 2], b = supers[(row * groups + G) * 2 + 1];
  f.scale[0] = half_bits(a & 0xFFFF); f.least[0] = half_bits(a >> 16);
  f.scale[1] = half_bits(b & 0xFFFF); f.least[1] = half_bits(b >> 16);
#endif
  return f;
}

// out[b * out_stride + n] = sum over k of W[n, k] x[b, k]. [K / 32][16 rows]: `facts` scale and sum, `sums` of halves.
extern "C" __global__ void __launch_bounds__(WARPS * 32, BLOCKS) multiply_batch(
    const unsigned char* codes, const unsigned* high, const unsigned* scales, const unsigned* supers,
    const signed char* x, const float2* facts, const float2* sums, float* out, int out_stride, int rows, int batch,
    int groups, unsigned long long* const* inboxes, const int* sequence, int first, int width, int ranks, int rank) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, t = lane & 3;
  const long columns = (long)groups * 64;
  const int base = blockIdx.x * (16 * MT);
  float total[MT][NT][4];
  long row[MT][2];
  const signed char* x_row[NT];
#pragma unroll
  for (int m = 0; m < MT; m++) {
    row[m][0] = min(base + m * 16 + g, rows - 1);
    row[m][1] = min(base + m * 16 + g + 8, rows - 1);
#pragma unroll
    for (int n = 0; n < NT; n++)
#pragma unroll
      for (int i = 0; i < 4; i++) total[m][n][i] = 0.0f;
  }
#pragma unroll
  for (int n = 0; n < NT; n++) x_row[n] = x + (long)min(n * 8 + g, batch - 1) * columns;
#pragma unroll 1
  for (int G = warp; G < groups; G += WARPS) {
    Row code[MT][2];
    Factors factor[MT][2];
#pragma unroll
    for (int m = 0; m < MT; m++)
#pragma unroll
      for (int r = 0; r < 2; r++) code[m][r] = codes_of(codes, high, row[m][r], groups, G, t);
#pragma unroll
    for (int m = 0; m < MT; m++)
#pragma unroll
      for (int r = 0; r < 2; r++) factor[m][r] = factors_of(scales, supers, row[m][r], groups, G);
#pragma unroll
    for (int half = 0; half < 2; half++) {
#pragma unroll
      for (int n = 0; n < NT; n++) {
        const signed char* at = x_row[n] + (long)G * 64 + 32 * half;
        float4 fact = *(const float4*)(facts + (G * 2 + half) * 16 + n * 8 + 2 * t);  // of two rows
#if KIND == 1
        int b[2] = {*(const int*)(at + 4 * t), *(const int*)(at + 16 + 4 * t)};
        float4 sum = *(const float4*)(sums + (G * 2 + half) * 16 + n * 8 + 2 * t);
#else
        int2 pair = *(const int2*)(at + 8 * t);
        int b[2] = {pair.x, pair.y};
#endif
#pragma unroll
        for (int m = 0; m < MT; m++) {
          const int* u = half ? code[m][0].top : code[m][0].low;
          const int* l = half ? code[m][1].top : code[m][1].low;
#if KIND == 1
#pragma unroll
          for (int part = 0; part < 2; part++) {
            int c[4] = {MAGIC, MAGIC, MAGIC, MAGIC};
            mma16(c, u[part], l[part], b[part]);
#pragma unroll
            for (int i = 0; i < 4; i++) {
              float scale = factor[m][i / 2].scale[half * 2 + part];
              float x_scale = i & 1 ? fact.z : fact.x;
              float x_sum = part ? (i & 1 ? sum.w : sum.y) : (i & 1 ? sum.z : sum.x);
              total[m][n][i] += scale * ((__int_as_float(c[i]) - PIVOT) * x_scale - (float)ZERO * x_sum);
            }
          }
#else
          int a[4] = {u[0], l[0], u[1], l[1]};
          int c[4] = {MAGIC, MAGIC, MAGIC, MAGIC};
          mma32(c, a, b);
#pragma unroll
          for (int i = 0; i < 4; i++) {
            float x_scale = i & 1 ? fact.z : fact.x;
            total[m][n][i] += factor[m][i / 2].scale[half] * ((__int_as_float(c[i]) - PIVOT) * x_scale);
#if KIND != 2 || ZERO != 0
            total[m][n][i] += factor[m][i / 2].least[half] * (i & 1 ? fact.w : fact.y);
#endif
          }
#endif
        }
      }
    }
  }
  __shared__ float shares[WARPS][MT * 16][NT * 8 + 1];
#pragma unroll
  for (int m = 0; m < MT; m++)
#pragma unroll
    for (int n = 0; n < NT; n++)
#pragma unroll
      for (int i = 0; i < 4; i++) shares[warp][m * 16 + g + (i / 2) * 8][n * 8 + 2 * t + (i & 1)] = total[m][n][i];
  __syncthreads();
  for (int i = threadIdx.x; i < MT * 16 * NT * 8; i += WARPS * 32) {
    int n = i % (MT * 16), b = i / (MT * 16);
    float sum = 0.0f;
#pragma unroll
    for (int w = 0; w < WARPS; w++) sum += shares[w][n][b];
    if (base + n < rows && b < batch) {
      out[(long)b * out_stride + base + n] = sum;
      if (ranks > 1) {  // a partial sum: to the other ranks at once, value and number in one word
        int number = sequence[b] + 1;
        long at = ((long)((number & 1) * ranks + rank) * MOST_ROWS + b) * width + first + base + n;
        for (int peer = 0; peer < ranks; peer++)
          if (peer != rank)
            ((volatile unsigned long long*)inboxes[peer])[at] =
                ((unsigned long long)number << 32) | __float_as_uint(sum);
      }
    }
  }
}
"""


def source(form: PlaneFormat, tiles: int, rows_of_eight: int, blocks: int) -> str:
    """For one type: `tiles` times 16 matrix rows a block, `rows_of_eight` times 8 rows of activations.

    `blocks`: so many must fit a multiprocessor at once, which bounds registers.
    """
    facts = {
        "BITS": form.code_bits, "HIGH": form.high_bits, "KIND": int(form.scale_kind), "ZERO": form.zero,
        "MT": tiles, "NT": rows_of_eight, "BLOCKS": blocks,
        "WARPS": WARPS, "MOST_ROWS": MOST_ROWS,
    }  # fmt: skip
    return "".join(f"#define {name} {value}\n" for name, value in facts.items()) + SOURCE


def shared_bytes(tiles: int, rows_of_eight: int) -> int:
    """Of a block: every warp's share of its results."""
    return 4 * WARPS * (16 * tiles) * (8 * rows_of_eight + 1)
