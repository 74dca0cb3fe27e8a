"""CUDA source of the products of `block_source`: one row of activations, and 2 to 16."""

MULTIPLY_ROW = r"""
#define RUNS (STRIDED ? 1 : 4 / SCALES)  // that have a scale together, of the matrix and of activations

struct Activations {
  unsigned code[4][2];
  float scale[STRIDED ? 4 : 1];
  int start[4 / RUNS];  // of the sum of such runs: less what is ZERO too much in the codes
};

__device__ __forceinline__ void load_activations(Activations& x, const signed char* codes, const float* scales,
                                                 int unit) {
#if STRIDED
  const int first = unit / PARTS * 256, part = unit % PARTS;
#pragma unroll
  for (int i = 0; i < 4; i++) {
    uint2 pair = __ldg((const uint2*)(codes + first + RUN_COLUMN(part, i)));
    x.code[i][0] = pair.x; x.code[i][1] = pair.y;
  }
  float4 four = __ldg((const float4*)(scales + first / 32 + part / 4 * 4));
  x.scale[0] = four.x; x.scale[1] = four.y; x.scale[2] = four.z; x.scale[3] = four.w;
#else
#pragma unroll
  for (int i = 0; i < 2; i++) {
    uint4 four = __ldg((const uint4*)(codes + unit * 32 + i * 16));
    x.code[2 * i][0] = four.x; x.code[2 * i][1] = four.y; x.code[2 * i + 1][0] = four.z; x.code[2 * i + 1][1] = four.w;
  }
  x.scale[0] = __ldg(scales + unit);
#endif
#pragma unroll
  for (int i = 0; i < 4; i += RUNS) {
    int sum = MAGIC;
#pragma unroll
    for (int w = 0; w < 2 * RUNS; w++)
      if (ZERO) sum = __dp4a((int)(-ZERO & 255) * 0x01010101, (int)x.code[i + w / 2][w % 2], sum);
    x.start[i / RUNS] = sum;
  }
}

__device__ __forceinline__ float unit_product(const Unit& unit, const Activations& x) {
  float total = 0.0f;
#pragma unroll
  for (int i = 0; i < 4; i += RUNS) {
    int sum = x.start[i / RUNS];
#pragma unroll
    for (int run = i; run < i + RUNS; run++) {
      sum = __dp4a((int)unit.code[run][0], (int)x.code[run][0], sum);
      sum = __dp4a((int)unit.code[run][1], (int)x.code[run][1], sum);
    }
    total += unit.scale[SCALE_OF(i)] * x.scale[STRIDED ? i : 0] * (__int_as_float(sum) - PIVOT);
  }
  return total;
}

#if LEAST
__device__ __forceinline__ float least_product(const Unit& unit, const float* sums, int number) {
  const int part = number % PARTS, first = part % 2 * 2;  // two units share the columns of a min: each takes two
  const float* from = sums + (number / PARTS * 256 + RUN_COLUMN(part, first)) / 16;
  const unsigned least = unit.least >> 8 * first;
  return unit.super_least * (byte_float(least, 0) * __ldg(from) + byte_float(least, 1) * __ldg(from + 2));
}
#endif

// Of a unit of two rows.
__device__ __forceinline__ void add_products(float* total, const Raw* raw, const signed char* x, const float* x_scales,
                                             const float* x_sums, int unit, int part, const Books& books) {
  Activations some;
  load_activations(some, x, x_scales, unit);
#pragma unroll
  for (int r = 0; r < 2; r++) {
    Unit taken;
    decode_unit(taken, raw[r], part, books);
    total[r] += unit_product(taken, some);
#if LEAST
    total[r] -= least_product(taken, x_sums, unit);
#endif
  }
}

// out[n] = sum over k of W[n, k] x[k], by blocks of WARPS warps, of which `sharing` share two rows of the matrix.
extern "C" __global__ void __launch_bounds__(WARPS * 32, BLOCKS) multiply_row(
    Bytes blocks, int row_bytes, const signed char* x, const float* x_scales, const float* x_sums,
    float* out, int rows, int units, int sharing, unsigned long long* const* inboxes, const int* sequence, int first,
    int width, int ranks, int rank) {
  __shared__ float shares[2][WARPS][2];
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, share = warp % sharing, step = 32 * sharing;
  const int tiles = (rows + 1) / 2, at_once = WARPS / sharing, part = lane % PARTS;
  const long advance = step / PARTS * BLOCK_BYTES;  // whole words: a lane's units are all as far from one
  int turn = 0;
  BOOKS_HERE
#pragma unroll 1
  for (int base = blockIdx.x * at_once; base < tiles; base += gridDim.x * at_once) {
    const int row = (base + warp / sharing) * 2, first_unit = share * 32 + lane;
    Start top(block_at(blocks, min(row, rows - 1), row_bytes, first_unit));
    Start low(block_at(blocks, min(row + 1, rows - 1), row_bytes, first_unit));
    float total[2] = {};
#pragma unroll 1
    for (int unit = first_unit; unit < units; unit += 2 * step) {
      const bool second = unit + step < units;
      Raw raw[2][2];
      load_unit(raw[0][0], top, part);
      load_unit(raw[0][1], low, part);
      top.aligned += advance;
      low.aligned += advance;
      if (second) {
        load_unit(raw[1][0], top, part);
        load_unit(raw[1][1], low, part);
      }
      top.aligned += advance;
      low.aligned += advance;
      add_products(total, raw[0], x, x_scales, x_sums, unit, part, books);
      if (second) add_products(total, raw[1], x, x_scales, x_sums, unit + step, part, books);
    }
#pragma unroll
    for (int r = 0; r < 2; r++)
#pragma unroll
      for (int other = 16; other > 0; other /= 2) total[r] += __shfl_xor_sync(0xFFFFFFFF, total[r], other);
    float sum = lane == 0 ? total[0] : total[1];
    if (sharing > 1) {
      if (lane < 2) shares[turn][warp][lane] = sum;
      __syncthreads();  // one a tile is enough: shares have two turns
      if (share == 0 && lane < 2) {
        sum = 0.0f;
#pragma unroll 1
        for (int w = 0; w < sharing; w++) sum += shares[turn][warp + w][lane];
      }
      turn ^= 1;
    }
    if (share == 0 && lane < 2 && row + lane < rows)
      deliver(sum, out, 0, row + lane, 0, inboxes, sequence, first, width, ranks, rank);
  }
}
"""

