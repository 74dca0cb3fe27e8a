'''CUDA source of the product of a quantised matrix with 2 to 16 rows of int8 activations, for NVRTC.

The codes go to the matrix units as they are: one `mma` multiplies 16 rows of the matrix by 8 of activations over 32
columns in int8. A warp takes 256 columns at a time (a *span*, the K types' block), over which activations have one
scale: types whose scales are whole numbers stay in whole numbers to the span's end, one multiply-add a sum, and
floats come in once a span. Mins and zero points need sums of activations only: one `mma` a span in f16, exact where
factors are whole, as sums of 16 codes are below 2048. For 16 rows of activations a span of 16 matrix rows takes some
400 instructions of a warp (Q4_K: 2,368 bytes) or 620 (Q6_K: 3,360 bytes).

What bounds this is how much memory is asked for ahead, and by how many warps: spans go to shared memory by copies that
take no registers, the next one (of the next tile of rows too) while one is multiplied. So blocks stay and take one
tile of matrix rows after another. Warps of a block share a tile's columns; their shares are added in warp order, so
results do not depend on timing. Which thread holds which column is free as long as weights and activations agree;
here a thread takes eight neighbouring bytes (four and four where scales span 16 columns).
'''

from collections.abc import Sequence

from ...proto.device_sizes import MOST_ROWS, SPAN
from .cuda_text import COPIES, DELIVER, INSTRUCTIONS, defines
from .quant_planes import PlaneFormat, ScaleKind

TILE_ROWS = 16  # of a matrix, as the matrix units take them
SHARE_STRIDE = TILE_ROWS + 4  # values of a tile's rows and some: lanes of a warp write other banks

