// The functions of `instructions.cu` on a CPU, for threads that take turns (`fibers.h`), from the
// formulas of NVIDIA's manual of PTX. What is asynchronous on a GPU happens at once or when it is
// waited for, as drawn. Reads and writes out of the bounds of shared memory, addresses that are not
// aligned and conflicts of banks are errors.

#include <math.h>
#include <stdint.h>
#include <string.h>

#include "fibers.h"

#define INLINE static
#define UNROLL
#define ROLLED
#define ALIGNED(n) __attribute__((aligned(n)))

enum { MOST_COPIES = 64 };

// Values that the lanes of a warp exchange: two sets, so that a lane may go on to the next exchange
// while others still read.
struct Exchange { uint32_t words[2][LANES][6]; struct Meeting meeting; };
static struct Exchange exchanges[MOST_THREADS / LANES];
static unsigned n_exchanges[MOST_THREADS];

// Shares `n` words of this lane; returns those of all lanes, once all have come.
static uint32_t (*share(const uint32_t *words, unsigned n))[6] {
    struct Exchange *exchange = &exchanges[thread_number / LANES];
    unsigned set = n_exchanges[thread_number]++ % 2;
    memcpy(exchange->words[set][thread_number % LANES], words, 4 * n);
    meet(&exchange->meeting, LANES);
    return exchange->words[set];
}

static unsigned read_thread(void) { return thread_number; }

// The shared memory of a block; its addresses begin at a number that is only a multiple of 16.
enum { SHARED_START = 48 };
static unsigned char *shared_memory;
static unsigned n_shared_bytes;
static unsigned long n_blocks_run, poisoned_block;

static unsigned shared_address(void *memory, unsigned n_bytes) {
    // What is read before it is written is NaN.
    if (poisoned_block != n_blocks_run) memset(memory, 0xff, n_bytes);
    poisoned_block = n_blocks_run;
    shared_memory = memory, n_shared_bytes = n_bytes;
    return SHARED_START;
}

static void *shared_bytes(unsigned address, unsigned n, unsigned alignment) {
    if (address % alignment) fail("an address in shared memory is not aligned");
    if (address < SHARED_START || address - SHARED_START + n > n_shared_bytes) fail("out of shared memory");
    return shared_memory + (address - SHARED_START);
}

struct Copy { void *to; unsigned char bytes[16]; unsigned n; };
static struct Copy copies[MOST_THREADS][MOST_COPIES];
static unsigned n_copies[MOST_THREADS];

static void copy(unsigned to, const void *from, int is_there, unsigned n) {
    void *place = shared_bytes(to, n, n);
    unsigned char bytes[16] = {0};
    if ((uintptr_t)from % n && is_there) fail("an address of a copy is not aligned");
    if (is_there) memcpy(bytes, from, n);
    if (draw() % 2) {
        memcpy(place, bytes, n);
        return;
    }
    // What is there until the copy arrives must not be read.
    memset(place, 0xff, n);
    if (n_copies[thread_number] == MOST_COPIES) fail("more copies than the emulator keeps");
    struct Copy *pending = &copies[thread_number][n_copies[thread_number]++];
    pending->to = place, pending->n = n;
    memcpy(pending->bytes, bytes, n);
}
static void copy_chunk(unsigned to, const void *from, int is_there) { copy(to, from, is_there, 16); }
static void copy_pair(unsigned to, const void *from, int is_there) { copy(to, from, is_there, 8); }
static void wait_for_copies(void) {
    for (unsigned i = 0; i < n_copies[thread_number]; i++) {
        struct Copy *pending = &copies[thread_number][i];
        memcpy(pending->to, pending->bytes, pending->n);
    }
    n_copies[thread_number] = 0;
}

static void wait_for_warp(void) {
    uint32_t nothing = 0;
    share(&nothing, 1);
}

static float wide(uint32_t bits) {
    bits <<= 16;
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

// Rounds to nearest, ties to even; NaN remains NaN.
static uint32_t narrow(float value) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    if ((bits & 0x7fffffff) > 0x7f800000) return bits >> 16 | 0x40;
    return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}

static void load(unsigned *m, unsigned row, int is_transposed) {
    uint32_t (*rows)[6] = share(&row, 1);
    unsigned lane = thread_number % LANES;
    for (unsigned matrix = 0; matrix < 4; matrix++) {
        // The rows of a matrix are read together, 4 bytes of each of 32 banks.
        uint32_t banks = 0;
        for (unsigned i = 0; i < 8; i++) banks |= 15u << rows[8 * matrix + i][0] / 4 % 32 & ~0u;
        if (banks != ~0u) fail("rows of a matrix are in the same bank");
        uint32_t pair = 0;
        for (unsigned c = 0; c < 2; c++) {
            unsigned first = lane / 4, second = 2 * (lane % 4) + c;
            unsigned line = is_transposed ? second : first, column = is_transposed ? first : second;
            uint16_t value;
            memcpy(&value, (char *)shared_bytes(rows[8 * matrix + line][0], 16, 16) + 2 * column, 2);
            pair |= (uint32_t)value << 16 * c;
        }
        m[matrix] = pair;
    }
}
static void load_matrices(unsigned *m, unsigned row) { load(m, row, 0); }
static void load_transposed(unsigned *m, unsigned row) { load(m, row, 1); }
static void load_floats(float *x, unsigned from) { memcpy(x, shared_bytes(from, 16, 16), 16); }

static void multiply(float *sums, const unsigned *a, unsigned b0, unsigned b1) {
    uint32_t words[6] = {a[0], a[1], a[2], a[3], b0, b1};
    uint32_t (*lanes)[6] = share(words, 6);
    unsigned lane = thread_number % LANES;
    for (unsigned i = 0; i < 4; i++) {
        unsigned half = i / 2, row = lane / 4, column = 2 * (lane % 4) + i % 2;
        for (unsigned k = 0; k < 16; k++) {
            uint32_t x = lanes[4 * row + k % 8 / 2][half + k / 8 * 2];
            uint32_t y = lanes[4 * column + k % 8 / 2][4 + k / 8];
            sums[i] += wide(x >> k % 2 * 16 & 0xffff) * wide(y >> k % 2 * 16 & 0xffff);
        }
    }
}

static unsigned pack(float low, float high) { return narrow(low) | narrow(high) << 16; }
static float low(unsigned both) { return wide(both & 0xffff); }
static float high(unsigned both) { return wide(both >> 16); }
static float power(float x) { return exp2f(x); }
static float logarithm(float x) { return log2f(x); }
static float fused(float a, float b, float c) { return fmaf(a, b, c); }
static float larger(float a, float b) { return fmaxf(a, b); }

static float exchange(float x, unsigned mask) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    bits = share(&bits, 1)[thread_number % LANES ^ mask][0];
    memcpy(&x, &bits, 4);
    return x;
}
static float largest_of_four(float x) {
    x = larger(x, exchange(x, 1));
    return larger(x, exchange(x, 2));
}
static float sum_of_four(float x) {
    x += exchange(x, 1);
    return x + exchange(x, 2);
}