MULTIPLY_BATCH = r"""
#define SCALE_COLUMNS (STRIDED ? SCALES == 1 ? 32 : 16 : 32 / SCALES)
#define SCALES_A_SPAN (256 / SCALE_COLUMNS)
#define STRIDE 288  // bytes of a row of codes: lanes of a warp read other banks

struct Tile {  // 16 rows by 256 columns
  unsigned code[16][STRIDE / 4];
  float scale[16][SCALES_A_SPAN + 1];
#if LEAST
  unsigned short least[16][16];  // f16, in the order of the sums of activations
  float super_least[16];
#endif
};

__device__ __forceinline__ void put_unit(Tile& tile, const Unit& unit, int row, int part) {
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const int column = RUN_COLUMN(part, i);
    *(uint2*)&tile.code[row][column / 4] =
        make_uint2(signed_code(unit.code[i][0]), signed_code(unit.code[i][1]));
    if (column % SCALE_COLUMNS == 0) {
      tile.scale[row][column / SCALE_COLUMNS] = unit.scale[SCALE_OF(i)];
#if LEAST
      const int group = column / 32, place = group / 2 * 4 + group % 2 + column / 16 % 2 * 2;
      tile.least[row][place] = add_halves((unit.least >> 8 * i & 255) | 0x6400, 0xE400);
#endif
    }
  }
#if LEAST
  if (part == 0) tile.super_least[row] = unit.super_least;
#endif
}

// Adds, for rows g and g + 8 of the tile and NT times 8 rows of activations, the span's products but for their scale.
__device__ __forceinline__ void add_span(float (*sum)[4], const Tile& tile, const signed char* x_span, int g, int t) {
#pragma unroll
  for (int s = 0; s < SCALES_A_SPAN; s++) {
    const float scale[2] = {tile.scale[g][s], tile.scale[g + 8][s]};
#if SCALE_COLUMNS == 32
    const uint2 top = *(const uint2*)&tile.code[g][s * 8 + 2 * t];
    const uint2 low = *(const uint2*)&tile.code[g + 8][s * 8 + 2 * t];
    const unsigned a[4] = {top.x, low.x, top.y, low.y};
#else
    const unsigned a[2] = {tile.code[g][s * 4 + t], tile.code[g + 8][s * 4 + t]};
#endif
#pragma unroll
    for (int n = 0; n < NT; n++) {
      int c[4];
#if SCALE_COLUMNS == 32
      const uint2 pair = __ldg((const uint2*)(x_span + s * (16 * 32) + (n * 8 + g) * 32 + 8 * t));
      const unsigned b[2] = {pair.x, pair.y};
      mma32(c, MAGIC, a, b);
#pragma unroll
      for (int i = 0; i < 4; i++) sum[n][i] += scale[i / 2] * (__int_as_float(c[i]) - PIVOT);
#else
      const signed char* from = x_span + s / 2 * (16 * 32) + (n * 8 + g) * 32 + s % 2 * 16 + 4 * t;
      mma16(c, a[0], a[1], __ldg((const unsigned*)from));
#pragma unroll
      for (int i = 0; i < 4; i++) sum[n][i] += scale[i / 2] * (__int_as_float(c[i] + MAGIC) - PIVOT);
#endif
    }
  }
}

__device__ __forceinline__ void load_span(Raw* raw, Bytes blocks, int row_bytes, int tile, int span, int rows,
                                          int units, int lane) {
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const int row = min(tile * 16 + i * 4 + lane / 8, rows - 1), unit = span * 8 + lane % 8;
    if (unit < units) load_unit(raw[i], Start(block_at(blocks, row, row_bytes, unit)), unit % PARTS);
    else raw[i] = Raw();  // scales of zero: what activations hold there does not matter
  }
}

// out[b * out_stride + n] = sum over k of W[n, k] x[b, k]. For activations' layout see `QuantizedRows`.
extern "C" __global__ void __launch_bounds__(WARPS * 32, BLOCKS) multiply_batch(
    Bytes blocks, int row_bytes, const signed char* x, const float* x_scales,
    const unsigned short* x_sums, float* out, int out_stride, int rows, int units, int batch,
    unsigned long long* const* inboxes, const int* sequence, int first, int width, int ranks, int rank) {
  __shared__ Tile taken[WARPS];
  __shared__ float shares[2][WARPS][NT * 8][16 + 4];
  BOOKS_HERE
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, warps = blockDim.x >> 5, g = lane >> 2, t = lane & 3;
  const int spans = (units + 7) / 8, tiles = (rows + 15) / 16;
  int tile = blockIdx.x, s = warp, turn = 0;
  float total[NT][4] = {};
  Raw raw[4] = {};
  load_span(raw, blocks, row_bytes, tile, s, rows, units, lane);
#pragma unroll 1
  while (true) {
    const bool last = s + warps >= spans;  // of this tile, for this warp
    const int next = last ? warp : s + warps, next_tile = last ? tile + gridDim.x : tile;
#pragma unroll
    for (int i = 0; i < 4; i++) {
      Unit unit;
      const int part = lane % 8;
      decode_unit(unit, raw[i], part % PARTS, books);
      put_unit(taken[warp], unit, i * 4 + lane / 8, part);
    }
    if (next_tile < tiles) load_span(raw, blocks, row_bytes, next_tile, next, rows, units, lane);
    __syncwarp();
    float sum[NT][4] = {};
    add_span(sum, taken[warp], x + (long)s * (16 * 256), g, t);
#pragma unroll
    for (int n = 0; n < NT; n++) {
      const float2 x_scale = __ldg((const float2*)(x_scales + s * 16 + n * 8 + 2 * t));  // of two rows of activations
#if LEAST
      const Tile& held = taken[warp];
      const uint2 top = *(const uint2*)&held.least[g][4 * t], low = *(const uint2*)&held.least[g + 8][4 * t];
      const unsigned a[4] = {top.x, low.x, top.y, low.y};
      float least[4];
      mma_halves(least, a, __ldg((const uint2*)(x_sums + (s * 16 + n * 8 + g) * 16 + t * 4)));
#pragma unroll
      for (int i = 0; i < 4; i++) sum[n][i] -= held.super_least[g + i / 2 * 8] * least[i];
#endif
#pragma unroll
      for (int i = 0; i < 4; i++) total[n][i] += (i & 1 ? x_scale.y : x_scale.x) * sum[n][i];
    }
    __syncwarp();  // all have read the tile
    if (last) {
#pragma unroll
      for (int n = 0; n < NT; n++)
#pragma unroll
        for (int i = 0; i < 4; i++) {
          shares[turn][warp][n * 8 + 2 * t + (i & 1)][g + i / 2 * 8] = total[n][i];
          total[n][i] = 0.0f;
        }
      __syncthreads();  // one a tile is enough: shares have two turns
      for (int i = threadIdx.x; i < 16 * NT * 8; i += blockDim.x) {
        int b = i / 16, n = tile * 16 + i % 16;
        float all = 0.0f;
        for (int w = 0; w < warps; w++) all += shares[turn][w][b][i % 16];
        if (n < rows && b < batch) deliver(all, out, out_stride, n, b, inboxes, sequence, first, width, ranks, rank);
      }
      if (next_tile >= tiles) break;
      turn ^= 1;
    }
    s = next;
    tile = next_tile;
  }
}
"""