SOURCE = r"""
#define CODE_BYTES (BITS * 32)  // of a row of a span
#define FACTORS (KIND == 3 ? 2 : 1)  // words of factors, of one row and 64 columns
#define LEAST (KIND != 2 || ZERO != 0)
#define HIGH_AT (16 * CODE_BYTES)  // in a place: a span of 16 rows as it lies in memory, plane after plane
#define FACTORS_AT (HIGH_AT + 16 * HIGH * 32)
#define SUPERS_AT (FACTORS_AT + 16 * FACTORS * 16)
#define PLACE_BYTES ((SUPERS_AT + (KIND == 0 ? 16 * 4 : 0) + CODE_BYTES - 1) / CODE_BYTES * CODE_BYTES)
#define SHARES_BYTES (2 * WARPS * NT * 8 * SHARE_STRIDE * 4)
#if KIND <= 1
typedef int Sum;
#else
typedef float Sum;
#endif

// A lane's part in asking for spans: where its first piece of 16 bytes is in each plane, and in a place. Pieces are
// shuffled within a row, so that lanes that read one column of eight rows read other banks.
struct Asker {
  const unsigned char *codes, *high, *factors, *supers;
  int rows, groups, code_row, codes_at, high_row, high_at, factor_row, factors_at;
};

__device__ __forceinline__ Asker asker_of(const unsigned char* codes, const unsigned* high, const unsigned* scales,
                                          const unsigned* supers, int rows, int groups, int lane) {
  const int in_row = CODE_BYTES / 16, code_row = lane / in_row, piece = lane % in_row;
  const int high_in_row = HIGH ? HIGH * 2 : 1, high_row = lane / high_in_row, high_piece = lane % high_in_row;
  const int high_turn = HIGH == 2 ? high_row / 2 % 4 : high_row / 4 % 2;
  Asker asker;
  asker.codes = codes + piece * 16;
  asker.high = (const unsigned char*)high + high_piece * 16;
  asker.factors = (const unsigned char*)(KIND <= 1 ? scales : supers) + lane % FACTORS * 16;
  asker.supers = (const unsigned char*)supers;
  asker.rows = rows;
  asker.groups = groups;
  asker.code_row = code_row;
  asker.codes_at = code_row * CODE_BYTES + (piece ^ (KIND == 1 ? code_row : code_row * 2)) * 16;
  asker.high_row = high_row;
  asker.high_at = HIGH_AT + high_row * HIGH * 32 + (high_piece ^ high_turn) * 16;
  asker.factor_row = lane / FACTORS % 16;
  asker.factors_at = FACTORS_AT + lane % (16 * FACTORS) * 16;
  return asker;
}

// The number in the matrix of the first group that a row of a tile has in a span. Rows beyond the last are the last.
__device__ __forceinline__ int group_of(const Asker& asker, int tile, int row, int s) {
  return min(tile * 16 + row, asker.rows - 1) * asker.groups + s * 4;
}

// Words of a plane whose rows end within a span, or begin in the middle of 16 bytes; zeros beyond a row's end.
__device__ __forceinline__ void ask_for_words(const Asker& asker, char* to, const unsigned char* plane, int in_group,
                                              int shuffled, int tile, int s, int lane) {
#pragma unroll 1
  for (int i = lane; i < 16 * 4 * in_group; i += 32) {
    const int row = i / (4 * in_group), word = i % (4 * in_group);
    const int at = word ^ (shuffled == 2 ? row / 2 % 4 * 4 : shuffled == 1 ? row / 4 % 2 * 4 : 0);
    copy_word(to + (row * 4 * in_group + at) * 4, plane + ((long)group_of(asker, tile, row, s) * in_group + word) * 4,
              word < (asker.groups - s * 4) * in_group ? 4 : 0);
  }
}

// Asks for a span of a tile, which goes `to` a place; the lanes of a warp share it.
__device__ __forceinline__ void ask_for(const Asker& asker, char* to, int tile, int s, int lane) {
#pragma unroll
  for (int i = 0; i < CODE_BYTES / 32; i++) {  // 512 bytes at a time
    const int group = group_of(asker, tile, i * (512 / CODE_BYTES) + asker.code_row, s);
    const bool inside = WHOLE || lane % (CODE_BYTES / 16) < (asker.groups - s * 4) * (BITS / 2);
    copy_piece(to + i * 512 + (asker.codes_at ^ (KIND == 1 || BITS == 8 ? i % 2 * 64 : 0)),
               asker.codes + (long)group * (BITS * 8), inside ? 16 : 0);
  }
#if WHOLE
#pragma unroll
  for (int i = 0; i < HIGH; i++) {
    const int group = group_of(asker, tile, i * (16 / HIGH) + asker.high_row, s);
    copy_piece(to + i * 512 + asker.high_at, asker.high + (long)group * (HIGH * 8), 16);
  }
  const int group = group_of(asker, tile, asker.factor_row, s);
  if (lane < 16 * FACTORS) copy_piece(to + asker.factors_at, asker.factors + (long)group * (FACTORS * 4), 16);
#if KIND == 0
  else copy_word(to + SUPERS_AT + asker.factor_row * 4, asker.supers + (long)group, 4);
#endif
#else
#if HIGH
  ask_for_words(asker, to + HIGH_AT, asker.high - lane % (HIGH * 2) * 16, HIGH * 2, HIGH, tile, s, lane);
#endif
  ask_for_words(asker, to + FACTORS_AT, asker.factors - lane % FACTORS * 16, FACTORS, 0, tile, s, lane);
#endif
}

// Of KIND 1, the scale of a span of this lane's two rows: two bytes are less than a copy takes.
__device__ __forceinline__ void load_supers(unsigned* to, const Asker& asker, int tile, int s, int g) {
#if KIND == 1
  to[0] = stream_half(asker.supers + (long)(group_of(asker, tile, g, s) / 2));
  to[1] = stream_half(asker.supers + (long)(group_of(asker, tile, 8 + g, s) / 2));
#endif
}

// The codes of half a group of 64 columns of a row, in bytes. `low`, `top`: eight of a row's codes; `high`: a word.
__device__ __forceinline__ void unpack(unsigned* to, unsigned low, unsigned top, unsigned high, int half, int t) {
#if BITS == 8
  to[0] = low; to[1] = top;
#else
  to[0] = (low >> (4 * half)) & 0x0F0F0F0F;
  to[1] = (top >> (4 * half)) & 0x0F0F0F0F;
#if HIGH == 1
  unsigned h = high >> ((t & 1) * 4 + half);
  to[0] |= (h & 0x01010101) << 4; to[1] |= ((h >> 2) & 0x01010101) << 4;
#elif HIGH == 2
  unsigned h = high >> (2 * half);
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

// The sums of 32 columns (KIND 1: twice 16) into the span's. `factor`: of the two rows.
__device__ __forceinline__ void add_scaled(Sum* sum, const unsigned (*u)[2], const unsigned* b,
                                           const unsigned (*factor)[4 * FACTORS], int G, int half) {
  int c[4];
#if KIND == 1
#pragma unroll
  for (int part = 0; part < 2; part++) {
    mma16(c, u[0][part], u[1][part], b[part]);
#pragma unroll
    for (int i = 0; i < 4; i++) sum[i] += (signed char)(factor[i / 2][G] >> (16 * half + 8 * part)) * c[i];
  }
#else
  unsigned a[4] = {u[0][0], u[1][0], u[0][1], u[1][1]};
  mma32(c, KIND == 0 ? 0 : MAGIC, a, b);
#pragma unroll
  for (int i = 0; i < 4; i++) {
#if KIND == 0
    sum[i] += (int)((factor[i / 2][G] >> (16 * half)) & 255) * c[i];
#elif KIND == 2
    sum[i] += half_bits((factor[i / 2][G] >> (16 * half)) & 0xFFFF) * (__int_as_float(c[i]) - PIVOT);
#else
    sum[i] += half_bits(factor[i / 2][G * 2 + half] & 0xFFFF) * (__int_as_float(c[i]) - PIVOT);
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
// 64 times `groups`. Any number of blocks will do: they take tiles of 16 rows in turn.
__device__ __forceinline__ void multiply_tiles(
    int block, int blocks, const unsigned char* codes, const unsigned* high, const unsigned* scales,
    const unsigned* supers, const signed char* x, const float* x_scales, const unsigned short* x_sums, float* out,
    int out_stride, int rows, int batch, int groups, unsigned long long* const* inboxes, const int* sequence, int first,
    int width, int ranks, int rank) {
  char* const room = (char*)shared_memory();
  float (*shares)[WARPS][NT * 8][SHARE_STRIDE] = (float (*)[WARPS][NT * 8][SHARE_STRIDE])room;  // [2]
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, warps = blockDim.x >> 5, g = lane >> 2, t = lane & 3;
  const int spans = (groups + 3) / 4, tiles = (rows + 15) / 16;
  // Where this lane's codes of the first group of row g lie in a place; those of the others are an exclusive or away.
  const int own_codes = g * CODE_BYTES + (KIND == 1 ? g * 16 + t * 4 : (t / 2 ^ g % 4 * 2) * 16 + t % 2 * 8);
  const int own_high = HIGH_AT + g * HIGH * 32 + (HIGH == 2 ? g / 2 * 16 + t * 4 : g / 4 * 16 + t / 2 * 4);
  const Asker asker = asker_of(codes, high, scales, supers, rows, groups, lane);
  int tile = block, s = warp, turn = 0, held = SHARES_BYTES + warp * (2 * PLACE_BYTES), other = held + PLACE_BYTES;
  unsigned super[2] = {}, next_super[2] = {};
  float total[NT][4] = {};
  ask_for(asker, room + held, tile, s, lane);
  load_supers(next_super, asker, tile, s, g);
#pragma unroll 1
  while (true) {
    const bool last = s + warps >= spans;  // of this tile, for this warp
    const int next = last ? warp : s + warps, next_tile = last ? tile + blocks : tile;
    const bool more = next_tile < tiles;
    await_copies();
    __syncwarp();  // all lanes' copies are there, and all have read the other place, which is asked for again
    if (more) ask_for(asker, room + other, next_tile, next, lane);
    unsigned factor[2][4 * FACTORS];  // of rows g and g + 8
#pragma unroll
    for (int r = 0; r < 2; r++) {
      const int row = r * 8 + g;
      super[r] = KIND == 0 ? *(const unsigned*)(room + held + SUPERS_AT + row * 4) : next_super[r];
#pragma unroll
      for (int i = 0; i < FACTORS; i++) {
        const uint4 four = *(const uint4*)(room + held + FACTORS_AT + row * (FACTORS * 16) + i * 16);
        factor[r][4 * i] = four.x; factor[r][4 * i + 1] = four.y;
        factor[r][4 * i + 2] = four.z; factor[r][4 * i + 3] = four.w;
      }
    }
    if (more) load_supers(next_super, asker, next_tile, next, g);
    Sum sum[NT][4] = {};
    const signed char* x_span = x + (long)s * (16 * 256) + g * 32 + (KIND == 1 ? 4 : 8) * t;
#pragma unroll
    for (int G = 0; G < 4; G++) {
      unsigned low[2], top[2], bits[2];
#pragma unroll
      for (int r = 0; r < 2; r++) {
#if KIND == 1
        low[r] = *(const unsigned*)(room + (held + own_codes ^ G * 32) + r * 8 * CODE_BYTES);
        top[r] = *(const unsigned*)(room + (held + own_codes ^ G * 32 + 16) + r * 8 * CODE_BYTES);
#elif BITS == 4
        const uint2 pair = *(const uint2*)(room + (held + own_codes ^ G * 32) + r * 8 * CODE_BYTES);
        low[r] = pair.x; top[r] = pair.y;
#endif
        bits[r] = HIGH ? *(const unsigned*)(room + (held + own_high ^ G * HIGH * 8) + r * 8 * (HIGH * 32)) : 0;
      }
#pragma unroll
      for (int half = 0; half < 2; half++) {
        unsigned byte[2][2];  // [row]
#pragma unroll
        for (int r = 0; r < 2; r++) {
#if BITS == 8
          const uint2 pair = *(const uint2*)(room + (held + own_codes ^ G * 64 + half * 32) + r * 8 * CODE_BYTES);
          low[r] = pair.x; top[r] = pair.y;
#endif
          unpack(byte[r], low[r], top[r], bits[r], half, t);
        }
#pragma unroll
        for (int n = 0; n < NT; n++) {
          const signed char* from = x_span + (G * 2 + half) * (16 * 32) + n * (8 * 32);
#if KIND == 1
          unsigned b[2] = {__ldg((const unsigned*)from), __ldg((const unsigned*)(from + 16))};
#else
          uint2 pair = __ldg((const uint2*)from);
          unsigned b[2] = {pair.x, pair.y};
#endif
          add_scaled(sum[n], byte, b, factor, G, half);
        }
      }
    }
    unsigned a[4];
#pragma unroll
    for (int r = 0; r < 2; r++)
      least_of(&a[r], &a[2 + r],
               (const unsigned*)(room + held + FACTORS_AT + (r * 8 + g) * (FACTORS * 16) + t * (FACTORS * 4)));
#pragma unroll
    for (int n = 0; n < NT; n++) {
      float2 x_scale = __ldg((const float2*)(x_scales + s * 16 + n * 8 + 2 * t));  // of two rows of activations
      uint2 x_sum = LEAST ? __ldg((const uint2*)(x_sums + (s * 16 + n * 8 + g) * 16 + t * 4)) : make_uint2(0, 0);
      float least[4] = {};
      if (LEAST) mma_halves(least, a, x_sum);
#pragma unroll
      for (int i = 0; i < 4; i++)
        total[n][i] += (i & 1 ? x_scale.y : x_scale.x) * span_value(sum[n][i], super[i / 2], least[i]);
    }
    if (last) {
#pragma unroll
      for (int n = 0; n < NT; n++)
#pragma unroll
        for (int i = 0; i < 4; i++) {
          shares[turn][warp][n * 8 + 2 * t + (i & 1)][g + (i / 2) * 8] = total[n][i];
          total[n][i] = 0.0f;
        }
      __syncthreads();  // one a tile is enough: shares have two turns
      for (int i = threadIdx.x; i < 16 * NT * 8; i += blockDim.x) {
        int b = i / 16, n = tile * 16 + i % 16;
        float sum = 0.0f;
        for (int w = 0; w < warps; w++) sum += shares[turn][w][b][i % 16];
        if (n < rows && b < batch) deliver(sum, out, out_stride, n, b, inboxes, sequence, first, width, ranks, rank);
      }
      if (!more) break;
      turn ^= 1;
    }
    s = next;
    tile = next_tile;
    const int before = held;
    held = other;
    other = before;
  }
}
"""

