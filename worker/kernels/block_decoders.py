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
#define SCALE_OF(run) ((run) * SCALES / 4)

struct Unit {
  unsigned code[4][2];
  float scale[SCALES];
#if LEAST
  unsigned least[4];  // a weight is scale * code - super_least * least
  float super_least;
#endif
};

// BYTES of a block from `from` on, as the aligned words that hold them.
template <int BYTES> struct Field {
  static const int COUNT = (BYTES + 3 - ALIGNED + 4) / 4, SURE = (BYTES + 3) / 4;
  unsigned raw[COUNT], shift;
  __device__ __forceinline__ void load(const unsigned char* from, int wanted = BYTES) {
    const unsigned beside = ALIGNED == 4 ? 0 : (unsigned)(unsigned long long)from & 3;
    shift = 8 * beside;
#pragma unroll
    for (int i = 0; i < COUNT; i++)
      raw[i] = (i < SURE && wanted == BYTES) || beside + wanted > 4 * i ? stream_part(from - beside + 4 * i) : 0;
  }
  __device__ __forceinline__ unsigned word(int i) const {
    return ALIGNED == 4 ? raw[i] : __funnelshift_r(raw[i], i + 1 < COUNT ? raw[i + 1 < COUNT ? i + 1 : i] : 0, shift);
  }
};

__device__ __forceinline__ float small_float(unsigned code) {  // of less than 2^23, without the slow conversion
  return __int_as_float(code | 0x4B000000) - 8388608.0f;
}

__device__ __forceinline__ unsigned less(unsigned bytes, unsigned each) {  // of bytes below 128, signed differences
  return ((bytes | 0x80808080) - each) ^ 0x80808080;
}

__device__ __forceinline__ unsigned byte_of(unsigned word, int i) { return (word >> (8 * i)) & 255; }

// The file keeps seven of eight signs; their number is even.
__device__ __forceinline__ unsigned with_eighth(unsigned seven) { return seven | (__popc(seven) & 1) << 7; }

// Bit i of eight to bit 4 * i + 2.
__device__ __forceinline__ unsigned to_nibbles(unsigned bits) {
  bits = (bits | bits << 12) & 0x000F000F;
  bits = (bits | bits << 6) & 0x03030303;
  return ((bits | bits << 3) & 0x11111111) << 2;
}

__device__ __forceinline__ void choose(unsigned* code, unsigned nibbles, unsigned low, unsigned high) {
  code[0] = pick(low, high, nibbles);
  code[1] = pick(low, high, nibbles >> 16);
}

__device__ __forceinline__ void signed_entry(unsigned* code, unsigned entry, unsigned signs) {  // of 8, 25 and 43
  choose(code, entry | to_nibbles(signs), 0x002B1908, 0x00D5E7F8);
}

__device__ __forceinline__ void shifted_entry(unsigned* code, unsigned entry, bool down) {  // -8, 0, 8, 1 more or less
  choose(code, down ? entry | 0x44444444 : entry, 0x000901F9, 0x0007FFF7);
}

