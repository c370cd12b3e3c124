// A cuBLASLt that computes nothing: it checks what it is asked for, and appends a line for each product to the file
// OCELLI_DRIVER_LOG, to which driver.c writes its launches.
//
// OCELLI_CUBLASLT_FAILS makes it fail: "create" when a handle is made, "heuristic" when it is asked for an algorithm,
// "matmul" when it multiplies.

#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <stdint.h>

enum { SUCCESS = 0, NOT_INITIALIZED = 1, INVALID_VALUE = 7, EXECUTION_FAILED = 13, NOT_SUPPORTED = 15 };

// Attributes of cublasLt.h by number.
enum { DESC_TRANSA = 3, DESC_TRANSB = 4, DESC_EPILOGUE = 7, DESC_BIAS_POINTER = 8 };
enum { LAYOUT_BATCH_COUNT = 5, LAYOUT_BATCH_STRIDE = 6 };
enum { TYPE_F32 = 0, TYPE_BF16 = 14 };

struct Desc { int compute; int transposes[2]; int epilogue; uint64_t bias; };
struct Layout { int type; uint64_t rows, columns; int64_t ld; int32_t n_batches; int64_t batch_stride; };

static int fails(const char *at) {
    const char *value = getenv("OCELLI_CUBLASLT_FAILS");
    return value && !strcmp(value, at);
}

static int log_file = -1;
static void open_log(void) {
    const char *path = getenv("OCELLI_DRIVER_LOG");
    if (path) log_file = open(path, O_WRONLY | O_CREAT | O_APPEND, 0644);
}

size_t cublasLtGetVersion(void) {
    const char *value = getenv("OCELLI_CUBLASLT_VERSION");
    return value ? (size_t)atol(value) : 130200;
}
const char *cublasLtGetStatusName(int status) { return "a status"; }
const char *cublasLtGetStatusString(int status) { return "a status"; }
int cublasLtCreate(void **handle) { *handle = malloc(8); return fails("create") ? NOT_INITIALIZED : SUCCESS; }
int cublasLtDestroy(void *handle) { free(handle); return SUCCESS; }

int cublasLtMatmulDescCreate(struct Desc **desc, int compute, int scale) {
    *desc = calloc(1, sizeof **desc);
    (*desc)->compute = compute;
    (*desc)->epilogue = 1;
    return scale == TYPE_F32 ? SUCCESS : INVALID_VALUE;
}
int cublasLtMatmulDescSetAttribute(struct Desc *desc, int attribute, const void *value, size_t n) {
    switch (attribute) {
    case DESC_TRANSA: case DESC_TRANSB:
        if (n != 4) return INVALID_VALUE;
        memcpy(&desc->transposes[attribute - DESC_TRANSA], value, n);
        break;
    case DESC_EPILOGUE:
        if (n != 4) return INVALID_VALUE;
        memcpy(&desc->epilogue, value, n);
        break;
    case DESC_BIAS_POINTER:
        if (n != 8) return INVALID_VALUE;
        memcpy(&desc->bias, value, n);
        break;
    }
    return SUCCESS;
}
int cublasLtMatmulDescDestroy(struct Desc *desc) { free(desc); return SUCCESS; }

int cublasLtMatrixLayoutCreate(struct Layout **layout, int type, uint64_t rows, uint64_t columns, int64_t ld) {
    *layout = malloc(sizeof **layout);
    **layout = (struct Layout) {type, rows, columns, ld, 1, 0};
    return (type == TYPE_F32 || type == TYPE_BF16) && ld >= (int64_t)rows ? SUCCESS : INVALID_VALUE;
}
int cublasLtMatrixLayoutSetAttribute(struct Layout *layout, int attribute, const void *value, size_t n) {
    switch (attribute) {
    case LAYOUT_BATCH_COUNT: if (n != 4) return INVALID_VALUE; memcpy(&layout->n_batches, value, n); break;
    case LAYOUT_BATCH_STRIDE: if (n != 8) return INVALID_VALUE; memcpy(&layout->batch_stride, value, n); break;
    }
    return SUCCESS;
}
int cublasLtMatrixLayoutDestroy(struct Layout *layout) { free(layout); return SUCCESS; }

int cublasLtMatmulPreferenceCreate(void **preference) { *preference = malloc(8); return SUCCESS; }
int cublasLtMatmulPreferenceSetAttribute(void *preference, int attribute, const void *value, size_t n) { return SUCCESS; }
int cublasLtMatmulPreferenceDestroy(void *preference) { free(preference); return SUCCESS; }

// cublasLtMatmulHeuristicResult_t.
struct Found { uint64_t algorithm[8]; size_t workspace; int state; float waves; int reserved[4]; };

int cublasLtMatmulAlgoGetHeuristic(void *handle, struct Desc *desc, struct Layout *a, struct Layout *b, struct Layout *c,
                                   struct Layout *d, void *preference, int n, struct Found *found, int *n_found) {
    memset(found, 0, sizeof *found);
    found->algorithm[0] = 66;
    *n_found = fails("heuristic") ? 0 : 1;
    return *n_found ? SUCCESS : NOT_SUPPORTED;
}
int cublasLtMatmulAlgoConfigGetAttribute(const void *algorithm, int attribute, void *value, size_t n, size_t *written) {
    memset(value, 0, n);
    if (attribute == 0) memcpy(value, algorithm, n < 4 ? n : 4);
    if (written) *written = n;
    return SUCCESS;
}

// Rows and columns of a factor as it is multiplied.
static uint64_t outer(const struct Layout *l, int transposed) { return transposed ? l->columns : l->rows; }
static uint64_t inner(const struct Layout *l, int transposed) { return transposed ? l->rows : l->columns; }

int cublasLtMatmul(void *handle, struct Desc *desc, const float *alpha, const void *a, struct Layout *la, const void *b,
                   struct Layout *lb, const float *beta, const void *c, struct Layout *lc, void *d, struct Layout *ld,
                   const void *algorithm, void *workspace, size_t n_workspace, void *stream) {
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, open_log);
    uint64_t m = outer(la, desc->transposes[0]), k = inner(la, desc->transposes[0]);
    uint64_t n = inner(lb, desc->transposes[1]);
    if (outer(lb, desc->transposes[1]) != k || ld->rows != m || ld->columns != n) return INVALID_VALUE;
    if (la->type != lb->type || la->n_batches != ld->n_batches || lb->n_batches != ld->n_batches) return INVALID_VALUE;
    if (!a || !b || !d || ((uintptr_t)a | (uintptr_t)b | (uintptr_t)d) % 16 || (n_workspace && !workspace)) return INVALID_VALUE;
    if (desc->epilogue != 1 && (!desc->bias || desc->bias % 16)) return INVALID_VALUE;
    if (fails("matmul")) return EXECUTION_FAILED;
    // The rows of the program's matrices are the columns of these.
    if (log_file >= 0)
        dprintf(log_file,
                "product m %llu k %llu n %llu batches %d transposed %d%d types %d to %d strides %lld %lld %lld epilogue %d adds %d stream %p a %p b %p "
                "c %p bias %llx\n",
                (unsigned long long)n, (unsigned long long)k, (unsigned long long)m, ld->n_batches, desc->transposes[1],
                desc->transposes[0], la->type, ld->type, (long long)lb->ld, (long long)la->ld, (long long)ld->ld, desc->epilogue, *beta != 0, stream, b, a, d,
                (unsigned long long)desc->bias);
    return SUCCESS;
}
