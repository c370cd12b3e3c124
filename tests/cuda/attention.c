// Runs the kernels of attention.cu on the CPU, for heads of HEAD channels, and compares them with
// sums in f64. Sequences of several lengths are in each launch. Results begin as NaN, and the words
// between rows, before and after results must not change. `tests/it/cuda_attention.rs` runs this.

#define KERNEL(name, type, job) static void name(type job)
#define SHARED static
#define BLOCK block_number
#define THREAD thread_number
#define BARRIER block_wait
#include "warp.h"
#include "attention.cu"

// `attention.rs` asserts the same of its structures.
_Static_assert(sizeof(struct Run) == 12, "struct Run");
_Static_assert(sizeof(struct Attention) == 3160, "struct Attention");

// Rows before and after results.
enum { GUARD = 3, POISON = 0x7fff };

// `shift` is added to queries and subtracted from keys: scores are far below zero.
struct Case { unsigned n_heads, padding, n_runs; struct { unsigned n, length; } runs[4]; double shift; };

// A case, and its memory.
struct Problem {
    struct Case its;
    struct Attention job;
    unsigned n_blocks, width;
    bf16 *qkv, *grad, *y, *qkv_grad;
    float *logs;
    struct Totals *totals;
};

static double normal(void) {
    double sum = 0.0;
    for (int i = 0; i < 12; i++) sum += draw() / 4294967296.0;
    return sum - 6.0;
}

// A matrix of `n_rows` between guards: random numbers times `scale`, or NaN; NaN between rows.
static bf16 *matrix(unsigned n_rows, unsigned width, unsigned stride, double scale) {
    size_t n = (size_t)(n_rows + 2 * GUARD) * stride;
    bf16 *all = aligned_alloc(16, (2 * n + 15) / 16 * 16), *rows = all + (size_t)GUARD * stride;
    for (size_t i = 0; i < n; i++) all[i] = POISON;
    for (unsigned row = 0; scale != 0.0 && row < n_rows; row++)
        for (unsigned c = 0; c < width; c++) rows[(size_t)row * stride + c] = narrow(scale * normal());
    return rows;
}

static void check_guards(const char *name, const bf16 *rows, unsigned n_rows, unsigned width,
                         unsigned stride) {
    const bf16 *all = rows - (size_t)GUARD * stride;
    for (unsigned row = 0; row < n_rows + 2 * GUARD; row++)
        for (unsigned c = row < GUARD || row >= n_rows + GUARD ? 0 : width; c < stride; c++)
            if (all[(size_t)row * stride + c] != POISON) {
                fprintf(stderr, "%s: written beside row %d\n", name, (int)row - GUARD);
                exit(1);
            }
}

static struct Problem problem;
static void forward(void) { attention_forward(problem.job); }
static void query_gradient(void) { attention_query_gradient(problem.job); }
static void key_gradient(void) { attention_key_gradient(problem.job); }

static void launch(void (*kernel)(void)) {
    for (unsigned block = 0; block < problem.n_blocks; block++) {
        block_number = block;
        n_blocks_run++;
        run_threads(kernel, THREADS);
        for (unsigned i = 0; i < THREADS; i++)
            if (n_copies[i]) fail("a thread ends before its copies have arrived");
    }
}

static void make(struct Case its) {
    struct Attention job = {0};
    unsigned n_tiles = 0, n_tokens = 0;
    for (unsigned i = 0; i < its.n_runs; i++) {
        job.runs[i] = (struct Run) {n_tiles, n_tokens, its.runs[i].length};
        n_tiles += its.runs[i].n * ((its.runs[i].length + ROWS - 1) / ROWS);
        n_tokens += its.runs[i].n * its.runs[i].length;
    }
    unsigned width = its.n_heads * HEAD;
    job.n_tokens = n_tokens, job.n_heads = its.n_heads, job.n_runs = its.n_runs;
    job.scale = 1.0f / sqrtf(HEAD), job.log_scale = job.scale * 1.44269504f;
    job.qkv_stride = 3 * width + its.padding, job.y_stride = width + its.padding;
    job.grad_stride = width + 2 * its.padding, job.qkv_grad_stride = 3 * width + 3 * its.padding;
    job.qkv = problem.qkv = matrix(n_tokens, 3 * width, job.qkv_stride, 1.3);
    for (unsigned row = 0; row < n_tokens; row++)
        for (unsigned c = 0; c < 2 * width; c++) {
            bf16 *value = problem.qkv + (size_t)row * job.qkv_stride + c;
            *value = narrow(wide(*value) + (c < width ? its.shift : -its.shift));
        }
    job.grad = problem.grad = matrix(n_tokens, width, job.grad_stride, 0.1);
    job.y = problem.y = matrix(n_tokens, width, job.y_stride, 0.0);
    job.qkv_grad = problem.qkv_grad = matrix(n_tokens, 3 * width, job.qkv_grad_stride, 0.0);
    size_t n = (size_t)n_tokens * its.n_heads;
    problem.logs = malloc(4 * (n + 2));
    problem.totals = malloc(8 * (n + 2));
    memset(problem.logs, 0xff, 4 * (n + 2));
    memset(problem.totals, 0xff, 8 * (n + 2));
    job.logs = problem.logs + 1, job.totals = problem.totals + 1;
    problem.its = its, problem.job = job, problem.n_blocks = n_tiles * its.n_heads, problem.width = width;
}