__device__ __forceinline__ unsigned with_signs(unsigned four, unsigned signs) {  // no byte is 0, so none carries
  unsigned negative = (signs & 15) * 0x00204081 & 0x01010101;
  return (four ^ negative * 255) + negative;
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

__device__ __forceinline__ void load_unit(Raw& raw, const unsigned char* block, int part) {
  raw.codes.load(block + 16 + part * 8);
  raw.scales.load(block + part / 4 * 8);
  raw.supers.load(block + 80);
}

__device__ __forceinline__ void decode_unit(Unit& unit, const Raw& raw, int part, const unsigned*) {
  const float d = half_bits(raw.supers.word(0) & 0xFFFF);
  unit.super_least = half_bits(raw.supers.word(0) >> 16);
#pragma unroll
  for (int i = 0; i < 4; i++) {
    unsigned packed = raw.scales.word(i / 2) >> (i % 2 * 16 + part % 4 / 2 * 8);
    unit.scale[i] = d * small_float(packed & 15);
    unit.least[i] = packed >> 4 & 15;
#pragma unroll
    for (int w = 0; w < 2; w++) unit.code[i][w] = raw.codes.word(w) >> 2 * i & 0x03030303;
  }
}
"""

Q3_K = r"""
struct Raw { Field<8> high, codes; Field<14> scales; };

__device__ __forceinline__ void load_unit(Raw& raw, const unsigned char* block, int part) {
  raw.high.load(block + part % 4 * 8);
  raw.codes.load(block + 32 + part * 8);
  raw.scales.load(block + 96);
}

__device__ __forceinline__ void decode_unit(Unit& unit, const Raw& raw, int part, const unsigned*) {
  const int half = part / 4, side = part % 4 / 2;
  const float d = half_bits(raw.scales.word(3) & 0xFFFF);
#pragma unroll
  for (int i = 0; i < 4; i++) {
    unsigned low = raw.scales.word(i / 2) >> (i % 2 * 16 + side * 8 + half * 4) & 15;
    unsigned top = raw.scales.word(2) >> (i % 2 * 16 + side * 8 + half * 4 + i / 2 * 2) & 3;
    unit.scale[i] = d * (small_float(low | top << 4) - 32.0f);
#pragma unroll
    for (int w = 0; w < 2; w++) {
      unsigned bit = raw.high.word(w) >> (half * 4 + i) & 0x01010101;
      unit.code[i][w] = less((raw.codes.word(w) >> 2 * i & 0x03030303) | bit << 2, 0x04040404);
    }
  }
}
"""

IQ4_NL = _NIBBLES + r"""
struct Raw { Field<16> codes; unsigned super; };

__device__ __forceinline__ void load_unit(Raw& raw, const unsigned char* block, int) {
  raw.codes.load(block + 2);
  raw.super = stream_half(block);
}

__device__ __forceinline__ void decode_unit(Unit& unit, const Raw& raw, int, const unsigned*) {
  const unsigned word[4] = {raw.codes.word(0), raw.codes.word(1), raw.codes.word(2), raw.codes.word(3)};
  codes_of_nibbles(unit, word);
  unit.scale[0] = half_bits(raw.super);
}
"""

IQ4_XS = _NIBBLES + r"""
struct Raw { unsigned codes[4], head[2]; };

__device__ __forceinline__ void load_unit(Raw& raw, const unsigned char* block, int part) {
  stream_two(raw.codes, block + 8 + part * 16);
  stream_two(raw.codes + 2, block + 16 + part * 16);
  stream_two(raw.head, block);
}

__device__ __forceinline__ void decode_unit(Unit& unit, const Raw& raw, int part, const unsigned*) {
  codes_of_nibbles(unit, raw.codes);
  unsigned scale = (raw.head[1] >> 4 * part & 15) | (raw.head[0] >> (16 + 2 * part) & 3) << 4;
  unit.scale[0] = half_bits(raw.head[0] & 0xFFFF) * (small_float(scale) - 32.0f);
}
"""

MXFP4 = _NIBBLES + r"""
struct Raw { Field<17> all; };

__device__ __forceinline__ void load_unit(Raw& raw, const unsigned char* block, int) { raw.all.load(block); }

__device__ __forceinline__ void decode_unit(Unit& unit, const Raw& raw, int, const unsigned*) {
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

__device__ __forceinline__ void load_unit(Raw& raw, const unsigned char* block, int part) {
  raw.codes.load(block + 2 + part * 8);
  raw.super = stream_half(block);
}

__device__ __forceinline__ void decode_unit(Unit& unit, const Raw& raw, int, const unsigned* grid) {
  const unsigned entries = raw.codes.word(0), signs = raw.codes.word(1);
#pragma unroll
  for (int i = 0; i < 4; i++)
    signed_entry(unit.code[i], grid[byte_of(entries, i)], with_eighth(signs >> 7 * i & 127));
  unit.scale[0] = half_bits(raw.super) * small_float(2 * (signs >> 28) + 1) * 0.125f;
}
"""

IQ2_XS = r"""
struct Raw { Field<8> codes; unsigned super, scales; };

__device__ __forceinline__ void load_unit(Raw& raw, const unsigned char* block, int part) {
  raw.codes.load(block + 2 + part * 8);
  raw.super = stream_half(block);
  raw.scales = stream_half(block + 66 + part / 2 * 2);
}

__device__ __forceinline__ void decode_unit(Unit& unit, const Raw& raw, int part, const unsigned* grid) {
#pragma unroll
  for (int i = 0; i < 4; i++) {
    unsigned code = raw.codes.word(i / 2) >> i % 2 * 16;
    signed_entry(unit.code[i], grid[code & 511], with_eighth(code >> 9 & 127));
  }
  const unsigned scales = raw.scales >> part % 2 * 8;
  const float d = half_bits(raw.super) * 0.125f;
  unit.scale[0] = d * small_float(2 * (scales & 15) + 1);
  unit.scale[1] = d * small_float(2 * (scales >> 4 & 15) + 1);
}
"""

IQ2_S = r"""
struct Raw { Field<4> codes, signs; unsigned super, high, scales; };

__device__ __forceinline__ void load_unit(Raw& raw, const unsigned char* block, int part) {
  raw.codes.load(block + 2 + part * 4);
  raw.signs.load(block + 34 + part * 4);
  raw.super = stream_half(block);
  raw.high = stream_half(block + 66 + part / 2 * 2);
  raw.scales = stream_half(block + 74 + part / 2 * 2);
}

__device__ __forceinline__ void decode_unit(Unit& unit, const Raw& raw, int part, const unsigned* grid) {
  const unsigned codes = raw.codes.word(0), signs = raw.signs.word(0);
  const unsigned high = raw.high >> part % 2 * 8, scales = raw.scales >> part % 2 * 8;
#pragma unroll
  for (int i = 0; i < 4; i++)
    signed_entry(unit.code[i], grid[byte_of(codes, i) | (high >> 2 * i & 3) << 8], byte_of(signs, i));
  const float d = half_bits(raw.super) * 0.125f;
  unit.scale[0] = d * small_float(2 * (scales & 15) + 1);
  unit.scale[1] = d * small_float(2 * (scales >> 4 & 15) + 1);
}
"""

IQ3_XXS = r"""
struct Raw { Field<8> codes; Field<4> signs; unsigned super; };

__device__ __forceinline__ void load_unit(Raw& raw, const unsigned char* block, int part) {
  raw.codes.load(block + 2 + part * 8);
  raw.signs.load(block + 66 + part * 4);
  raw.super = stream_half(block);
}

__device__ __forceinline__ void decode_unit(Unit& unit, const Raw& raw, int, const unsigned* grid) {
  const unsigned signs = raw.signs.word(0);
#pragma unroll
  for (int i = 0; i < 4; i++) {
    unsigned eight = with_eighth(signs >> 7 * i & 127), codes = raw.codes.word(i / 2) >> i % 2 * 16;
    unit.code[i][0] = with_signs(grid[codes & 255], eight);
    unit.code[i][1] = with_signs(grid[codes >> 8 & 255], eight >> 4);
  }
  unit.scale[0] = half_bits(raw.super) * small_float(2 * (signs >> 28) + 1) * 0.25f;
}
"""

IQ3_S = r"""
struct Raw { Field<8> codes; Field<4> signs; unsigned super, high, scales; };

__device__ __forceinline__ void load_unit(Raw& raw, const unsigned char* block, int part) {
  raw.codes.load(block + 2 + part * 8);
  raw.signs.load(block + 74 + part * 4);
  raw.super = stream_half(block);
  raw.high = stream_half(block + 66 + part / 2 * 2);
  raw.scales = stream_half(block + 106 + part / 4 * 2);
}

__device__ __forceinline__ void decode_unit(Unit& unit, const Raw& raw, int part, const unsigned* grid) {
  const unsigned signs = raw.signs.word(0), high = raw.high >> part % 2 * 8;
#pragma unroll
  for (int i = 0; i < 4; i++) {
    unsigned codes = raw.codes.word(i / 2) >> i % 2 * 16;
    unit.code[i][0] = with_signs(grid[(codes & 255) | (high >> 2 * i & 1) << 8], signs >> 8 * i);
    unit.code[i][1] = with_signs(grid[(codes >> 8 & 255) | (high >> (2 * i + 1) & 1) << 8], signs >> (8 * i + 4));
  }
  unit.scale[0] = half_bits(raw.super) * small_float(2 * (raw.scales >> part % 4 * 4 & 15) + 1);
}
"""

IQ1_S = r"""
struct Raw { Field<4> codes; unsigned super, high; };

__device__ __forceinline__ void load_unit(Raw& raw, const unsigned char* block, int part) {
  raw.codes.load(block + 2 + part * 4);
  raw.super = stream_half(block);
  raw.high = stream_half(block + 34 + part * 2);
}

__device__ __forceinline__ void decode_unit(Unit& unit, const Raw& raw, int, const unsigned* grid) {
  const unsigned codes = raw.codes.word(0);
#pragma unroll
  for (int i = 0; i < 4; i++)
    shifted_entry(unit.code[i], grid[byte_of(codes, i) | (raw.high >> 3 * i & 7) << 8], raw.high & 0x8000);
  unit.scale[0] = half_bits(raw.super) * small_float(2 * (raw.high >> 12 & 7) + 1) * 0.125f;
}
"""

IQ1_M = r"""
struct Raw { unsigned codes, high, scales[2]; };

__device__ __forceinline__ void load_unit(Raw& raw, const unsigned char* block, int part) {
  raw.codes = stream_part(block + part * 4);
  raw.high = stream_half(block + 32 + part * 2);
  stream_two(raw.scales, block + 48);
}

__device__ __forceinline__ void decode_unit(Unit& unit, const Raw& raw, int part, const unsigned* grid) {
#pragma unroll
  for (int i = 0; i < 4; i++) {
    unsigned high = raw.high >> 4 * i;
    shifted_entry(unit.code[i], grid[byte_of(raw.codes, i) | (high & 7) << 8], high & 8);
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

__device__ __forceinline__ void load_unit(Raw& raw, const unsigned char* block, int part) {
  raw.codes.load(block + (part < 5 ? 0 : 32), part < 5 ? 32 : 20);
  raw.super = stream_half(block + 52);
}

// Of four bytes, digit n in base three: the byte is a fraction of 243 in 256ths. 1 less.
__device__ __forceinline__ unsigned digits(unsigned bytes, int n) {
  const unsigned power = n < 4 ? 0x1B090301 >> 8 * n & 255 : 81;
  unsigned even = ((bytes & 0x00FF00FF) * power & 0x00FF00FF) * 3 >> 8 & 0x00030003;
  unsigned odd = ((bytes >> 8 & 0x00FF00FF) * power & 0x00FF00FF) * 3 & 0x03000300;
  return less(even | odd, 0x01010101);
}

__device__ __forceinline__ void decode_unit(Unit& unit, const Raw& raw, int part, const unsigned*) {
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

__device__ __forceinline__ void load_unit(Raw& raw, const unsigned char* block, int part) {
  raw.codes.load(block + part * 8);
  raw.super = stream_half(block + 64);
}

__device__ __forceinline__ void decode_unit(Unit& unit, const Raw& raw, int, const unsigned*) {
#pragma unroll
  for (int i = 0; i < 4; i++)
#pragma unroll
    for (int w = 0; w < 2; w++) unit.code[i][w] = less(raw.codes.word(w) >> 2 * i & 0x03030303, 0x01010101);
  unit.scale[0] = half_bits(raw.super);
}
"""

DECODERS = {
    "Q2_K": Q2_K, "Q3_K": Q3_K, "IQ4_NL": IQ4_NL, "IQ4_XS": IQ4_XS, "MXFP4": MXFP4, "IQ2_XXS": IQ2_XXS,
    "IQ2_XS": IQ2_XS, "IQ2_S": IQ2_S, "IQ3_XXS": IQ3_XXS, "IQ3_S": IQ3_S, "IQ1_S": IQ1_S, "IQ1_M": IQ1_M,
    "TQ1_0": TQ1_0, "TQ2_0": TQ2_0,
}  # fmt: skip
