// Lets g++ run the CUDA source of batches: lanes are fibers, a warp's lanes go in step from one collective to the next.
// The instructions that the source has in functions of their own are written out here, by the layouts of PTX's manual.
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#define __device__
#define __global__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __shared__ static
#define __align__(bytes) __attribute__((aligned(bytes)))
#define __syncthreads() hand_over(WAITS)
#define __syncwarp() hand_over(READY)

using std::min;

struct Index { unsigned x; };
struct uint2 { unsigned x, y; };
struct alignas(16) uint4 { unsigned x, y, z, w; };
struct float2 { float x, y; };
static uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
static uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
static Index threadIdx, blockIdx, blockDim, gridDim;

enum State { READY, WAITS, DONE };
struct Copy { void* to; const void* from; int size, bytes; };  // what lies beyond `bytes` becomes zeros
struct Fiber { ucontext_t context; std::vector<char> stack; State state; std::vector<Copy> copies; };
static std::vector<Fiber> fibers;
static ucontext_t scheduler;
static unsigned current, shown[1024][10];  // what each lane shows the others of its warp

[[noreturn]] static void fail(const char* what) { fprintf(stderr, "%s\n", what); abort(); }

static void hand_over(State state) {
  unsigned own = current;
  fibers[own].state = state;
  swapcontext(&fibers[own].context, &scheduler);
}

// All lanes show words, then each reads what it needs; `read` runs between two steps of the whole warp.
template <class Read> static void together(std::vector<unsigned> words, Read read) {
  std::copy(words.begin(), words.end(), shown[current]);
  hand_over(READY);
  read(current & 31, shown + (current & ~31u));
  hand_over(READY);
}

// Memory: aligned, and within the tensors.
struct Range { const char* begin; long size; };
static std::vector<Range> ranges;

static void touch(const void* at, long bytes) {
  if ((size_t)at % bytes) fail("unaligned");
  for (const Range& r : ranges)
    if ((const char*)at >= r.begin && (const char*)at + bytes <= r.begin + r.size) return;
  fail("out of range");
}

template <class T> static T __ldg(const T* from) { touch(from, sizeof(T)); return *from; }
static void stream_two(unsigned* to, const void* from) { touch(from, 8); memcpy(to, from, 8); }
static unsigned stream_part(const void* from) { return __ldg((const unsigned*)from); }
static unsigned stream_half(const void* from) { return __ldg((const unsigned short*)from); }

static unsigned __float_as_uint(float value) { unsigned bits; memcpy(&bits, &value, 4); return bits; }
static float __int_as_float(int bits) { float value; memcpy(&value, &bits, 4); return value; }

static unsigned __byte_perm(unsigned low, unsigned high, unsigned select) {
  unsigned long long both = (unsigned long long)high << 32 | low;
  unsigned result = 0;
  for (int i = 0; i < 4; i++) result |= (unsigned)(both >> 8 * (select >> 4 * i & 7) & 255) << 8 * i;
  return result;
}

static float half_bits(unsigned bits) {
  int sign = bits >> 15 & 1, exponent = bits >> 10 & 31, fraction = bits & 1023;
  if (exponent == 31) fail("f16 is not finite");
  float value = exponent ? ldexpf(1024 + fraction, exponent - 25) : ldexpf(fraction, -24);
  return sign ? -value : value;
}

static unsigned bits_of_half(float value) {  // of numbers that f16 holds exactly
  if (value == 0) return 0;
  int exponent;
  float fraction = frexpf(fabsf(value), &exponent) * 2048;
  if (fraction != (int)fraction || exponent < -13) fail("f16 would round");
  return (value < 0) << 15 | (exponent + 14) << 10 | ((int)fraction & 1023);
}

static unsigned add_halves(unsigned a, unsigned b) {
  unsigned top = bits_of_half(half_bits(a >> 16) + half_bits(b >> 16));
  return top << 16 | bits_of_half(half_bits(a & 0xFFFF) + half_bits(b & 0xFFFF));
}

// Copies that go on beside all else are made when they are waited for, as late as they may be: until then nothing sound
// can be read there.
alignas(16) static char shared_bytes_of_block[99 << 10];
static uint4* shared_memory() { return (uint4*)shared_bytes_of_block; }

#if __CUDA_ARCH__ >= 800
static void copy_later(void* to, const void* from, int size, int bytes) {
  if ((size_t)to % size) fail("unaligned");
  if ((char*)to < shared_bytes_of_block || (char*)to + size > shared_bytes_of_block + sizeof(shared_bytes_of_block))
    fail("beyond shared memory");
  if (bytes) touch(from, bytes);
  memset(to, 0x7F, size);
  fibers[current].copies.push_back({to, from, size, bytes});
}
static void copy_piece(void* to, const void* from, int bytes) { copy_later(to, from, 16, bytes); }
static void copy_word(void* to, const void* from, int bytes) { copy_later(to, from, 4, bytes); }
static void await_copies() {
  for (const Copy& copy : fibers[current].copies) {
    memset(copy.to, 0, copy.size);
    memcpy(copy.to, copy.from, copy.bytes);
  }
  fibers[current].copies.clear();
}
#endif

