// Attention of packed sequences in bf16, forward and backward, for heads of HEAD channels: 64 or
// 128. Sequences of any lengths lie one after another in the rows of one matrix, and one launch
// takes all of them. `attention.rs` fills the structures and has the formulas; `instructions.cu`
// has what is particular to NVIDIA's GPUs. The tests run this file on the CPU, so that it is
// restricted to the common subset of C and CUDA C++.
//
// A block has one head of ROWS tokens of one sequence, a warp 16 of them. The other side of the
// products, such as the keys and values of a block of queries, is copied to shared memory TILE
// tokens at a time, while the tokens before are multiplied. The order of all sums depends on sizes
// only, and nothing is added atomically: results are bit-identical between runs.

#define THREADS 128
#define ROWS 64
#define TILE (4096 / HEAD)
#define MOST_RUNS 256

// Bytes of the channels of a token, in chunks of 16 bytes.
#define LINE (2 * HEAD)
#define CHUNKS (HEAD / 8)
// Products take 16 channels at a time, and 8 columns.
#define STEPS (HEAD / 16)
#define COLUMNS (HEAD / 8)
// Bytes of the tokens that are copied at a time: of one of two matrices, and of both with totals.
#define TILE_BYTES (TILE * LINE)
#define STAGE_BYTES (2 * TILE_BYTES + 8 * TILE)

#define LANE (THREAD % 32)
#define WARP (THREAD / 32)
// First of the two columns that a lane has of 8.
#define PAIR (2 * (LANE % 4))

// Below any score.
#define LOWEST -3.0e38f

typedef unsigned long long u64;
typedef long long s64;

// The bits of a bf16.
typedef unsigned short bf16;

struct ALIGNED(16) Chunk { unsigned words[4]; };

// Of a query: the logarithm of the sum of exponentials of its scores, and δ = Σ g ∘ y.
struct ALIGNED(8) Totals { float log, delta; };

// Sequences of one length, one after another.
struct Run {
    // Number of the first tile of ROWS tokens of the first sequence.
    unsigned first_tile;
    unsigned first_token, length;
};

struct Attention {
    // Queries, keys and values of all heads, [tokens, 3 · heads · HEAD].
    const bf16 *qkv;
    // [tokens, heads · HEAD]: the output and, backwards, its gradient.
    bf16 *y;
    const bf16 *grad;
    // [tokens, 3 · heads · HEAD]: the gradient of `qkv`.
    bf16 *qkv_grad;
    // [heads, tokens], to the base of 2.
    float *logs;
    // [heads, tokens], of which the gradient of queries is computed first.
    struct Totals *totals;
    // Elements from one row to the next.
    unsigned qkv_stride, y_stride, grad_stride, qkv_grad_stride;
    unsigned n_tokens, n_heads, n_runs;
    // Of scores; times log2(e), because exponentials are powers of two.
    float scale, log_scale;
    struct Run runs[MOST_RUNS];
};

// What a warp computes: up to 16 of the last `n_left` rows of a sequence of `n` rows, which ends
// before row `end`, of one head. If none is left, the warp only copies.
struct Place {
    unsigned end, head;
    int n, n_left;
};

INLINE struct Place find_place(const struct Attention *job) {
    unsigned tile = BLOCK / job->n_heads, low = 0, high = job->n_runs;
    while (high - low > 1) {
        unsigned middle = (low + high) / 2;
        if (job->runs[middle].first_tile <= tile) low = middle;
        else high = middle;
    }
    unsigned length = job->runs[low].length, n_tiles = (length + ROWS - 1) / ROWS;
    unsigned number = tile - job->runs[low].first_tile;
    struct Place place;
    place.end = job->runs[low].first_token + (number / n_tiles + 1) * length;
    place.head = BLOCK % job->n_heads;
    place.n = length;
    place.n_left = place.n - (int)(number % n_tiles * ROWS + 16 * WARP);
    return place;
}

// Start of row `row` of a head.
INLINE const bf16 *at_row(const bf16 *matrix, unsigned stride, unsigned row, unsigned head) {
    return matrix + (u64)row * stride + head * HEAD;
}

// Offset of a chunk of a line. Chunks change places so that the same one of eight successive lines
// lies in different banks.
INLINE unsigned offset(int line, int chunk) {
    return line * LINE + chunk / 8 * 128 + (chunk % 8 ^ line % 8) * 16;
}

// Begins to copy TILE rows of a head to lines in shared memory. There are `n`; the others become
// zero.
INLINE void copy_rows(unsigned to, const bf16 *from, unsigned stride, int n) {
    // Read anew, because what is derived from it would occupy registers throughout the loops.
    const unsigned thread = read_thread();
    const bf16 *chunk = from + (u64)(thread / CHUNKS) * stride + thread % CHUNKS * 8;
    UNROLL
    for (int i = 0; i < TILE; i += THREADS / CHUNKS) {
        int line = thread / CHUNKS + i;
        copy_chunk(to + offset(line, thread % CHUNKS), chunk + (u64)i * stride, line < n);
    }
}

