'''CUDA source that takes GGUF's own blocks apart, type by type: 32 columns of a row, a *unit*, to whole numbers.

A unit is four *runs* of eight neighbouring columns: int8 codes in two words each, and one, two or four scales (f32), so
that a weight is scale * code; Q2_K has mins beside them. Products and expansions (`block_source`) are the same for all
types. What takes instructions is the order of the file's bits, so runs follow it: where a byte holds codes 32 columns
apart (STRIDED: Q2_K, Q3_K, TQ2_0), a unit takes eight bytes and its runs are 32 columns apart; else it has neighbours.

Codebooks hold few different values. An entry of eight is kept as eight nibbles that choose bytes (`prmt`): three
magnitudes and their negatives, so that a sign is one bit of a nibble; IQ1's entries choose among three values with the
shift of an eighth in it, times eight. An entry of four (IQ3) is kept as it is. Tables lie in shared memory.

Blocks are 17 to 136 bytes, so words of them begin anywhere: aligned words are loaded, and shifted into place only when
they are needed, as a shift waits for memory. A word is loaded only where a byte of it is wanted.
'''

COMMON = r"""
#define STRIDED_COLUMN(part, run) ((part) / 4 * 128 + (run) * 32 + (part) % 4 * 8)
#if STRIDED
#define RUN_COLUMN(part, run) STRIDED_COLUMN(part, run)
#else
#define RUN_COLUMN(part, run) ((part) * 32 + (run) * 8)
#endif
typedef const unsigned char* Bytes;

#define SCALE_OF(run) ((run) * SCALES / 4)

struct Unit {
  unsigned code[4][2];
  float scale[SCALES];  // a weight is scale * (code - ZERO)
#if LEAST
  unsigned least;  // less super_least times a run's byte of this
  float super_least;
#endif
};

// Where a block lies: `odd` bytes behind an aligned word. Neighbouring units of a lane have the same.
struct Start {
  Bytes aligned;
  int odd;
  __device__ __forceinline__ explicit Start(Bytes block) {
    odd = ALIGNED == 4 ? 0 : (int)((unsigned long long)block & 3);
    aligned = block - odd;
  }
  __device__ __forceinline__ Bytes at(int offset) const { return aligned + (odd + offset); }
};

// BYTES of a block from `offset` on, as the aligned words that hold them.
template <int BYTES> struct Field {
  static const int COUNT = (BYTES + 3 - ALIGNED + 4) / 4, SURE = (BYTES + 3) / 4;
  unsigned raw[COUNT], shift;
  __device__ __forceinline__ void load(const Start& block, int offset, int wanted = BYTES) {
    const int beside = ALIGNED == 4 ? 0 : (block.odd + offset) & 3;
    const Bytes from = block.at(offset - beside);
    shift = 8 * beside;
#pragma unroll
    for (int i = 0; i < COUNT; i++)
      raw[i] = (i < SURE && wanted == BYTES) || beside + wanted > 4 * i ? stream_part(from + 4 * i) : 0;
  }
  __device__ __forceinline__ unsigned word(int i) const {
    return ALIGNED == 4 ? raw[i] : __funnelshift_r(raw[i], i + 1 < COUNT ? raw[i + 1 < COUNT ? i + 1 : i] : 0, shift);
  }
};

__device__ __forceinline__ float small_float(unsigned code) {  // of less than 2^23, without the slow conversion
  return __int_as_float(code | 0x4B000000) - 8388608.0f;
}

__device__ __forceinline__ float byte_float(unsigned word, int i, int zero = 0) {  // of byte i, less `zero`
  return __int_as_float(pick(word, 0x4B000000, 0x7440 | i)) - (8388608.0f + zero);
}

__device__ __forceinline__ unsigned signed_code(unsigned bytes) {  // codes as they are, ZERO taken from each
  return ZERO ? ((bytes | 0x80808080) - ZERO * 0x01010101u) ^ 0x80808080 : bytes;
}

// Bit i of eight to bit 4 * i + 2: products that meet elsewhere carry into bits that are masked away.
__device__ __forceinline__ unsigned to_nibbles(unsigned bits) {
  return ((bits & 0x55) * (0x41041 << 2) & 0x04040404) | ((bits & 0xAA) * (0x41041 << 5) & 0x40404040);
}

__device__ __forceinline__ unsigned byte_of(unsigned word, int i) { return pick(word, 0, 0x4440 | i); }

// Bits of a word from bit `from` on, as the ninth and later bits of a number.
__device__ __forceinline__ unsigned ninth(unsigned word, int from, int bits) {
  return (from > 8 ? word >> (from - 8) : word << (8 - from)) & ((1u << bits) - 1) << 8;
}

// Tables in shared memory, each word as often as fits, for lanes to read theirs from banks of their own.
struct Books {
  unsigned grid, signs;  // as `shared_place` gives them
  __device__ __forceinline__ unsigned entry(unsigned number) const {
    return shared_word(grid + number * (4 * GRID_COPIES));
  }
  // Eight signs, as nibbles. Where the file keeps seven their number is even.
  __device__ __forceinline__ unsigned signs_of(unsigned bits) const {
    return shared_word(signs + bits * (4 * SIGN_COPIES));
  }
};

__device__ __forceinline__ void choose(unsigned* code, unsigned nibbles, unsigned low, unsigned high) {
  code[0] = pick(low, high, nibbles);
  code[1] = pick(low, high, nibbles >> 16);
}

// Of 8, 25 and 43; signs as nibbles.
__device__ __forceinline__ void signed_entry(unsigned* code, unsigned entry, unsigned signs) {
  choose(code, entry | signs, 0x002B1908, 0x00D5E7F8);
}

__device__ __forceinline__ void shifted_entry(unsigned* code, unsigned entry, bool down) {  // -8, 0, 8, 1 more or less
  choose(code, down ? entry | 0x44444444 : entry, 0x000901F9, 0x0007FFF7);
}

__device__ __forceinline__ unsigned with_signs(unsigned four, unsigned nibbles) {  // no byte is 0, so none carries
  const unsigned mask = pick(0, 0xFF, nibbles);
  return (four ^ mask) + (mask & 0x01010101);
}

// Eight nibbles by a table of 16 bytes: low nibbles' values, and high nibbles'.
__device__ __forceinline__ void by_table(unsigned* low, unsigned* high, unsigned nibbles) {
  const unsigned at = nibbles & 0x77777777, half = 0x32103210 | (nibbles >> 1 & 0x44444444);
  unsigned both[2];
#pragma unroll
  for (int i = 0; i < 2; i++)
    both[i] = pick(pick(TABLE_0, TABLE_1, at >> 16 * i), pick(TABLE_2, TABLE_3, at >> 16 * i), half >> 16 * i);
  *low = pick(both[0], both[1], 0x6420);
  *high = pick(both[0], both[1], 0x7531);
}
"""

