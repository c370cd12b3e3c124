// Runs the kernels of update.cu on the CPU. The driver's memory is the host's, so that what a kernel
// is given is what it would be given on a device.

#include <math.h>
#include <pthread.h>
#include <string.h>

#include "fibers.h"

static int votes[MOST_THREADS];
static int all_vote(int vote) {
    votes[thread_number] = vote;
    block_wait();
    int all = 1;
    for (unsigned i = 0; i < n_threads; i++) all &= votes[i] != 0;
    block_wait();
    return all;
}

static unsigned bits_of(float value) {
    unsigned bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

#define KERNEL(name, type, job) static void name(type job)
#define DEVICE static
#define SHARED static
#define BLOCK block_number
#define THREAD thread_number
#define BARRIER block_wait
#define ALL(condition) all_vote(condition)
#define BITS(value) bits_of(value)
#include "update.cu"

// `update.rs` asserts the same of its structures.
_Static_assert(sizeof(struct Gradients) == 312, "struct Gradients");
_Static_assert(sizeof(struct Norms) == 64, "struct Norms");
_Static_assert(sizeof(struct Segment) == 28, "struct Segment");
_Static_assert(sizeof(struct Unit) == 112, "struct Unit");
_Static_assert(sizeof(struct Update) == 4080, "struct Update");

// What is emulated now, and its argument.
static const char *emulated;
static const void *argument;
static unsigned n_blocks;

static void emulate_thread(void) {
    for (unsigned block = 0; block < n_blocks; block++) {
        block_number = block;
        if (!strcmp(emulated, "sum_squares")) sum_squares(*(const struct Gradients *)argument);
        if (!strcmp(emulated, "clip_factors")) clip_factors(*(const struct Norms *)argument);
        if (!strcmp(emulated, "adam_w_units")) adam_w_units(*(const struct Update *)argument);
        block_wait();
    }
}

// Runs kernel `name` if it is one of update.cu.
static void emulate(const char *name, void **arguments, unsigned blocks) {
    static pthread_mutex_t one = PTHREAD_MUTEX_INITIALIZER;
    int sums = !strcmp(name, "sum_squares") || !strcmp(name, "clip_factors");
    if (!sums && strcmp(name, "adam_w_units")) return;
    pthread_mutex_lock(&one);
    emulated = name, argument = arguments[0], n_blocks = blocks;
    run_threads(emulate_thread, sums ? SUM_THREADS : UPDATE_THREADS);
    pthread_mutex_unlock(&one);
}