// Begins to copy up to TILE keys and values from row `row` on, of which there are `n`.
INLINE void copy_keys(unsigned stage, const struct Attention *job, unsigned row, unsigned head, int n) {
    const bf16 *keys = at_row(job->qkv, job->qkv_stride, row, head) + job->n_heads * HEAD;
    copy_rows(stage, keys, job->qkv_stride, n);
    copy_rows(stage + TILE_BYTES, keys + job->n_heads * HEAD, job->qkv_stride, n);
}

// Begins to copy queries, gradients of the output and totals, like `copy_keys`.
INLINE void copy_queries(unsigned stage, const struct Attention *job, unsigned row, unsigned head, int n) {
    copy_rows(stage, at_row(job->qkv, job->qkv_stride, row, head), job->qkv_stride, n);
    copy_rows(stage + TILE_BYTES, at_row(job->grad, job->grad_stride, row, head), job->grad_stride, n);
    const struct Totals *totals = job->totals + (u64)head * job->n_tokens + row;
    const int i = read_thread();
    if (i < TILE) copy_pair(stage + 2 * TILE_BYTES + 8 * i, totals + i, i < n);
}

// Reads 16 rows, of which there are `n`, as the left factor of products. The others are copies of
// the last one, whose results are not written.
INLINE void read_rows(unsigned rows[STEPS][4], const bf16 *from, unsigned stride, int n) {
    UNROLL
    for (int i = 0; i < 4 * STEPS; i++) {
        int row = LANE / 4 + i % 2 * 8;
        if (row >= n) row = n - 1;
        const bf16 *at = from + (s64)row * stride + i / 4 * 16 + i % 4 / 2 * 8 + PAIR;
        rows[i / 4][i % 4] = *(const unsigned *)at;
    }
}

INLINE void clear(float sums[][4], int n) {
    UNROLL
    for (int i = 0; i < 4 * n; i++) sums[i / 4][i % 4] = 0.0f;
}

// sums += rows · Tᵀ, [16, 16], for 16 lines of T at `lines`.
INLINE void multiply_lines(float sums[2][4], unsigned rows[STEPS][4], unsigned lines) {
    UNROLL
    for (int step = 0; step < STEPS; step++) {
        unsigned t[4];
        load_matrices(t, lines + offset(LANE % 16, 2 * step + LANE / 16));
        multiply(sums[0], rows[step], t[0], t[2]);
        multiply(sums[1], rows[step], t[1], t[3]);
    }
}

// sums += weights · T, [16, HEAD], for 16 columns of weights and 16 lines of T at `lines`.
INLINE void add_lines(float sums[COLUMNS][4], float weights[2][4], unsigned lines) {
    unsigned rounded[4];
    UNROLL
    for (int i = 0; i < 4; i++) rounded[i] = pack(weights[i / 2][i % 2 * 2], weights[i / 2][i % 2 * 2 + 1]);
    UNROLL
    for (int i = 0; i < COLUMNS; i += 2) {
        unsigned t[4];
        load_transposed(t, lines + offset(LANE % 16, i + LANE / 16));
        multiply(sums[i], rounded, t[0], t[1]);
        multiply(sums[i + 1], rounded, t[2], t[3]);
    }
}

// Writes the 16 rows of a warp, of which there are `n`, times `upper` and `lower` for the rows from
// 0 and from 8 on. They pass through the warp's part of `memory`, so that whole lines are written.
INLINE void write_rows(struct Chunk *memory, float rows[COLUMNS][4], float upper, float lower, bf16 *to,
                       unsigned stride, int n) {
    unsigned char *lines = (unsigned char *)memory + WARP * 16 * LINE;
    UNROLL
    for (int i = 0; i < 2 * COLUMNS; i++) {
        float factor = i % 2 ? lower : upper, *pair = &rows[i / 2][i % 2 * 2];
        unsigned at = offset(LANE / 4 + i % 2 * 8, i / 2) + 2 * PAIR;
        *(unsigned *)(lines + at) = pack(pair[0] * factor, pair[1] * factor);
    }
    wait_for_warp();
    UNROLL
    for (int i = 0; i < 16; i += 32 / CHUNKS) {
        int line = LANE / CHUNKS + i, chunk = LANE % CHUNKS;
        if (line < n) {
            struct Chunk *at = (struct Chunk *)(to + (u64)line * stride + 8 * chunk);
            *at = *(struct Chunk *)(lines + offset(line, chunk));
        }
    }
    wait_for_warp();
}