_NIBBLES = r"""
__device__ __forceinline__ void codes_of_nibbles(Unit& unit, const unsigned* word) {
#pragma unroll
  for (int i = 0; i < 4; i++) by_table(&unit.code[i / 2][i % 2], &unit.code[2 + i / 2][i % 2], word[i]);
}
"""

Q2_K = r"""
struct Raw { Field<8> codes, scales; Field<4> supers; };

__device__ __forceinline__ void load_unit(Raw& raw, const Start& block, int part) {
  raw.codes.load(block, 16 + part * 8);
  raw.scales.load(block, part / 4 * 8);
  raw.supers.load(block, 80);
}

__device__ __forceinline__ void decode_unit(Unit& unit, const Raw& raw, int part, const Books&) {
  const float d = half_bits(raw.supers.word(0) & 0xFFFF);
  const unsigned packed = pick(raw.scales.word(0), raw.scales.word(1), part % 4 / 2 * 0x1111 + 0x6420);
  unit.super_least = half_bits(raw.supers.word(0) >> 16);
  unit.least = packed >> 4 & 0x0F0F0F0F;
#pragma unroll
  for (int i = 0; i < 4; i++) {
    unit.scale[i] = d * byte_float(packed & 0x0F0F0F0F, i);
#pragma unroll
    for (int w = 0; w < 2; w++) unit.code[i][w] = raw.codes.word(w) >> 2 * i & 0x03030303;
  }
}
"""

