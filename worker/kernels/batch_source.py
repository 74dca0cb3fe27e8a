'''CUDA source of the product of a quantised matrix with 2 to 16 rows of int8 activations, for NVRTC.

The codes go to the matrix units as they are: one `mma` multiplies 16 rows of the matrix by 8 of activations over 32
columns in int8. A warp takes 256 columns at a time (a *span*, the K types' block), over which activations have one
scale: types whose scales are whole numbers stay in whole numbers to the span's end, one multiply-add a sum, and
floats come in once a span. Mins and zero points need sums of activations only: one `mma` a span in f16, exact where
factors are whole, as sums of 16 codes are below 2048. For 16 rows of activations a span of 16 matrix rows takes 366
instructions of a warp (Q4_K: 2,368 bytes) or 632 (Q6_K: 3,360 bytes), where a scale a 32 columns took 570 and 874.

What bounds this is how much memory is asked for ahead: a warp loads its next span, of the next tile of rows too,
before it multiplies the one it holds. So blocks stay and take one tile of matrix rows after another. Warps of a block
share a tile's columns; their shares are added in warp order, so results do not depend on timing. Which thread holds
which column is free as long as weights and activations agree; here a thread takes eight neighbouring bytes (four and
four where scales span 16 columns).
'''

from ...proto.device_sizes import MOST_ROWS, SPAN
from .cuda_text import DELIVER, INSTRUCTIONS, defines
from .quant_planes import PlaneFormat