// y = softmax(Q · Kᵀ · scale) · V, and the logarithms of the sums, with a running maximum: what was
// added before is scaled when a larger score appears.
KERNEL(attention_forward, struct Attention, job) {
    SHARED struct Chunk memory[4 * TILE_BYTES / 16];
    const struct Place place = find_place(&job);
    const bf16 *queries = at_row(job.qkv, job.qkv_stride, place.end - place.n_left, place.head);
    unsigned stage = shared_address(memory, sizeof memory), next = stage + 2 * TILE_BYTES;
    copy_keys(stage, &job, place.end - place.n, place.head, place.n);
    unsigned q[STEPS][4];
    read_rows(q, queries, job.qkv_stride, place.n_left);
    float sums[COLUMNS][4], top[2] = {LOWEST, LOWEST}, total[2] = {0.0f, 0.0f};
    clear(sums, COLUMNS);
    for (int n = place.n; n > 0; n -= TILE) {
        // After the barrier, the copies of all threads have arrived, and no warp reads what the
        // next copies overwrite.
        wait_for_copies();
        BARRIER();
        if (n > TILE) copy_keys(next, &job, place.end - n + TILE, place.head, n - TILE);
        if (place.n_left > 0) {
            float scores[TILE / 8][4], most[2] = {top[0], top[1]};
            clear(scores, TILE / 8);
            UNROLL
            for (int i = 0; i < TILE; i += 16)
                if (i < n) multiply_lines(&scores[i / 8], q, stage + i * LINE);
            UNROLL
            for (int i = 0; i < TILE / 2; i++) {
                if (i / 4 * 8 + PAIR + i % 2 >= n) scores[i / 4][i % 4] = LOWEST;
                most[i % 4 / 2] = larger(most[i % 4 / 2], scores[i / 4][i % 4]);
            }
            UNROLL
            for (int i = 0; i < 2; i++) {
                most[i] = largest_of_four(most[i]);
                float factor = power((top[i] - most[i]) * job.log_scale);
                top[i] = most[i];
                total[i] *= factor;
                UNROLL
                for (int j = 0; j < 2 * COLUMNS; j++) sums[j / 2][2 * i + j % 2] *= factor;
            }
            UNROLL
            for (int i = 0; i < TILE / 2; i++) {
                float *score = &scores[i / 4][i % 4];
                *score = power(fused(*score, job.log_scale, -top[i % 4 / 2] * job.log_scale));
                total[i % 4 / 2] += *score;
            }
            UNROLL
            for (int i = 0; i < TILE; i += 16)
                if (i < n) add_lines(sums, &scores[i / 8], stage + TILE_BYTES + i * LINE);
        }
        unsigned read = stage;
        stage = next;
        next = read;
    }
    BARRIER();
    if (place.n_left <= 0) return;
    UNROLL
    for (int i = 0; i < 2; i++) {
        total[i] = sum_of_four(total[i]);
        unsigned row = LANE / 4 + 8 * i;
        if (LANE % 4 == 0 && (int)row < place.n_left)
            job.logs[(u64)place.head * job.n_tokens + place.end - place.n_left + row] =
                fused(top[i], job.log_scale, logarithm(total[i]));
    }
    bf16 *y = (bf16 *)at_row(job.y, job.y_stride, place.end - place.n_left, place.head);
    write_rows(memory, sums, 1.0f / total[0], 1.0f / total[1], y, job.y_stride, place.n_left);
}