Q3_K = r"""
struct Raw { Field<8> high, codes; Field<14> scales; };

__device__ __forceinline__ void load_unit(Raw& raw, const Start& block, int part) {
  raw.high.load(block, part % 4 * 8);
  raw.codes.load(block, 32 + part * 8);
  raw.scales.load(block, 96);
}

__device__ __forceinline__ void decode_unit(Unit& unit, const Raw& raw, int part, const Books&) {
  // A run's scale: four bits, and two that runs 0 and 2, and 1 and 3, have in one byte.
  const int shift = part / 4 * 4, side = part % 4 / 2 * 0x1111;
  const unsigned low = pick(raw.scales.word(0), raw.scales.word(1), side + 0x6420) >> shift & 0x0F0F0F0F;
  const unsigned top = pick(raw.scales.word(2), 0, side + 0x2020) >> shift;
  const unsigned scales = low | (top << 4 & 0x3030) | (top << 2 & 0x30300000);
  const float d = half_bits(raw.scales.word(3) & 0xFFFF);
  const unsigned high[2] = {raw.high.word(0) >> shift, raw.high.word(1) >> shift};
#pragma unroll
  for (int i = 0; i < 4; i++) {
    unit.scale[i] = d * byte_float(scales, i, 32);
#pragma unroll
    for (int w = 0; w < 2; w++)
      unit.code[i][w] = (raw.codes.word(w) >> 2 * i & 0x03030303) |
                        ((i < 2 ? high[w] << (2 - i) : high[w] >> (i - 2)) & 0x04040404);
  }
}
"""

IQ4_NL = _NIBBLES + r"""
struct Raw { Field<16> codes; unsigned super; };

__device__ __forceinline__ void load_unit(Raw& raw, const Start& block, int) {
  raw.codes.load(block, 2);
  raw.super = stream_half(block.at(0));
}

__device__ __forceinline__ void decode_unit(Unit& unit, const Raw& raw, int, const Books&) {
  const unsigned word[4] = {raw.codes.word(0), raw.codes.word(1), raw.codes.word(2), raw.codes.word(3)};
  codes_of_nibbles(unit, word);
  unit.scale[0] = half_bits(raw.super);
}
"""

IQ4_XS = _NIBBLES + r"""
struct Raw { unsigned codes[4], head[2]; };

__device__ __forceinline__ void load_unit(Raw& raw, const Start& block, int part) {
  stream_two(raw.codes, block.at(8 + part * 16));
  stream_two(raw.codes + 2, block.at(16 + part * 16));
  stream_two(raw.head, block.at(0));
}

__device__ __forceinline__ void decode_unit(Unit& unit, const Raw& raw, int part, const Books&) {
  codes_of_nibbles(unit, raw.codes);
  unsigned scale = (raw.head[1] >> 4 * part & 15) | (raw.head[0] >> (16 + 2 * part) & 3) << 4;
  unit.scale[0] = half_bits(raw.head[0] & 0xFFFF) * (small_float(scale) - 32.0f);
}
"""

MXFP4 = _NIBBLES + r"""
struct Raw { Field<17> all; };

__device__ __forceinline__ void load_unit(Raw& raw, const Start& block, int) { raw.all.load(block, 0); }

__device__ __forceinline__ void decode_unit(Unit& unit, const Raw& raw, int, const Books&) {
  unsigned word[5];
#pragma unroll
  for (int i = 0; i < 5; i++) word[i] = raw.all.word(i);
  const unsigned exponent = word[0] & 255;
#pragma unroll
  for (int i = 0; i < 4; i++) word[i] = __funnelshift_r(word[i], word[i + 1], 8);
  codes_of_nibbles(unit, word);
  unit.scale[0] = __int_as_float(exponent < 2 ? 0x00200000 << exponent : exponent - 1 << 23);
}
"""

IQ2_XXS = r"""
struct Raw { Field<8> codes; unsigned super; };

__device__ __forceinline__ void load_unit(Raw& raw, const Start& block, int part) {
  raw.codes.load(block, 2 + part * 8);
  raw.super = stream_half(block.at(0));
}

__device__ __forceinline__ void decode_unit(Unit& unit, const Raw& raw, int, const Books& books) {
  const unsigned entries = raw.codes.word(0), signs = raw.codes.word(1);
#pragma unroll
  for (int i = 0; i < 4; i++)
    signed_entry(unit.code[i], books.entry(byte_of(entries, i)), books.signs_of(signs >> 7 * i & 127));
  unit.scale[0] = half_bits(raw.super) * small_float(2 * (signs >> 28) + 1) * 0.125f;
}
"""

IQ2_XS = r"""
struct Raw { Field<8> codes; unsigned super, scales; };

__device__ __forceinline__ void load_unit(Raw& raw, const Start& block, int part) {
  raw.codes.load(block, 2 + part * 8);
  raw.super = stream_half(block.at(0));
  raw.scales = stream_half(block.at(66 + part / 2 * 2));
}

__device__ __forceinline__ void decode_unit(Unit& unit, const Raw& raw, int part, const Books& books) {
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const unsigned codes = raw.codes.word(i / 2);
    const int from = i % 2 * 16;
    signed_entry(unit.code[i], books.entry(codes >> from & 511), books.signs_of(codes >> (from + 9) & 127));
  }
  const unsigned scales = raw.scales >> part % 2 * 8;
  const float d = half_bits(raw.super) * 0.125f;
  unit.scale[0] = d * small_float(2 * (scales & 15) + 1);
  unit.scale[1] = d * small_float(2 * (scales >> 4 & 15) + 1);
}
"""