static void release(void) {
    const struct Attention *job = &problem.job;
    free(problem.qkv - (size_t)GUARD * job->qkv_stride);
    free(problem.grad - (size_t)GUARD * job->grad_stride);
    free(problem.y - (size_t)GUARD * job->y_stride);
    free(problem.qkv_grad - (size_t)GUARD * job->qkv_grad_stride);
    free(problem.logs);
    free(problem.totals);
}

// Errors of one head of one sequence: the root of their mean square, and the largest.
struct Errors { double squares, norm, worst; unsigned n; };

static void add_error(struct Errors *errors, double value, double expected) {
    double error = isfinite(value) ? fabs(value - expected) : INFINITY;
    errors->squares += error * error;
    errors->norm += expected * expected;
    errors->worst = fmax(errors->worst, error);
    errors->n++;
}

// Largest errors so far: of y, of its logarithms, and of gQ, gK, gV, as shares of what is allowed.
static double worst[5];

// `floor` is a size below which results are rounding errors of sums that cancel.
static void judge(unsigned what, struct Errors errors, double floor, double mean_share, double worst_share) {
    static const char *names[] = {"y", "logarithms", "gQ", "gK", "gV"};
    double size = sqrt(errors.norm / errors.n) + floor;
    double mean = sqrt(errors.squares / errors.n);
    double share = fmax(mean / (mean_share * size), errors.worst / (worst_share * size));
    worst[what] = fmax(worst[what], share);
    if (share <= 1.0) return;
    fprintf(stderr, "%s: error %.1e, largest %.1e, of %.1e\n", names[what], mean, errors.worst, size);
    exit(1);
}

// One head of the sequence of `n` tokens from `start` on.
static void compare(unsigned start, unsigned n, unsigned head) {
    const struct Attention *job = &problem.job;
    unsigned width = problem.width;
    double *parts[4], *grads[3], *weights = malloc(8 * n), *changes = malloc(8 * n);
    for (unsigned part = 0; part < 4; part++) {
        parts[part] = malloc(8 * n * HEAD);
        for (unsigned i = 0; i < n * HEAD; i++) {
            size_t row = start + i / HEAD, column = head * HEAD + i % HEAD;
            parts[part][i] = wide(part < 3 ? problem.qkv[row * job->qkv_stride + part * width + column]
                                           : problem.grad[row * job->grad_stride + column]);
        }
        if (part < 3) grads[part] = calloc(n * HEAD, 8);
    }
    double *q = parts[0], *k = parts[1], *v = parts[2], *g = parts[3], floor = 0.0;
    struct Errors outputs = {0}, logarithms = {0};
    for (unsigned i = 0; i < n; i++) {
        double top = -1e300, total = 0.0, delta = 0.0, y[HEAD] = {0};
        for (unsigned j = 0; j < n; j++) {
            weights[j] = changes[j] = 0.0;
            for (unsigned c = 0; c < HEAD; c++) {
                weights[j] += q[i * HEAD + c] * k[j * HEAD + c] / sqrt(HEAD);
                changes[j] += g[i * HEAD + c] * v[j * HEAD + c];
            }
            top = fmax(top, weights[j]);
        }
        for (unsigned j = 0; j < n; j++) total += weights[j] = exp(weights[j] - top);
        for (unsigned j = 0; j < n; j++) {
            weights[j] /= total;
            delta += weights[j] * changes[j];
            floor += weights[j] * weights[j] * changes[j] * changes[j];
            for (unsigned c = 0; c < HEAD; c++) {
                y[c] += weights[j] * v[j * HEAD + c];
                grads[2][j * HEAD + c] += weights[j] * g[i * HEAD + c];
            }
        }
        for (unsigned j = 0; j < n; j++)
            for (unsigned c = 0; c < HEAD; c++) {
                double change = weights[j] * (changes[j] - delta) / sqrt(HEAD);
                grads[0][i * HEAD + c] += change * k[j * HEAD + c];
                grads[1][j * HEAD + c] += change * q[i * HEAD + c];
            }
        for (unsigned c = 0; c < HEAD; c++)
            add_error(&outputs, wide(problem.y[(size_t)(start + i) * job->y_stride + head * HEAD + c]), y[c]);
        size_t number = (size_t)head * job->n_tokens + start + i;
        add_error(&logarithms, job->logs[number], (top + log(total)) / log(2.0));
    }
    judge(0, outputs, 0.0, 4e-3, 3e-2);
    judge(1, logarithms, 1.0, 1e-5, 1e-4);
    // Of gQ and gK: with one token, they are zero. With a shift, their terms are larger, and cancel.
    floor = 0.2 * sqrt(floor / n / HEAD);
    double allowed = 8e-3 * (1.0 + problem.its.shift / 2.0);
    for (unsigned part = 0; part < 3; part++) {
        struct Errors errors = {0};
        for (unsigned i = 0; i < n * HEAD; i++) {
            size_t row = start + i / HEAD, column = part * width + head * HEAD + i % HEAD;
            add_error(&errors, wide(problem.qkv_grad[row * job->qkv_grad_stride + column]), grads[part][i]);
        }
        judge(2 + part, errors, part < 2 ? floor : 0.0, allowed, 8.0 * allowed);
        free(grads[part]);
    }
    for (unsigned part = 0; part < 4; part++) free(parts[part]);
    free(weights);
    free(changes);
}

