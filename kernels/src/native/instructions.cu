// Instructions of NVIDIA's GPUs from compute capability 8.0 on, as functions: copies to shared
// memory, products of matrices by a warp, and sums over its lanes. The tests have the same
// functions for the CPU (`tests/cuda/warp.h`).
//
// Matrices of a warp: lane l has elements 2 (l % 4) and 2 (l % 4) + 1 of row l / 4 of a matrix of
// 8 x 8, as two bf16 in a word.

#define INLINE __device__ static __forceinline__
#define UNROLL _Pragma("unroll")
#define ROLLED _Pragma("unroll 1")
#define ALIGNED(n) __align__(n)

// Number of the thread, like THREAD, but read where it is called.
INLINE unsigned read_thread() {
    unsigned thread;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
    return thread;
}

// Address in shared memory, as the instructions below take it.
INLINE unsigned shared_address(const void *memory, unsigned) {
    return (unsigned)__cvta_generic_to_shared(memory);
}

// Begins to copy 16 bytes to shared memory, or clears them.
INLINE void copy_chunk(unsigned to, const void *from, int is_there) {
    int n = is_there ? 16 : 0;
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(n) : "memory");
}

// Begins to copy 8 bytes to shared memory, or clears them.
INLINE void copy_pair(unsigned to, const void *from, int is_there) {
    int n = is_there ? 8 : 0;
    asm volatile("cp.async.ca.shared.global [%0], [%1], 8, %2;" ::"r"(to), "l"(from), "r"(n) : "memory");
}

// Waits for the copies of this thread.
INLINE void wait_for_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }

INLINE void wait_for_warp() { __syncwarp(); }

// Loads four matrices of 8 x 8; every lane gives the address of a row of 16 bytes, lanes 0 to 7
// those of the first matrix.
INLINE void load_matrices(unsigned *m, unsigned row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3]) : "r"(row) : "memory");
}

// The same, transposed.
INLINE void load_transposed(unsigned *m, unsigned row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3]) : "r"(row) : "memory");
}

// Reads four numbers of shared memory.
INLINE void load_floats(float *x, unsigned from) {
    asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(x[0]), "=f"(x[1]), "=f"(x[2]), "=f"(x[3]) : "r"(from) : "memory");
}

// sums += a · b, [16, 8], for a of 16 x 16: rows 0 to 7 of columns 0 to 7, rows 8 to 15, then
// columns 8 to 15; b is transposed.
INLINE void multiply(float *sums, const unsigned *a, unsigned b0, unsigned b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
                 "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Rounds two numbers to bf16.
INLINE unsigned pack(float low, float high) {
    unsigned both;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
    return both;
}

INLINE float low(unsigned both) { return __uint_as_float(both << 16); }
INLINE float high(unsigned both) { return __uint_as_float(both & 0xffff0000u); }

// 2 to the power of x.
INLINE float power(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// Logarithm to the base of 2.
INLINE float logarithm(float x) {
    float y;
    asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// a · b + c, rounded once.
INLINE float fused(float a, float b, float c) { return __fmaf_rn(a, b, c); }

INLINE float larger(float a, float b) { return fmaxf(a, b); }

INLINE float exchange(float x, int mask) { return __shfl_xor_sync(~0u, x, mask); }

// Over the four lanes of a row.
INLINE float largest_of_four(float x) {
    x = larger(x, exchange(x, 1));
    return larger(x, exchange(x, 2));
}
INLINE float sum_of_four(float x) {
    x += exchange(x, 1);
    return x + exchange(x, 2);
}
