// The threads of a block on a CPU: they take turns, and each runs until it waits for others. Their
// order is drawn; in half of the blocks, a warp runs until it has to wait for another one. The
// memory of the device is the host's.

#include <stdio.h>
#include <stdlib.h>
#include <ucontext.h>

enum { MOST_THREADS = 256, LANES = 32, STACK_BYTES = 64 << 10 };

static ucontext_t scheduler, threads[MOST_THREADS];
static unsigned thread_number, block_number, n_threads;
// How often any thread has reached or left a wait, or ended: if none does, all wait for each other.
static unsigned long n_events;
static unsigned char has_ended[MOST_THREADS];

static void fail(const char *what) {
    fprintf(stderr, "emulator: %s (block %u, thread %u)\n", what, block_number, thread_number);
    abort();
}

static unsigned draw(void) {
    static unsigned state = 1;
    state ^= state << 13, state ^= state >> 17, state ^= state << 5;
    return state;
}

// Where threads wait until `n` of them have come.
struct Meeting { unsigned n_come; unsigned long number; };

static void meet(struct Meeting *meeting, unsigned n) {
    unsigned long number = meeting->number;
    n_events++;
    if (++meeting->n_come == n) {
        meeting->n_come = 0;
        meeting->number++;
        return;
    }
    while (meeting->number == number) swapcontext(&threads[thread_number], &scheduler);
    n_events++;
}

// Every thread of the block gets here before one goes on.
static void block_wait(void) {
    static struct Meeting meeting;
    meet(&meeting, n_threads);
}

static void (*fiber_body)(void);

static void run_fiber(void) {
    fiber_body();
    has_ended[thread_number] = 1;
    n_events++;
}

static void shuffle(unsigned *numbers, unsigned n) {
    for (unsigned i = n; i > 1; i--) {
        unsigned other = draw() % i, number = numbers[i - 1];
        numbers[i - 1] = numbers[other], numbers[other] = number;
    }
}

// Gives each of `n` threads from `first` on a turn. Returns whether one of them has not ended.
static int take_turns(unsigned first, unsigned n) {
    unsigned order[MOST_THREADS], n_running = 0;
    for (unsigned i = first; i < first + n; i++)
        if (!has_ended[i]) order[n_running++] = i;
    shuffle(order, n_running);
    for (unsigned i = 0; i < n_running; i++) {
        thread_number = order[i];
        if (swapcontext(&scheduler, &threads[thread_number])) abort();
    }
    return n_running > 0;
}

// Runs `body` in `n` threads.
static void run_threads(void (*body)(void), unsigned n) {
    static char *stacks;
    if (!stacks && !(stacks = malloc((size_t)MOST_THREADS * STACK_BYTES))) abort();
    fiber_body = body, n_threads = n;
    for (unsigned i = 0; i < n; i++) {
        if (getcontext(&threads[i])) abort();
        threads[i].uc_stack.ss_sp = stacks + (size_t)i * STACK_BYTES;
        threads[i].uc_stack.ss_size = STACK_BYTES;
        threads[i].uc_link = &scheduler;
        makecontext(&threads[i], run_fiber, 0);
        has_ended[i] = 0;
    }
    // Threads take turns within a group; a group has a turn when those before it wait.
    unsigned group = draw() % 2 ? n : LANES, n_groups = n / group, groups[MOST_THREADS / LANES];
    for (unsigned i = 0; i < n_groups; i++) groups[i] = i * group;
    shuffle(groups, n_groups);
    for (int is_running = 1; is_running;) {
        unsigned long n_events_before = n_events;
        is_running = 0;
        for (unsigned i = 0; i < n_groups && n_events == n_events_before; i++)
            is_running |= take_turns(groups[i], group);
        if (is_running && n_events == n_events_before) fail("all threads wait for each other");
    }
}