// gS = P ∘ (gP - δ)   gQ = gS · K · scale, for a block of queries; also the totals of its queries.
KERNEL(attention_query_gradient, struct Attention, job) {
    SHARED struct Chunk memory[4 * TILE_BYTES / 16];
    const struct Place place = find_place(&job);
    unsigned stage = shared_address(memory, sizeof memory), next = stage + 2 * TILE_BYTES;
    copy_keys(stage, &job, place.end - place.n, place.head, place.n);
    const unsigned first = place.end - place.n_left;
    unsigned q[STEPS][4], g[STEPS][4], y[STEPS][4];
    read_rows(q, at_row(job.qkv, job.qkv_stride, first, place.head), job.qkv_stride, place.n_left);
    read_rows(g, at_row(job.grad, job.grad_stride, first, place.head), job.grad_stride, place.n_left);
    read_rows(y, at_row(job.y, job.y_stride, first, place.head), job.y_stride, place.n_left);
    float log[2], delta[2] = {0.0f, 0.0f};
    UNROLL
    for (int i = 0; i < 4 * STEPS; i++) {
        unsigned a = g[i / 4][i % 4], b = y[i / 4][i % 4];
        delta[i % 2] = fused(low(a), low(b), delta[i % 2]);
        delta[i % 2] = fused(high(a), high(b), delta[i % 2]);
    }
    UNROLL
    for (int i = 0; i < 2; i++) {
        delta[i] = sum_of_four(delta[i]);
        int row = LANE / 4 + 8 * i, is_row = row < place.n_left;
        u64 number = (u64)place.head * job.n_tokens + first + (is_row ? row : place.n_left - 1);
        log[i] = job.logs[number];
        if (LANE % 4 == 0 && is_row) {
            job.totals[number].log = log[i];
            job.totals[number].delta = delta[i];
        }
    }
    float sums[COLUMNS][4];
    clear(sums, COLUMNS);
    for (int n = place.n; n > 0; n -= TILE) {
        wait_for_copies();
        BARRIER();
        if (n > TILE) copy_keys(next, &job, place.end - n + TILE, place.head, n - TILE);
        ROLLED
        for (int i = 0; place.n_left > 0 && i < TILE && i < n; i += 16) {
            float scores[2][4], changes[2][4];
            clear(scores, 2);
            clear(changes, 2);
            multiply_lines(scores, q, stage + i * LINE);
            multiply_lines(changes, g, stage + TILE_BYTES + i * LINE);
            UNROLL
            for (int j = 0; j < 8; j++) {
                float *change = &changes[j / 4][j % 4];
                float weight = power(fused(scores[j / 4][j % 4], job.log_scale, -log[j % 4 / 2]));
                // The score of a line of zeros, which is no key, may be far above those of the row.
                *change = i + j / 4 * 8 + PAIR + j % 2 < n ? weight * (*change - delta[j % 4 / 2]) : 0.0f;
            }
            add_lines(sums, changes, stage + i * LINE);
        }
        unsigned read = stage;
        stage = next;
        next = read;
    }
    BARRIER();
    if (place.n_left <= 0) return;
    bf16 *to = (bf16 *)at_row(job.qkv_grad, job.qkv_grad_stride, first, place.head);
    write_rows(memory, sums, job.scale, job.scale, to, job.qkv_grad_stride, place.n_left);
}

// gV = Pᵀ · g   gK = gSᵀ · Q · scale, for a block of keys, from transposed scores, whose columns
// are queries. Lines of zeros after the last query, whose totals are zero as well, add zeros.
KERNEL(attention_key_gradient, struct Attention, job) {
    SHARED struct Chunk memory[2 * STAGE_BYTES / 16];
    const struct Place place = find_place(&job);
    const unsigned width = job.n_heads * HEAD;
    const bf16 *keys = at_row(job.qkv, job.qkv_stride, place.end - place.n_left, place.head) + width;
    unsigned stage = shared_address(memory, sizeof memory), next = stage + STAGE_BYTES;
    copy_queries(stage, &job, place.end - place.n, place.head, place.n);
    unsigned k[STEPS][4], v[STEPS][4];
    read_rows(k, keys, job.qkv_stride, place.n_left);
    read_rows(v, keys + width, job.qkv_stride, place.n_left);
    float key_sums[COLUMNS][4], value_sums[COLUMNS][4];
    clear(key_sums, COLUMNS);
    clear(value_sums, COLUMNS);
    for (int n = place.n; n > 0; n -= TILE) {
        wait_for_copies();
        BARRIER();
        if (n > TILE) copy_queries(next, &job, place.end - n + TILE, place.head, n - TILE);
        ROLLED
        for (int i = 0; place.n_left > 0 && i < TILE && i < n; i += 16) {
            float weights[2][4], changes[2][4];
            clear(weights, 2);
            clear(changes, 2);
            multiply_lines(weights, k, stage + i * LINE);
            multiply_lines(changes, v, stage + TILE_BYTES + i * LINE);
            UNROLL
            for (int j = 0; j < 2; j++) {
                struct Totals totals[2];
                load_floats(&totals[0].log, stage + 2 * TILE_BYTES + 8 * (i + 8 * j + PAIR));
                UNROLL
                for (int c = 0; c < 4; c++) {
                    float weight = power(fused(weights[j][c], job.log_scale, -totals[c % 2].log));
                    weights[j][c] = weight;
                    changes[j][c] = weight * (changes[j][c] - totals[c % 2].delta);
                }
            }
            add_lines(value_sums, weights, stage + TILE_BYTES + i * LINE);
            add_lines(key_sums, changes, stage + i * LINE);
        }
        unsigned read = stage;
        stage = next;
        next = read;
    }
    BARRIER();
    if (place.n_left <= 0) return;
    const unsigned first = place.end - place.n_left;
    bf16 *to = (bf16 *)at_row(job.qkv_grad, job.qkv_grad_stride, first, place.head) + width;
    write_rows(memory, key_sums, job.scale, job.scale, to, job.qkv_grad_stride, place.n_left);
    write_rows(memory, value_sums, 1.0f, 1.0f, to + width, job.qkv_grad_stride, place.n_left);
}
