'''CUDA source of products with, and expansions of, matrices that are kept as GGUF's own blocks, for NVRTC.

Three kernels, the same for all types but for how a unit of 32 columns is taken apart (`block_decoders`):

* `multiply_row`: one row of int8 activations. A lane multiplies a unit of two matrix rows by the same activations
  (`dp4a`); one to eight warps share two rows.
* `multiply_batch`: 2 to 16 rows. A warp takes 16 matrix rows by 256 columns apart into shared memory, as int8, and
  multiplies them there by the matrix units, each scale's columns for themselves. Warps share a tile's columns.
* `expand`: rows as floats, times a factor: for prompts into 16 bits, rows of an embedding into f32.

Sums of whole numbers below 2^22 come out as floats without a conversion (see MAGIC in `cuda_text`). Blocks of
threads stay, as tables are copied into shared memory first, and take tiles in turn; a lane loads its next unit, of the
next tile too, before it takes apart the one it holds. Shares of warps are added in warp order.
'''

from enum import StrEnum

from ...proto.device_sizes import MOST_ROWS, SPAN
from .block_decoders import DECODERS
from .block_products import MULTIPLY_BATCH, MULTIPLY_ROW
from .block_types import BlockFormat
from .block_units import COMMON
from .codebooks import grid_words, table_words
from .cuda_text import DELIVER, INSTRUCTIONS, defines

ROW_WARPS, BATCH_WARPS, EXPAND_WARPS = 8, 4, 8  # of a block of threads
ROW_BLOCKS, BATCH_BLOCKS, EXPAND_BLOCKS = 3, 4, 4  # that must fit a multiprocessor at once, which bounds registers
ROWS_TOGETHER = 2  # matrix rows that a warp multiplies at a time, for one row of activations
TILE_ROWS = 16
MOST_COPIES, ROW_GRID_WORDS = 8, 4096  # of a word of a table, and words of a codebook with its copies

MORE_INSTRUCTIONS = r"""
__device__ __forceinline__ unsigned pick(unsigned low, unsigned high, unsigned nibbles) {
  unsigned bytes;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(bytes) : "r"(low), "r"(high), "r"(nibbles));
  return bytes;
}

// Places in shared memory by the address that its instructions take: compilers make of arrays two sums a load.
__device__ __forceinline__ unsigned shared_place(const unsigned* from) {
  unsigned place;
  asm volatile("{ .reg .u64 a; cvta.to.shared.u64 a, %1; cvt.u32.u64 %0, a; }" : "=r"(place) : "l"(from) : "memory");
  return place;
}

__device__ __forceinline__ unsigned shared_word(unsigned place) {  // of a table, which nobody writes any more
  unsigned word;
  asm("ld.shared.u32 %0, [%1];" : "=r"(word) : "r"(place));
  return word;
}

__device__ __forceinline__ unsigned pack_f16(float low, float high) {
  unsigned pair;
  asm("{ .reg .f16 a, b; cvt.rn.f16.f32 a, %1; cvt.rn.f16.f32 b, %2; mov.b32 %0, {a, b}; }"
      : "=r"(pair) : "f"(low), "f"(high));
  return pair;
}

__device__ __forceinline__ unsigned bf16_bits(float value) {  // to nearest even; no card before 8.0 converts by itself
  unsigned bits = __float_as_uint(value);
  return bits + 0x7FFF + (bits >> 16 & 1) >> 16;
}
"""