ENTRY = r"""
extern "C" __global__ void __launch_bounds__(WARPS * 32, BLOCKS) multiply_batch(
    const unsigned char* codes, const unsigned* high, const unsigned* scales, const unsigned* supers,
    const signed char* x, const float* x_scales, const unsigned short* x_sums, float* out, int out_stride, int rows,
    int batch, int groups, unsigned long long* const* inboxes, const int* sequence, int first, int width, int ranks,
    int rank) {
  multiply_tiles(blockIdx.x, gridDim.x, codes, high, scales, supers, x, x_scales, x_sums, out, out_stride, rows, batch,
                 groups, inboxes, sequence, first, width, ranks, rank);
}
"""


def source(form: PlaneFormat, tile: tuple[int, int], rows_of_eight: int, whole: bool) -> str:
    """For one type and `rows_of_eight` times 8 rows of activations; `whole`: columns are a multiple of SPAN.

    `tile`: most warps of a block, blocks that must fit a multiprocessor at once (which bounds registers).
    """
    facts = tile_facts(tile, rows_of_eight, whole) | type_facts(form)
    return defines(facts) + INSTRUCTIONS + COPIES + DELIVER + SOURCE + ENTRY


def type_facts(form: PlaneFormat) -> dict[str, int]:
    return {"BITS": form.code_bits, "HIGH": form.high_bits, "KIND": int(form.scale_kind), "ZERO": form.zero}