// Place of an operand: words hold `packed` neighbours, a row of eight four lanes, what lies beyond the next word.
struct Place { int lane, word, part; };
static Place place_of_a(int row, int k, int packed) {
  return {row % 8 * 4 + k % (4 * packed) / packed, row / 8 + 2 * (k / (4 * packed)), k % packed};
}
static Place place_of_b(int column, int k, int packed) {
  return {column * 4 + k % (4 * packed) / packed, k / (4 * packed), k % packed};
}

template <class Number, class Value>
static void multiply_add(Number* c, const Number* start, std::vector<unsigned> a, std::vector<unsigned> b, int depth, int packed,
                         Value value) {
  const int results = a.size() == 1 ? 2 : 4;  // of a lane: one word of a is eight rows
  a.resize(4);
  a.insert(a.end(), b.begin(), b.end());
  together(a, [&](int lane, unsigned (*of)[10]) {
    for (int i = 0; i < results; i++) {
      double sum = start ? *start : c[i];  // exact for all that is summed here
      for (int k = 0; k < depth; k++) {
        Place p = place_of_a(lane / 4 + i / 2 * 8, k, packed), q = place_of_b(lane % 4 * 2 + i % 2, k, packed);
        sum += value(of[p.lane][p.word], p.part) * value(of[q.lane][4 + q.word], q.part);
      }
      c[i] = (Number)sum;
    }
  });
}

static double signed_byte(unsigned word, int part) { return (signed char)(word >> 8 * part); }
static double half_of(unsigned word, int part) { return half_bits(word >> 16 * part & 0xFFFF); }

// As the source does, by what the card has.
#if __CUDA_ARCH__ >= 800
static void mma32(int* c, int start, const unsigned* a, const unsigned* b) {
  multiply_add(c, &start, {a[0], a[1], a[2], a[3]}, {b[0], b[1]}, 32, 4, signed_byte);
}
static void mma16(int* c, unsigned a0, unsigned a1, unsigned b) {
  const int start = 0;
  multiply_add(c, &start, {a0, a1}, {b}, 16, 4, signed_byte);
}
static void mma_halves(float* c, const unsigned* a, uint2 b) {
  const float start = 0;
  multiply_add(c, &start, {a[0], a[1], a[2], a[3]}, {b.x, b.y}, 16, 2, half_of);
}
#else
static void mma_piece(int* c, unsigned a, unsigned b) {
  multiply_add(c, (const int*)nullptr, {a}, {b}, 16, 4, signed_byte);
}
static void mma_halves_piece(float* c, unsigned a0, unsigned a1, unsigned b) {
  multiply_add(c, (const float*)nullptr, {a0, a1}, {b}, 8, 2, half_of);
}
#endif

// Runs the kernel that `call` calls: warps in turn, each until all its lanes wait for the block or are done.
static void (*kernel_call)();
static void start_fiber() { kernel_call(); fibers[current].state = DONE; }

static void run_grid(unsigned grid, unsigned threads, void (*call)()) {
  kernel_call = call;
  gridDim.x = grid;
  blockDim.x = threads;
  for (blockIdx.x = 0; blockIdx.x < grid; blockIdx.x++) {
    fibers.assign(threads, Fiber());
    for (Fiber& fiber : fibers) {
      fiber.stack.resize(1 << 16);
      getcontext(&fiber.context);
      fiber.context.uc_stack.ss_sp = fiber.stack.data();
      fiber.context.uc_stack.ss_size = fiber.stack.size();
      fiber.context.uc_link = &scheduler;
      makecontext(&fiber.context, start_fiber, 0);
    }
    auto in_state = [](State state) {
      return (unsigned)std::count_if(fibers.begin(), fibers.end(), [=](Fiber& fiber) { return fiber.state == state; });
    };
    while (in_state(DONE) < threads) {
      for (unsigned first = 0; first < threads; first += 32)
        for (bool ran = true; ran;) {
          ran = false;
          for (current = first; current < first + 32; current++)
            if (fibers[current].state == READY) {
              ran = true;
              threadIdx.x = current;
              swapcontext(&scheduler, &fibers[current].context);
            }
        }
      if (unsigned waiting = in_state(WAITS)) {
        if (waiting < threads) fail("some threads do not come to the barrier");
        for (Fiber& fiber : fibers) fiber.state = READY;
      }
    }
  }
}