SOURCE = r"""
#define WORDS (BITS / 2)  // of a thread's codes, of one row and 64 columns
#define FACTORS (KIND == 3 ? 2 : 1)  // words of factors, of one row and 64 columns
#define LEAST (KIND != 2 || ZERO != 0)
#if KIND <= 1
typedef int Sum;
#else
typedef float Sum;
#endif

// One matrix row of a span as it lies in memory: this thread's codes, and the factors of group t of its four groups.
struct Row { unsigned code[4][WORDS], high[4], factor[FACTORS], super; };

// Group G of four; `at`: number of the first in the matrix. Beyond a row's end (of `inside` groups) there are zeros.
__device__ __forceinline__ void load_codes(Row& row, const unsigned char* codes, const unsigned* high, int at, int t,
                                           int G, int inside) {
  unsigned* to = row.code[G];
  row.high[G] = 0;
  if (!WHOLE && G >= inside) {
#pragma unroll
    for (int i = 0; i < WORDS; i++) to[i] = 0;
    return;
  }
#if BITS == 8
  stream_two(to, codes + at * 64L + G * 64 + 8 * t);
  stream_two(to + 2, codes + at * 64L + G * 64 + 32 + 8 * t);
#elif KIND == 1
  to[0] = stream_part(codes + at * 32L + G * 32 + 4 * t);
  to[1] = stream_part(codes + at * 32L + G * 32 + 16 + 4 * t);
#else
  stream_two(to, codes + at * 32L + G * 32 + 8 * t);
#endif
#if HIGH == 1
  row.high[G] = stream_part(high + at * 2L + G * 2 + t / 2);
#elif HIGH == 2
  row.high[G] = stream_part(high + at * 4L + G * 4 + t);
#endif
}

__device__ __forceinline__ void load_factors(Row& row, const unsigned* scales, const unsigned* supers, int at, int t,
                                             int inside) {
#if KIND <= 1
  row.factor[0] = stream_part(scales + (at + t));
  row.super = KIND == 0 ? stream_part(supers + (at >> 2)) : stream_half((const unsigned short*)supers + (at >> 2));
#else
  if (WHOLE || t < inside) {
#pragma unroll
    for (int i = 0; i < FACTORS; i++) row.factor[i] = stream_part(supers + (at + t) * (long)FACTORS + i);
  } else {
#pragma unroll
    for (int i = 0; i < FACTORS; i++) row.factor[i] = 0;
  }
#endif
}

// The codes of half a group of 64 columns, in bytes.
__device__ __forceinline__ void unpack(unsigned* to, const Row& row, int G, int half, int t) {
#if BITS == 8
  to[0] = row.code[G][half * 2]; to[1] = row.code[G][half * 2 + 1];
#else
  to[0] = (row.code[G][0] >> (4 * half)) & 0x0F0F0F0F;
  to[1] = (row.code[G][1] >> (4 * half)) & 0x0F0F0F0F;
#if HIGH == 1
  unsigned h = row.high[G] >> ((t & 1) * 4 + half);
  to[0] |= (h & 0x01010101) << 4; to[1] |= ((h >> 2) & 0x01010101) << 4;
#elif HIGH == 2
  unsigned h = row.high[G] >> (2 * half);
  to[0] |= (h & 0x03030303) << 4; to[1] |= h & 0x30303030;
#endif
#endif
}

// What sums of activations' codes are multiplied by, of groups 2t and 2t + 1 of 32: first and second 16 columns.
__device__ __forceinline__ void least_of(unsigned* first, unsigned* second, const unsigned* factor) {
#if KIND == 0  // bytes: 0x6400 + byte is 1024 + byte in f16
  *first = *second = add_halves(__byte_perm(factor[0], 0x64646464, 0x4341), 0xE400E400);
#elif KIND == 1  // signed ones, with 128 added
  *first = add_halves(__byte_perm(factor[0] ^ 0x80808080, 0x64646464, 0x4240), 0xE480E480);
  *second = add_halves(__byte_perm(factor[0] ^ 0x80808080, 0x64646464, 0x4341), 0xE480E480);
#elif KIND == 2
  *first = *second = factor[0];
#else
  *first = *second = __byte_perm(factor[0], factor[1], 0x7632);
#endif
}

// The sums of 32 columns (KIND 1: twice 16) into the span's.
__device__ __forceinline__ void add_scaled(Sum* sum, const unsigned (*u)[2], const unsigned* b,
                                           const unsigned (*factor)[FACTORS], int half) {
  int c[4];
#if KIND == 1
#pragma unroll
  for (int part = 0; part < 2; part++) {
    mma16(c, u[0][part], u[1][part], b[part]);
#pragma unroll
    for (int i = 0; i < 4; i++) sum[i] += (signed char)(factor[i / 2][0] >> (16 * half + 8 * part)) * c[i];
  }
#else
  unsigned a[4] = {u[0][0], u[1][0], u[0][1], u[1][1]};
  mma32(c, KIND == 0 ? 0 : MAGIC, a, b);
#pragma unroll
  for (int i = 0; i < 4; i++) {
#if KIND == 0
    sum[i] += (int)((factor[i / 2][0] >> (16 * half)) & 255) * c[i];
#elif KIND == 2
    sum[i] += half_bits((factor[i / 2][0] >> (16 * half)) & 0xFFFF) * (__int_as_float(c[i]) - PIVOT);
#else
    sum[i] += half_bits(factor[i / 2][half] & 0xFFFF) * (__int_as_float(c[i]) - PIVOT);
#endif
  }
#endif
}

// A span's result but for the scale of activations.
__device__ __forceinline__ float span_value(Sum sum, unsigned super, float least) {
#if KIND == 0
  return half_bits(super & 0xFFFF) * (float)sum - half_bits(super >> 16) * least;
#elif KIND == 1
  return half_bits(super) * ((float)sum - (float)ZERO * least);
#elif KIND == 2
  return sum - (float)ZERO * least;
#else
  return sum + least;
#endif
}

// out[b * out_stride + n] = sum over k of W[n, k] x[b, k]. For activations' layout see `QuantizedRows`; columns are
// 64 times `groups`. Any number of blocks will do: they take tiles of 16 * MT rows in turn. `shares`: [2], shared.
__device__ __forceinline__ void multiply_tiles(
    float (*shares)[WARPS][NT * 8][MT * 16 + 4], int block, int blocks, const unsigned char* codes,
    const unsigned* high, const unsigned* scales, const unsigned* supers, const signed char* x, const float* x_scales,
    const unsigned short* x_sums, float* out, int out_stride, int rows, int batch, int groups,
    unsigned long long* const* inboxes, const int* sequence, int first, int width, int ranks, int rank) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, warps = blockDim.x >> 5, g = lane >> 2, t = lane & 3;
  const int spans = (groups + 3) / 4, tiles = (rows + 16 * MT - 1) / (16 * MT);
  int tile = block, s = warp, turn = 0;
  float total[MT][NT][4] = {};
  Row row[MT][2];
#pragma unroll
  for (int m = 0; m < MT; m++)
#pragma unroll
    for (int r = 0; r < 2; r++) {
      int at = min((tile * MT + m) * 16 + r * 8 + g, rows - 1) * groups + s * 4;
      load_factors(row[m][r], scales, supers, at, t, groups - s * 4);
#pragma unroll
      for (int G = 0; G < 4; G++) load_codes(row[m][r], codes, high, at, t, G, groups - s * 4);
    }
#pragma unroll 1
  while (true) {
    const bool last = s + warps >= spans;  // of this tile, for this warp
    const int next = last ? warp : s + warps, next_tile = last ? tile + blocks : tile;
    const bool more = next_tile < tiles;
    unsigned factor[MT][2][FACTORS], super[MT][2];
    int at[MT][2];
#pragma unroll
    for (int m = 0; m < MT; m++)
#pragma unroll
      for (int r = 0; r < 2; r++) {
#pragma unroll
        for (int i = 0; i < FACTORS; i++) factor[m][r][i] = row[m][r].factor[i];
        super[m][r] = row[m][r].super;
        at[m][r] = min((next_tile * MT + m) * 16 + r * 8 + g, rows - 1) * groups + next * 4;
        if (more) load_factors(row[m][r], scales, supers, at[m][r], t, groups - next * 4);
      }
    Sum sum[MT][NT][4] = {};
    const signed char* x_span = x + (long)s * (16 * 256) + g * 32 + (KIND == 1 ? 4 : 8) * t;
#pragma unroll
    for (int G = 0; G < 4; G++) {
      unsigned byte[MT][2][2][2], scale[MT][2][FACTORS];  // [half][row]
#pragma unroll
      for (int m = 0; m < MT; m++)
#pragma unroll
        for (int r = 0; r < 2; r++) {
          unpack(byte[m][0][r], row[m][r], G, 0, t);
          unpack(byte[m][1][r], row[m][r], G, 1, t);
          if (more) load_codes(row[m][r], codes, high, at[m][r], t, G, groups - next * 4);
#pragma unroll
          for (int i = 0; i < FACTORS; i++) scale[m][r][i] = __shfl_sync(0xFFFFFFFF, factor[m][r][i], G, 4);
        }
#pragma unroll
      for (int half = 0; half < 2; half++) {
#pragma unroll
        for (int n = 0; n < NT; n++) {
          const signed char* from = x_span + (G * 2 + half) * (16 * 32) + n * (8 * 32);
#if KIND == 1
          unsigned b[2] = {__ldg((const unsigned*)from), __ldg((const unsigned*)(from + 16))};
#else
          uint2 pair = __ldg((const uint2*)from);
          unsigned b[2] = {pair.x, pair.y};
#endif
#pragma unroll
          for (int m = 0; m < MT; m++) add_scaled(sum[m][n], byte[m][half], b, scale[m], half);
        }
      }
    }
    unsigned a[MT][4];
#pragma unroll
    for (int m = 0; m < MT; m++) {
      least_of(&a[m][0], &a[m][2], factor[m][0]);
      least_of(&a[m][1], &a[m][3], factor[m][1]);
    }
#pragma unroll
    for (int n = 0; n < NT; n++) {
      float2 x_scale = __ldg((const float2*)(x_scales + s * 16 + n * 8 + 2 * t));  // of two rows of activations
      uint2 x_sum = LEAST ? __ldg((const uint2*)(x_sums + (s * 16 + n * 8 + g) * 16 + t * 4)) : make_uint2(0, 0);
#pragma unroll
      for (int m = 0; m < MT; m++) {
        float least[4] = {};
        if (LEAST) mma_halves(least, a[m], x_sum);
#pragma unroll
        for (int i = 0; i < 4; i++)
          total[m][n][i] += (i & 1 ? x_scale.y : x_scale.x) * span_value(sum[m][n][i], super[m][i / 2], least[i]);
      }
    }
    if (last) {
#pragma unroll
      for (int m = 0; m < MT; m++)
#pragma unroll
        for (int n = 0; n < NT; n++)
#pragma unroll
          for (int i = 0; i < 4; i++) {
            shares[turn][warp][n * 8 + 2 * t + (i & 1)][m * 16 + g + (i / 2) * 8] = total[m][n][i];
            total[m][n][i] = 0.0f;
          }
      __syncthreads();  // one a tile is enough: shares have two turns
      for (int i = threadIdx.x; i < MT * 16 * NT * 8; i += blockDim.x) {
        int b = i / (MT * 16), in_tile = i % (MT * 16), n = tile * (MT * 16) + in_tile;
        float sum = 0.0f;
        for (int w = 0; w < warps; w++) sum += shares[turn][w][b][in_tile];
        if (n < rows && b < batch) deliver(sum, out, out_stride, n, b, inboxes, sequence, first, width, ranks, rank);
      }
      if (!more) break;
      turn ^= 1;
    }
    s = next;
    tile = next_tile;
  }
}
"""