def tile_facts(tile: tuple[int, int], rows_of_eight: int, whole: bool) -> dict[str, int]:
    warps, blocks = tile
    return {
        "NT": rows_of_eight, "WARPS": warps, "BLOCKS": blocks, "WHOLE": int(whole), "ROWS": MOST_ROWS,
        "SHARE_STRIDE": SHARE_STRIDE,
    }  # fmt: skip


def warps_of(columns: int, most: int) -> int:
    """Warps a block that share so many columns as evenly as `most` allow."""
    spans = -(-columns // SPAN)
    return -(-spans // -(-spans // most))


def place_bytes(form: PlaneFormat) -> int:
    """What a span of 16 rows takes of shared memory."""
    factors = {ScaleKind.SUPER_WITH_MIN: 20, ScaleKind.PLAIN_WITH_MIN: 32}.get(form.scale_kind, 16)
    needed = TILE_ROWS * ((form.code_bits + form.high_bits) * SPAN // 8 + factors)
    row_bytes = form.code_bits * SPAN // 8  # a place begins at a multiple of it, so that its bits are free
    return -(-needed // row_bytes) * row_bytes


def shared_bytes(forms: Sequence[PlaneFormat], tile: tuple[int, int], rows_of_eight: int) -> int:
    """Of a block: every warp's share of its results, and the spans that it holds and asks for; two of each."""
    shares = 4 * 8 * rows_of_eight * SHARE_STRIDE
    return 2 * tile[0] * (shares + max(place_bytes(form) for form in forms))