SHARED = r"""
// Fills the tables, a word and its copies at a time, which a block of threads does once.
__device__ __forceinline__ void put_copies(unsigned* to, unsigned word, int copies) {
  if (copies % 4) {
    for (int i = 0; i < copies; i++) to[i] = word;
  } else {
    for (int i = 0; i < copies; i += 4) *(uint4*)(to + i) = make_uint4(word, word, word, word);
  }
}

__device__ __forceinline__ Books fill_books(unsigned* grid, unsigned* signs) {
#if GRID_WORDS
  for (int i = threadIdx.x; i < GRID_WORDS; i += blockDim.x) put_copies(grid + i * GRID_COPIES, GRID[i], GRID_COPIES);
#endif
#if SIGN_BITS
  for (int i = threadIdx.x; i < 1 << SIGN_BITS; i += blockDim.x)
    put_copies(signs + i * SIGN_COPIES, to_nibbles(SIGN_BITS == 8 ? i : i | (__popc(i) & 1) << 7), SIGN_COPIES);
#endif
  __syncthreads();
  return {shared_place(grid + threadIdx.x % GRID_COPIES), shared_place(signs + threadIdx.x % SIGN_COPIES)};
}

#define BOOKS_HERE \
  __shared__ __align__(16) unsigned grid_words[GRID_WORDS ? GRID_WORDS * GRID_COPIES : 4]; \
  __shared__ __align__(16) unsigned sign_words[SIGN_BITS ? SIGN_COPIES << SIGN_BITS : 4]; \
  const Books books = fill_books(grid_words, sign_words);

__device__ __forceinline__ Bytes block_at(Bytes blocks, int row, int row_bytes, int unit) {
  return blocks + (long)row * row_bytes + unit / PARTS * BLOCK_BYTES;
}
"""

EXPAND = r"""
#if OUT == 4
typedef float Value;
#else
typedef unsigned short Value;
#endif

// Eight values; `aligned` to 16 bytes.
__device__ __forceinline__ void put_run(Value* to, const float* value, int aligned) {
#if OUT == 4
  if (aligned) {
    ((float4*)to)[0] = make_float4(value[0], value[1], value[2], value[3]);
    ((float4*)to)[1] = make_float4(value[4], value[5], value[6], value[7]);
  } else {
#pragma unroll
    for (int i = 0; i < 8; i++) to[i] = value[i];
  }
#else
  unsigned pair[4];
#pragma unroll
  for (int i = 0; i < 4; i++)
    pair[i] = OUT == 2 ? pack_f16(value[2 * i], value[2 * i + 1])
                       : bf16_bits(value[2 * i]) | bf16_bits(value[2 * i + 1]) << 16;
  if (aligned) {
    *(uint4*)to = make_uint4(pair[0], pair[1], pair[2], pair[3]);
  } else {
#pragma unroll
    for (int i = 0; i < 4; i++) { to[2 * i] = (Value)pair[i]; to[2 * i + 1] = (Value)(pair[i] >> 16); }
  }
#endif
}

// out[n] = row n of the matrix, or row ids[n] where `wide` is not 0 (words an id), times `factor`.
extern "C" __global__ void __launch_bounds__(WARPS * 32, BLOCKS) expand(
    Bytes blocks, int row_bytes, const int* ids, int wide, void* out, int out_stride, int rows, int units, float factor,
    int aligned) {
  BOOKS_HERE
  const long all = (long)rows * units, step = (long)gridDim.x * blockDim.x;
  for (long i = (long)blockIdx.x * blockDim.x + threadIdx.x; i < all; i += step) {
    const int row = (int)(i / units), number = (int)(i - (long)row * units), part = number % PARTS;
    const int from = wide ? __ldg(ids + (long)row * wide) : row;
    Raw raw;
    load_unit(raw, Start(block_at(blocks, from, row_bytes, number)), part);
    Unit unit;
    decode_unit(unit, raw, part, books);
    Value* to = (Value*)out + (long)row * out_stride + number / PARTS * (PARTS * 32);
#pragma unroll
    for (int run = 0; run < 4; run++) {
      float value[8];
#pragma unroll
      for (int k = 0; k < 8; k++) {
        value[k] = unit.scale[SCALE_OF(run)] * (float)(signed char)(signed_code(unit.code[run][k / 4]) >> k % 4 * 8);
#if LEAST
        value[k] -= unit.super_least * byte_float(unit.least, run);
#endif
        value[k] *= factor;
      }
      put_run(to + RUN_COLUMN(part, run), value, aligned);
    }
  }
}
"""


class Kernel(StrEnum):
    """What is compiled of a type, each from a source of its own. Values: the function's name, and what it takes."""

    ROW = "multiply_row"
    BATCH_8 = "multiply_batch 8"
    BATCH_16 = "multiply_batch 16"
    EXPAND_BF16 = "expand bf16"
    EXPAND_F16 = "expand f16"
    EXPAND_F32 = "expand f32"

    @property
    def function(self) -> str:
        return self.value.split()[0]


