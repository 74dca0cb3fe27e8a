"""CUDA source of what `block_decoders` takes blocks apart with: units, fields of a block, tables."""

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
