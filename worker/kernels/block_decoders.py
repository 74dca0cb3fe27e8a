'''CUDA source that takes GGUF's own blocks apart, type by type: 32 columns of a row, a *unit*, to whole numbers.

A unit is four *runs* of eight neighbouring columns: int8 codes in two words each, and one, two or four scales (f32), so
that a weight is scale * (code - zero); Q2_K has mins beside them. Products and expansions (`block_source`) are the same
for all types. What takes instructions is the order of the file's bits, so runs follow it: where a byte holds codes 32
columns apart (STRIDED: Q2_K, Q3_K, TQ2_0), a unit takes eight bytes and its runs are 32 columns apart; else it has
neighbours.

Codebooks hold few different values. An entry of eight is kept as eight nibbles that choose bytes (`prmt`): three
magnitudes and their negatives, so that a sign is one bit of a nibble; IQ1's entries choose among three values with the
shift of an eighth in it, times eight. An entry of four (IQ3) is kept as it is. Tables lie in shared memory.

Blocks are 17 to 136 bytes, so words of them begin anywhere: aligned words are loaded, and shifted into place only when
they are needed, as a shift waits for memory. A word is loaded only where a byte of it is wanted (`block_units`).
'''

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

NVFP4 = r"""
struct Raw { Field<16> codes; unsigned scales; };

__device__ __forceinline__ void load_unit(Raw& raw, const Start& block, int part) {
  raw.codes.load(block, 4 + part * 16);
  raw.scales = stream_part(block.at(0));
}

// e4m3 whose sign does not count, halved as codes are doubled: the bits of an f16 of 1/128. All ones but the sign is 0.
__device__ __forceinline__ float scale_of_e4m3(unsigned code) {
  return code == 127 ? 0.0f : half_bits((code & 127) << 7) * 128.0f;
}

__device__ __forceinline__ void decode_unit(Unit& unit, const Raw& raw, int part, const Books&) {
#pragma unroll
  for (int i = 0; i < 2; i++) {  // 16 columns: eight in low nibbles, then eight in high ones
#pragma unroll
    for (int w = 0; w < 2; w++) by_table(&unit.code[2 * i][w], &unit.code[2 * i + 1][w], raw.codes.word(2 * i + w));
    unit.scale[i] = scale_of_e4m3(raw.scales >> (16 * part + 8 * i) & 255);
  }
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
    "Q2_K": Q2_K, "Q3_K": Q3_K, "IQ4_NL": IQ4_NL, "IQ4_XS": IQ4_XS, "MXFP4": MXFP4, "NVFP4": NVFP4,
    "IQ2_XXS": IQ2_XXS, "IQ2_XS": IQ2_XS, "IQ2_S": IQ2_S, "IQ3_XXS": IQ3_XXS, "IQ3_S": IQ3_S, "IQ1_S": IQ1_S,
    "IQ1_M": IQ1_M, "TQ1_0": TQ1_0, "TQ2_0": TQ2_0,
}  # fmt: skip