ENTRY = r"""
extern "C" __global__ void __launch_bounds__(WARPS * 32, BLOCKS) multiply_batch(
    const unsigned char* codes, const unsigned* high, const unsigned* scales, const unsigned* supers,
    const signed char* x, const float* x_scales, const unsigned short* x_sums, float* out, int out_stride, int rows,
    int batch, int groups, unsigned long long* const* inboxes, const int* sequence, int first, int width, int ranks,
    int rank) {
  __shared__ float shares[2][WARPS][NT * 8][MT * 16 + 4];
  multiply_tiles(shares, blockIdx.x, gridDim.x, codes, high, scales, supers, x, x_scales, x_sums, out, out_stride, rows,
                 batch, groups, inboxes, sequence, first, width, ranks, rank);
}
"""


def source(form: PlaneFormat, tile: tuple[int, ...], rows_of_eight: int, whole: bool) -> str:
    """For one type and `rows_of_eight` times 8 rows of activations; `whole`: columns are a multiple of SPAN.

    `tile`: 16 matrix rows a block so many times, most warps of a block, blocks that must fit a multiprocessor at once
    (which bounds registers).
    """
    return defines(tile_facts(tile, rows_of_eight, whole) | type_facts(form)) + INSTRUCTIONS + DELIVER + SOURCE + ENTRY


def type_facts(form: PlaneFormat) -> dict[str, int]:
    return {"BITS": form.code_bits, "HIGH": form.high_bits, "KIND": int(form.scale_kind), "ZERO": form.zero}


def tile_facts(tile: tuple[int, ...], rows_of_eight: int, whole: bool) -> dict[str, int]:
    tiles, warps, blocks = tile
    return {
        "MT": tiles, "NT": rows_of_eight, "WARPS": warps, "BLOCKS": blocks, "WHOLE": int(whole), "ROWS": MOST_ROWS,
    }  # fmt: skip


def warps_of(columns: int, most: int) -> int:
    """Warps a block that share so many columns as evenly as `most` allow."""
    spans = -(-columns // SPAN)
    return -(-spans // -(-spans // most))


def shared_bytes(tile: tuple[int, ...], rows_of_eight: int) -> int:
    """Of a block: every warp's share of its results, twice."""
    tiles, warps, _ = tile
    return 2 * 4 * warps * (8 * rows_of_eight) * (16 * tiles + 4)