static void check(struct Case its) {
    make(its);
    const struct Attention *job = &problem.job;
    unsigned width = problem.width, n_tokens = job->n_tokens;
    size_t n_numbers = (size_t)n_tokens * its.n_heads;
    launch(forward);
    launch(query_gradient);
    launch(key_gradient);
    check_guards("y", problem.y, n_tokens, width, job->y_stride);
    check_guards("gradient", problem.qkv_grad, n_tokens, 3 * width, job->qkv_grad_stride);
    static const unsigned char nan[8] = {0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff};
    if (memcmp(problem.logs, nan, 4) || memcmp(problem.logs + n_numbers + 1, nan, 4) ||
        memcmp(problem.totals, nan, 8) || memcmp(problem.totals + n_numbers + 1, nan, 8)) {
        fprintf(stderr, "written beside the logarithms\n");
        exit(1);
    }
    unsigned start = 0;
    for (unsigned i = 0; i < its.n_runs; i++)
        for (unsigned j = 0; j < its.runs[i].n; j++, start += its.runs[i].length)
            for (unsigned head = 0; head < its.n_heads; head++) compare(start, its.runs[i].length, head);
    // Threads take turns in another order now, which must not change any bit.
    size_t n_y = 2 * (size_t)n_tokens * job->y_stride, n_grad = 2 * (size_t)n_tokens * job->qkv_grad_stride;
    if (n_tokens < 200) {
        bf16 *y = malloc(n_y), *grad = malloc(n_grad);
        memcpy(y, problem.y, n_y);
        memcpy(grad, problem.qkv_grad, n_grad);
        launch(forward);
        launch(query_gradient);
        launch(key_gradient);
        if (memcmp(y, problem.y, n_y) || memcmp(grad, problem.qkv_grad, n_grad)) {
            fprintf(stderr, "two runs differ\n");
            exit(1);
        }
        free(y);
        free(grad);
    }
    release();
}

int main(void) {
    check((struct Case) {1, 0, 1, {{1, 1}}});
    check((struct Case) {1, 0, 1, {{1, 64}}});
    check((struct Case) {2, 8, 3, {{2, 5}, {1, 16}, {2, 1}}});
    check((struct Case) {3, 8, 2, {{2, 37}, {1, 41}}});
    check((struct Case) {2, 0, 4, {{1, 64}, {3, 5}, {1, 41}, {1, 65}}});
    check((struct Case) {1, 16, 3, {{1, 197}, {2, 37}, {1, 16}}});
    check((struct Case) {1, 0, 2, {{1, 257}, {1, 50}}});
    check((struct Case) {1, 8, 1, {{1, 300}}});
    check((struct Case) {1, 0, 2, {{1, 37}, {1, 70}}, 4.0});
    static const char *names[] = {"y", "logarithms", "gQ", "gK", "gV"};
    printf("heads of %d: right", HEAD);
    for (unsigned i = 0; i < 5; i++) printf(", %s %.0f %%", names[i], 100 * worst[i]);
    printf(" of the errors allowed\n");
}