_PARTS = {
    Kernel.ROW: (MULTIPLY_ROW, {"WARPS": ROW_WARPS, "BLOCKS": ROW_BLOCKS}),
    Kernel.BATCH_8: (MULTIPLY_BATCH, {"WARPS": BATCH_WARPS, "BLOCKS": BATCH_BLOCKS, "NT": 1}),
    Kernel.BATCH_16: (MULTIPLY_BATCH, {"WARPS": BATCH_WARPS, "BLOCKS": BATCH_BLOCKS, "NT": 2}),
    Kernel.EXPAND_BF16: (EXPAND, {"WARPS": EXPAND_WARPS, "BLOCKS": EXPAND_BLOCKS, "OUT": 1}),
    Kernel.EXPAND_F16: (EXPAND, {"WARPS": EXPAND_WARPS, "BLOCKS": EXPAND_BLOCKS, "OUT": 2}),
    Kernel.EXPAND_F32: (EXPAND, {"WARPS": EXPAND_WARPS, "BLOCKS": EXPAND_BLOCKS, "OUT": 4}),
}


def grid_copies(form: BlockFormat, kernel: Kernel) -> int:
    """Of each word of the codebook. Where a row is multiplied as many as half of shared memory lets be."""
    words = len(grid_words(form.name))
    return min(MOST_COPIES, ROW_GRID_WORDS // words) if kernel is Kernel.ROW and words and words < 2048 else 1


def sign_copies(kernel: Kernel) -> int:
    """Of each word of the table of signs."""
    return MOST_COPIES if kernel is Kernel.ROW else 1


def source(form: BlockFormat, kernel: Kernel) -> str:
    """One kernel for one type."""
    text, sizes = _PARTS[kernel]
    grid, table = grid_words(form.name), table_words(form.table) if form.table else [0] * 4
    facts = {
        "BLOCK_BYTES": form.block_bytes, "PARTS": form.block_columns // 32, "ALIGNED": form.aligned,
        "STRIDED": int(form.strided), "SCALES": form.scales, "LEAST": int(form.has_mins), "GRID_WORDS": len(grid),
        "GRID_COPIES": grid_copies(form, kernel), "SIGN_BITS": form.sign_bits, "SIGN_COPIES": sign_copies(kernel),
        "ZERO": form.zero, "ROWS": MOST_ROWS, **sizes,
        **{f"TABLE_{i}": f"{word:#010x}" for i, word in enumerate(table)},
    }  # fmt: skip
    assert SPAN == 256, "a tile of a batch is a span wide"
    entries = ", ".join(f"{word:#010x}" for word in grid)
    words = f"__device__ const unsigned GRID[] = {{{entries}}};\n" if grid else ""
    shared = INSTRUCTIONS + DELIVER + MORE_INSTRUCTIONS + COMMON
    return defines(facts) + words + shared + DECODERS[form.name] + SHARED + text


def shared_bytes(form: BlockFormat, kernel: Kernel) -> int:
    """Of a block of threads."""
    signs = sign_copies(kernel) << form.sign_bits if form.sign_bits else 4
    table = 4 * (max(4, len(grid_words(form.name)) * grid_copies(form, kernel)) + signs)
    if kernel is Kernel.ROW:
        return table + 2 * 4 * ROW_WARPS * ROWS_TOGETHER
    if kernel.function == "expand":
        return table
    scales = 16 if form.scales > 1 else 8
    tile = TILE_ROWS * (288 + 4 * (scales + 1) + (36 if form.has_mins else 0))
    rows = 16 if kernel is Kernel.BATCH_16 else 8
    return table + BATCH_WARPS * (tile + 2 * 4 * rows * (TILE_ROWS + 4))


def batch_warps(columns: int) -> int:
    """Warps of a block that share so many columns as evenly as BATCH_WARPS allow."""
    spans = -(-columns // SPAN)
    return -(-spans // -(-spans // BATCH_WARPS))
