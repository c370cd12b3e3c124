// Runs the kernels of update.cu on the CPU: a thread for each thread of a block, one block after
// another. The driver's memory is the host's, so that what a kernel is given is what it would be
// given on a device.

#include <math.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

static __thread unsigned thread_number, block_number;
static pthread_barrier_t block_barrier;

static void block_wait(void) { pthread_barrier_wait(&block_barrier); }

static unsigned n_emulated;
static int votes[1024];
static int all_vote(int vote) {
    votes[thread_number] = vote;
    block_wait();
    int all = 1;
    for (unsigned i = 0; i < n_emulated; i++) all &= votes[i] != 0;
    block_wait();
    return all;
}

#define KERNEL(name, type, job) static void name(type job)
#define DEVICE static
#define SHARED static
#define BLOCK block_number
#define THREAD thread_number
#define BARRIER block_wait
#define ALL(condition) all_vote(condition)
#include "update.cu"

// `update.rs` asserts the same of its structures.
_Static_assert(sizeof(struct Gradients) == 344, "struct Gradients");
_Static_assert(sizeof(struct Norms) == 64, "struct Norms");
_Static_assert(sizeof(struct Segment) == 28, "struct Segment");
_Static_assert(sizeof(struct Unit) == 96, "struct Unit");
_Static_assert(sizeof(struct Update) == 3888, "struct Update");

// What is emulated now, and its argument.
static const char *emulated;
static const void *argument;
static unsigned n_blocks;

static void *emulate_thread(void *number) {
    thread_number = (unsigned)(size_t)number;
    for (block_number = 0; block_number < n_blocks; block_number++) {
        if (!strcmp(emulated, "sum_squares")) sum_squares(*(const struct Gradients *)argument);
        if (!strcmp(emulated, "clip_factors")) clip_factors(*(const struct Norms *)argument);
        if (!strcmp(emulated, "adam_w_units")) adam_w_units(*(const struct Update *)argument);
        block_wait();
    }
    return NULL;
}

// Runs kernel `name` if it is one of update.cu.
static void emulate(const char *name, void **arguments, unsigned blocks) {
    static pthread_mutex_t one = PTHREAD_MUTEX_INITIALIZER;
    int sums = !strcmp(name, "sum_squares") || !strcmp(name, "clip_factors");
    if (!sums && strcmp(name, "adam_w_units")) return;
    pthread_mutex_lock(&one);
    emulated = name, argument = arguments[0], n_blocks = blocks;
    n_emulated = sums ? SUM_THREADS : UPDATE_THREADS;
    pthread_barrier_init(&block_barrier, NULL, n_emulated);
    pthread_t threads[UPDATE_THREADS];
    for (unsigned i = 0; i < n_emulated; i++)
        if (pthread_create(&threads[i], NULL, emulate_thread, (void *)(size_t)i)) abort();
    for (unsigned i = 0; i < n_emulated; i++) pthread_join(threads[i], NULL);
    pthread_barrier_destroy(&block_barrier);
    pthread_mutex_unlock(&one);
}