IQ2_S = r"""
struct Raw { Field<4> codes, signs; unsigned super, high, scales; };

__device__ __forceinline__ void load_unit(Raw& raw, const Start& block, int part) {
  raw.codes.load(block, 2 + part * 4);
  raw.signs.load(block, 34 + part * 4);
  raw.super = stream_half(block.at(0));
  raw.high = stream_half(block.at(66 + part / 2 * 2));
  raw.scales = stream_half(block.at(74 + part / 2 * 2));
}

__device__ __forceinline__ void decode_unit(Unit& unit, const Raw& raw, int part, const Books& books) {
  const unsigned codes = raw.codes.word(0), signs = raw.signs.word(0);
  const unsigned high = raw.high >> part % 2 * 8, scales = raw.scales >> part % 2 * 8;
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const unsigned entry = books.entry(byte_of(codes, i) | ninth(high, 2 * i, 2));
    signed_entry(unit.code[i], entry, books.signs_of(byte_of(signs, i)));
  }
  const float d = half_bits(raw.super) * 0.125f;
  unit.scale[0] = d * small_float(2 * (scales & 15) + 1);
  unit.scale[1] = d * small_float(2 * (scales >> 4 & 15) + 1);
}
"""

IQ3_XXS = r"""
struct Raw { Field<8> codes; Field<4> signs; unsigned super; };

__device__ __forceinline__ void load_unit(Raw& raw, const Start& block, int part) {
  raw.codes.load(block, 2 + part * 8);
  raw.signs.load(block, 66 + part * 4);
  raw.super = stream_half(block.at(0));
}

__device__ __forceinline__ void decode_unit(Unit& unit, const Raw& raw, int, const Books& books) {
  const unsigned signs = raw.signs.word(0);
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const unsigned eight = books.signs_of(signs >> 7 * i & 127), codes = raw.codes.word(i / 2);
    unit.code[i][0] = with_signs(books.entry(byte_of(codes, i % 2 * 2)), eight);
    unit.code[i][1] = with_signs(books.entry(byte_of(codes, i % 2 * 2 + 1)), eight >> 16);
  }
  unit.scale[0] = half_bits(raw.super) * small_float(2 * (signs >> 28) + 1) * 0.25f;
}
"""

IQ3_S = r"""
struct Raw { Field<8> codes; Field<4> signs; unsigned super, high, scales; };

__device__ __forceinline__ void load_unit(Raw& raw, const Start& block, int part) {
  raw.codes.load(block, 2 + part * 8);
  raw.signs.load(block, 74 + part * 4);
  raw.super = stream_half(block.at(0));
  raw.high = stream_half(block.at(66 + part / 2 * 2));
  raw.scales = stream_half(block.at(106 + part / 4 * 2));
}

__device__ __forceinline__ void decode_unit(Unit& unit, const Raw& raw, int part, const Books& books) {
  const unsigned signs = raw.signs.word(0), high = raw.high >> part % 2 * 8;
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const unsigned eight = books.signs_of(byte_of(signs, i)), codes = raw.codes.word(i / 2);
    unit.code[i][0] = with_signs(books.entry(byte_of(codes, i % 2 * 2) | ninth(high, 2 * i, 1)), eight);
    unit.code[i][1] = with_signs(books.entry(byte_of(codes, i % 2 * 2 + 1) | ninth(high, 2 * i + 1, 1)), eight >> 16);
  }
  unit.scale[0] = half_bits(raw.super) * small_float(2 * (raw.scales >> part % 4 * 4 & 15) + 1);
}
"""

IQ1_S = r"""
struct Raw { Field<4> codes; unsigned super, high; };

__device__ __forceinline__ void load_unit(Raw& raw, const Start& block, int part) {
  raw.codes.load(block, 2 + part * 4);
  raw.super = stream_half(block.at(0));
  raw.high = stream_half(block.at(34 + part * 2));
}

__device__ __forceinline__ void decode_unit(Unit& unit, const Raw& raw, int, const Books& books) {
  const unsigned codes = raw.codes.word(0);
#pragma unroll
  for (int i = 0; i < 4; i++)
    shifted_entry(unit.code[i], books.entry(byte_of(codes, i) | ninth(raw.high, 3 * i, 3)), raw.high & 0x8000);
  unit.scale[0] = half_bits(raw.super) * small_float(2 * (raw.high >> 12 & 7) + 1) * 0.125f;
}
"""

