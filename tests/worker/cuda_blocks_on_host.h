// What the kernels over GGUF's own blocks need beside cuda_on_host.h.
#include "cuda_on_host.h"

using std::max;

struct alignas(16) float4 { float x, y, z, w; };
static float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

static int __popc(unsigned word) { return __builtin_popcount(word); }

static unsigned __funnelshift_r(unsigned low, unsigned high, unsigned shift) {
  return ((unsigned long long)high << 32 | low) >> (shift & 31);
}

static int __dp4a(int a, int b, int sum) {
  for (int i = 0; i < 4; i++) sum += (signed char)(a >> 8 * i) * (signed char)(b >> 8 * i);
  return sum;
}

static float __shfl_xor_sync(unsigned, float value, int other) {
  float result;
  together({__float_as_uint(value)}, [&](int lane, unsigned (*of)[10]) { result = __int_as_float(of[lane ^ other][0]); });
  return result;
}

static unsigned pick(unsigned low, unsigned high, unsigned nibbles) {
  if (nibbles & 0x8888) fail("a nibble would choose a sign");
  return __byte_perm(low, high, nibbles);
}

static char shared_base;
static unsigned shared_place(const unsigned* from) { return (unsigned)((const char*)from - &shared_base); }
static unsigned shared_word(unsigned place) { return *(const unsigned*)(&shared_base + (int)place); }

static unsigned pack_f16(float low, float high) {
  _Float16 pair[2] = {(_Float16)low, (_Float16)high};
  unsigned word;
  memcpy(&word, pair, 4);
  return word;
}
