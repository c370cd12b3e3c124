// The optimizer update on one device: sums of squares of gradients, clip factors, AdamW. Each is
// one launch for up to MOST_UNITS units, whose addresses are in the kernel's argument. `update.rs`
// fills the structures. The tests' driver runs this file on the CPU, so that it is restricted to
// the common subset of C and CUDA C++.
//
// Threads add in a fixed order, without atomic operations: results are bit-identical between runs.

#define SUM_THREADS 128
#define UPDATE_THREADS 256
#define ELEMENTS 2048
#define MOST_UNITS 36

// Marks a norm or a loss that is not finite; factors are never negative.
#define NOT_FINITE -1.0f

typedef unsigned long long u64;

// Gradients whose squares are summed.
struct Gradients {
    const float *grads[MOST_UNITS];
    // For each block: number of the tensor, first element, one past the last.
    const unsigned *blocks;
    float *sums;
    // Number of the launch's first block.
    unsigned first;
};

// sums[b] = Σ g², summed over the elements of each thread, then over threads.
KERNEL(sum_squares, struct Gradients, job) {
    SHARED float partial[SUM_THREADS];
    unsigned block = job.first + BLOCK;
    const float *grad = job.grads[job.blocks[3 * block]];
    unsigned end = job.blocks[3 * block + 2];
    float total = 0.0f;
    for (unsigned i = job.blocks[3 * block + 1] + THREAD; i < end; i += SUM_THREADS) total += grad[i] * grad[i];
    partial[THREAD] = total;
    BARRIER();
    if (THREAD == 0) {
        float sum = 0.0f;
        for (unsigned i = 0; i < SUM_THREADS; i++) sum += partial[i];
        job.sums[block] = sum;
    }
}

// A multiple of 2⁻⁶⁴ in 128 bits, like `ranks::fixed::FixedPoint`, for numbers that are not
// negative.
struct Fixed { u64 high, low; unsigned n_out_of_range; };

DEVICE struct Fixed fixed_add(struct Fixed a, struct Fixed b) {
    struct Fixed sum;
    sum.low = a.low + b.low;
    sum.high = a.high + b.high + (sum.low < a.low);
    sum.n_out_of_range = a.n_out_of_range + b.n_out_of_range;
    if (sum.high >> 63) {
        sum.n_out_of_range++;
        sum.high = sum.low = 0;
    }
    return sum;
}

// 4611686018427387904 is 2⁶²; NaN is out of range as well.
DEVICE int is_in_range(double value) { return value > -4611686018427387904.0 && value < 4611686018427387904.0; }

DEVICE struct Fixed to_fixed(double value) {
    struct Fixed fixed = {0, 0, 0};
    if (!is_in_range(value)) {
        fixed.n_out_of_range = 1;
        return fixed;
    }
    fixed.high = (u64)value;
    // The remainder of a number of 24 bits is exact, and so is its product with 2⁶⁴.
    fixed.low = (u64)((value - (double)fixed.high) * 18446744073709551616.0);
    return fixed;
}

// Rounds to nearest, a single time.
DEVICE double to_double(struct Fixed fixed) {
    double scale = 1.0;
    u64 top = fixed.high, rest = fixed.low;
    if (top == 0) return (double)rest / 18446744073709551616.0;
    while (!(top >> 63)) {
        top = top << 1 | rest >> 63;
        rest <<= 1;
        scale *= 0.5;
    }
    // The lowest of 64 bits is far below the last of 53, and serves as a sticky bit for the
    // rounding.
    return (double)(top | (rest != 0)) * scale;
}

// Sums of squares by clip group, and the losses of the step.
struct Norms {
    const float *sums;
    // Start of each group's range in `numbers`, and the numbers of the groups' sums.
    const unsigned *starts, *numbers;
    const float *losses;
    // One for each group, followed by one for the losses.
    float *factors;
    double clip_norm, epsilon;
    unsigned n_groups, n_losses;
};

