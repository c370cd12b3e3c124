// Runs the kernels of update.cu on the CPU: the threads of a block take turns, from one barrier to the
// next, and blocks run one after another. The driver's memory is the host's, so that what a kernel is
// given is what it would be given on a device.

#include <math.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <ucontext.h>

enum { MOST_THREADS = 256, STACK_BYTES = 64 << 10 };

static ucontext_t scheduler, threads[MOST_THREADS];
static unsigned thread_number, block_number, n_threads, n_blocks;

// Every thread gets here before one goes on.
static void block_wait(void) { swapcontext(&threads[thread_number], &scheduler); }

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
static unsigned n_ended;

static void emulate_thread(void) {
    for (unsigned block = 0; block < n_blocks; block++) {
        block_number = block;
        if (!strcmp(emulated, "sum_squares")) sum_squares(*(const struct Gradients *)argument);
        if (!strcmp(emulated, "clip_factors")) clip_factors(*(const struct Norms *)argument);
        if (!strcmp(emulated, "adam_w_units")) adam_w_units(*(const struct Update *)argument);
        block_wait();
    }
    n_ended++;
}

// Runs kernel `name` if it is one of update.cu.
static void emulate(const char *name, void **arguments, unsigned blocks) {
    static pthread_mutex_t one = PTHREAD_MUTEX_INITIALIZER;
    static char *stacks;
    int sums = !strcmp(name, "sum_squares") || !strcmp(name, "clip_factors");
    if (!sums && strcmp(name, "adam_w_units")) return;
    pthread_mutex_lock(&one);
    if (!stacks && !(stacks = malloc((size_t)MOST_THREADS * STACK_BYTES))) abort();
    emulated = name, argument = arguments[0], n_blocks = blocks, n_ended = 0;
    n_threads = sums ? SUM_THREADS : UPDATE_THREADS;
    for (unsigned i = 0; i < n_threads; i++) {
        if (getcontext(&threads[i])) abort();
        threads[i].uc_stack.ss_sp = stacks + (size_t)i * STACK_BYTES;
        threads[i].uc_stack.ss_size = STACK_BYTES;
        threads[i].uc_link = &scheduler;
        makecontext(&threads[i], emulate_thread, 0);
    }
    while (n_ended < n_threads)
        for (thread_number = 0; thread_number < n_threads; thread_number++) {
            if (swapcontext(&scheduler, &threads[thread_number])) abort();
        }
    pthread_mutex_unlock(&one);
}