IQ1_M = r"""
struct Raw { unsigned codes, high, scales[2]; };

__device__ __forceinline__ void load_unit(Raw& raw, const Start& block, int part) {
  raw.codes = stream_part(block.at(part * 4));
  raw.high = stream_half(block.at(32 + part * 2));
  stream_two(raw.scales, block.at(48));
}

__device__ __forceinline__ void decode_unit(Unit& unit, const Raw& raw, int part, const Books& books) {
#pragma unroll
  for (int i = 0; i < 4; i++) {
    shifted_entry(unit.code[i], books.entry(byte_of(raw.codes, i) | ninth(raw.high, 4 * i, 3)), raw.high >> 4 * i & 8);
  }
  // The f16 scale is in the top bits of four words, scales of 16 columns in the twelve below.
  const unsigned super = (raw.scales[0] >> 12 & 15) | (raw.scales[0] >> 24 & 0xF0) | (raw.scales[1] >> 4 & 0xF00) |
                         (raw.scales[1] >> 16 & 0xF000);
  const unsigned scales = (part < 4 ? raw.scales[0] : raw.scales[1]) >> (part / 2 % 2 * 16 + part % 2 * 6);
  const float d = half_bits(super) * 0.125f;
  unit.scale[0] = d * small_float(2 * (scales & 7) + 1);
  unit.scale[1] = d * small_float(2 * (scales >> 3 & 7) + 1);
}
"""

TQ1_0 = r"""
struct Raw { Field<32> codes; unsigned super; };

__device__ __forceinline__ void load_unit(Raw& raw, const Start& block, int part) {
  raw.codes.load(block, part < 5 ? 0 : 32, part < 5 ? 32 : 20);
  raw.super = stream_half(block.at(52));
}

// Of four bytes, digit n in base three: the byte is a fraction of 243 in 256ths.
__device__ __forceinline__ unsigned digits(unsigned bytes, int n) {
  const unsigned power = n < 4 ? 0x1B090301 >> 8 * n & 255 : 81;
  unsigned even = ((bytes & 0x00FF00FF) * power & 0x00FF00FF) * 3 >> 8 & 0x00030003;
  unsigned odd = ((bytes >> 8 & 0x00FF00FF) * power & 0x00FF00FF) * 3 & 0x03000300;
  return even | odd;
}

__device__ __forceinline__ void decode_unit(Unit& unit, const Raw& raw, int part, const Books&) {
#pragma unroll
  for (int i = 0; i < 8; i++) {  // 32 bytes of five digits, then 16 bytes of five, then 4 bytes of four
    unsigned beyond = raw.codes.word(i < 4 ? i : 4), within = raw.codes.word(i), later = raw.codes.word(i % 4);
    bool last = part == 7 && i >= 4;
    unit.code[i / 2][i % 2] = digits(part < 5 ? within : last ? beyond : later,
                                     part < 5 ? part : last ? i - 4 : (part - 5) * 2 + i / 4);
  }
  unit.scale[0] = half_bits(raw.super);
}
"""

TQ2_0 = r"""
struct Raw { Field<8> codes; unsigned super; };

__device__ __forceinline__ void load_unit(Raw& raw, const Start& block, int part) {
  raw.codes.load(block, part * 8);
  raw.super = stream_half(block.at(64));
}

__device__ __forceinline__ void decode_unit(Unit& unit, const Raw& raw, int, const Books&) {
#pragma unroll
  for (int i = 0; i < 4; i++)
#pragma unroll
    for (int w = 0; w < 2; w++) unit.code[i][w] = raw.codes.word(w) >> 2 * i & 0x03030303;
  unit.scale[0] = half_bits(raw.super);
}
"""

DECODERS = {
    "Q2_K": Q2_K, "Q3_K": Q3_K, "IQ4_NL": IQ4_NL, "IQ4_XS": IQ4_XS, "MXFP4": MXFP4, "IQ2_XXS": IQ2_XXS,
    "IQ2_XS": IQ2_XS, "IQ2_S": IQ2_S, "IQ3_XXS": IQ3_XXS, "IQ3_S": IQ3_S, "IQ1_S": IQ1_S, "IQ1_M": IQ1_M,
    "TQ1_0": TQ1_0, "TQ2_0": TQ2_0,
}  # fmt: skip