// factors[g] = min(1, n / (√Σ + ε)), n the largest norm, bit-identical to the host's.
KERNEL(clip_factors, struct Norms, job) {
    SHARED struct Fixed partial[SUM_THREADS];
    if (BLOCK == job.n_groups) {
        int finite = 1;
        for (unsigned i = 0; i < job.n_losses; i++) finite &= is_in_range(job.losses[i]);
        if (THREAD == 0) job.factors[BLOCK] = finite ? 1.0f : NOT_FINITE;
        return;
    }
    struct Fixed total = {0, 0, 0};
    for (unsigned i = job.starts[BLOCK] + THREAD; i < job.starts[BLOCK + 1]; i += SUM_THREADS)
        total = fixed_add(total, to_fixed(job.sums[job.numbers[i]]));
    partial[THREAD] = total;
    BARRIER();
    if (THREAD == 0) {
        for (unsigned i = 1; i < SUM_THREADS; i++) total = fixed_add(total, partial[i]);
        double factor = 1.0;
        if (job.clip_norm != 0.0) factor = job.clip_norm / (sqrt(to_double(total)) + job.epsilon);
        if (factor > 1.0) factor = 1.0;
        job.factors[BLOCK] = total.n_out_of_range ? NOT_FINITE : (float)factor;
    }
}

// A range of a unit's elements with equal constants.
struct Segment {
    // One past its last element.
    unsigned end;
    // Number of its factor, if `factors` is not null.
    unsigned group;
    unsigned is_frozen;
    float shrink, clip, rate, root;
};

// The bits of a bf16.
typedef unsigned short bf16;

// Rounds to nearest, ties to even; NaN remains NaN.
DEVICE bf16 to_bf16(float value) {
    unsigned bits = BITS(value);
    if ((bits & 0x7fffffff) > 0x7f800000) return bits >> 16 | 0x40;
    return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}

struct Unit {
    const float *grad, *weights, *exp_avg, *exp_avg_sq, *follower;
    float *to_weights, *to_exp_avg, *to_exp_avg_sq, *to_follower;
    // Null if the weights, or the follower's, are not needed in bf16.
    bf16 *to_rounded, *to_rounded_follower;
    unsigned n, first_block, first_segment;
    float decay, rest;
    unsigned padding;
};

struct Update {
    struct Unit units[MOST_UNITS];
    const struct Segment *segments;
    // Results of clip_factors; null if the segments have the factors.
    const float *factors;
    unsigned n_units, n_factors;
    float beta1, rest1, beta2, rest2, epsilon;
};

// m ← β₁ m + (1 - β₁) c g       v ← β₂ v + (1 - β₂) c² g²
// θ ← shrink · θ - rate · m / (root · √v + ε)      θ_F ← d θ_F + (1 - d) θ
//
// θ and θ_F are also written in bf16, for matrix products, if requested.
//
// θ, m and v of a frozen segment remain unchanged. If a factor is not finite, everything does.
KERNEL(adam_w_units, struct Update, job) {
    int finite = 1;
    if (job.factors)
        for (unsigned i = THREAD; i < job.n_factors; i += UPDATE_THREADS) finite &= job.factors[i] >= 0.0f;
    finite = ALL(finite);
    unsigned number = 0;
    while (number + 1 < job.n_units && job.units[number + 1].first_block <= BLOCK) number++;
    const struct Unit unit = job.units[number];
    const struct Segment *segment = job.segments + unit.first_segment;
    unsigned start = (BLOCK - unit.first_block) * ELEMENTS;
    unsigned end = unit.n - start < ELEMENTS ? unit.n : start + ELEMENTS;
    for (unsigned i = start + THREAD; i < end; i += UPDATE_THREADS) {
        while (segment->end <= i) segment++;
        float theta = unit.weights[i], m = unit.exp_avg[i], v = unit.exp_avg_sq[i];
        if (finite && !segment->is_frozen) {
            float g = unit.grad[i] * (job.factors ? job.factors[segment->group] : segment->clip);
            m = job.beta1 * m + job.rest1 * g;
            v = job.beta2 * v + job.rest2 * g * g;
            theta = theta * segment->shrink - segment->rate * m / (sqrtf(v) * segment->root + job.epsilon);
        }
        unit.to_weights[i] = theta;
        if (unit.to_rounded) unit.to_rounded[i] = to_bf16(theta);
        unit.to_exp_avg[i] = m;
        unit.to_exp_avg_sq[i] = v;
        if (unit.follower) {
            float follower = unit.follower[i];
            if (finite) follower = unit.decay * follower + unit.rest * theta;
            unit.to_follower[i] = follower;
            if (unit.to_rounded_follower) unit.to_rounded_follower[i] = to_bf16(follower);
        }
    }
}
