// A CUDA driver without a device. It claims the compute capability of OCELLI_DRIVER_SM ("80", "90") and the memory of
// OCELLI_DRIVER_GIB, hands out host memory, copies, and launches nothing. What it is given to load is PTX, which it writes to
// the folder OCELLI_DRIVER_PTX, a file a module. It appends a line for each launch, copy, allocation and wait to the file
// OCELLI_DRIVER_LOG, if that is set. With OCELLI_DRIVER_READS_ZEROS, whatever is read is zero. With OCELLI_DRIVER_RUNS, the
// kernels of update.cu are run on the CPU: see emulator.h.
//
// With it as libcuda.so, and NVIDIA's own NVRTC, a step compiles every kernel that it would launch; with nvrtc.c in place
// of NVRTC, a step shows what it launches, in which order and on which stream, without compiling anything.

#include <fcntl.h>
#include <pthread.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "emulator.h"

typedef int Result;
typedef unsigned long long Pointer;

enum { SUCCESS = 0, OUT_OF_MEMORY = 2 };

// Attributes of cuda.h by number: those that decide what is compiled.
enum {
    MAX_THREADS_PER_BLOCK = 1,
    MAX_BLOCK_DIM_X = 2,
    MAX_BLOCK_DIM_Y = 3,
    MAX_BLOCK_DIM_Z = 4,
    MAX_GRID_DIM_X = 5,
    MAX_GRID_DIM_Y = 6,
    MAX_GRID_DIM_Z = 7,
    WARP_SIZE = 10,
    MULTIPROCESSOR_COUNT = 16,
    COMPUTE_CAPABILITY_MAJOR = 75,
    COMPUTE_CAPABILITY_MINOR = 76,
    MAX_SHARED_MEMORY_PER_BLOCK_OPTIN = 97,
};

static int number_of(const char *name, int otherwise) {
    const char *value = getenv(name);
    return value ? atoi(value) : otherwise;
}

static int sm(void) { return number_of("OCELLI_DRIVER_SM", 80); }

static size_t memory(void) { return (size_t)number_of("OCELLI_DRIVER_GIB", 64) << 30; }

static int log_file = -1;
static void open_log(void) {
    const char *path = getenv("OCELLI_DRIVER_LOG");
    if (path) log_file = open(path, O_WRONLY | O_CREAT | O_APPEND, 0644);
}

// Appends a line to the log, in one write. cublaslt.c writes to the same file.
#define LOG(...) do { \
    static pthread_once_t once = PTHREAD_ONCE_INIT; \
    pthread_once(&once, open_log); \
    if (log_file >= 0) dprintf(log_file, __VA_ARGS__); \
} while (0)

Result cuInit(unsigned flags) { return SUCCESS; }
Result cuDriverGetVersion(int *version) {
    *version = number_of("OCELLI_DRIVER_VERSION", 13020);
    return SUCCESS;
}
Result cuGetErrorName(Result error, const char **name) { *name = "an error"; return SUCCESS; }
Result cuGetErrorString(Result error, const char **text) { *text = "an error of the driver without a device"; return SUCCESS; }

Result cuDeviceGetCount(int *count) { *count = 1; return SUCCESS; }
Result cuDeviceGet(int *device, int ordinal) { *device = ordinal; return SUCCESS; }
Result cuDeviceGetName(char *name, int len, int device) { snprintf(name, len, "no device, sm_%d", sm()); return SUCCESS; }
Result cuDeviceGetUuid_v2(char *uuid, int device) { memset(uuid, 0, 16); return SUCCESS; }
Result cuDeviceGetPCIBusId(char *id, int len, int device) { snprintf(id, len, "0000:00:00.0"); return SUCCESS; }
Result cuDeviceTotalMem_v2(size_t *bytes, int device) { *bytes = memory(); return SUCCESS; }
Result cuDeviceGetAttribute(int *value, int attribute, int device) {
    switch (attribute) {
    case MAX_THREADS_PER_BLOCK: case MAX_BLOCK_DIM_X: case MAX_BLOCK_DIM_Y: *value = 1024; break;
    case MAX_BLOCK_DIM_Z: *value = 64; break;
    case MAX_GRID_DIM_X: *value = 2147483647; break;
    case MAX_GRID_DIM_Y: case MAX_GRID_DIM_Z: *value = 65535; break;
    case WARP_SIZE: *value = 32; break;
    case MULTIPROCESSOR_COUNT: *value = sm() >= 90 ? 132 : 108; break;
    case COMPUTE_CAPABILITY_MAJOR: *value = sm() / 10; break;
    case COMPUTE_CAPABILITY_MINOR: *value = sm() % 10; break;
    case MAX_SHARED_MEMORY_PER_BLOCK_OPTIN: *value = sm() >= 90 ? 232448 : 166912; break;
    default: *value = 0;
    }
    return SUCCESS;
}

static int context;
Result cuDevicePrimaryCtxRetain(void **out, int device) { *out = &context; return SUCCESS; }
Result cuDevicePrimaryCtxRelease_v2(int device) { return SUCCESS; }
Result cuCtxSetCurrent(void *ctx) { return SUCCESS; }
Result cuCtxGetCurrent(void **out) { *out = &context; return SUCCESS; }

Result cuCtxGetStreamPriorityRange(int *least, int *greatest) { *least = *greatest = 0; return SUCCESS; }

static Result allocate(Pointer *out, size_t bytes) {
    // OCELLI_DRIVER_REFUSES is a number of bytes for which there is no memory.
    if (bytes > memory() || bytes == (size_t)number_of("OCELLI_DRIVER_REFUSES", 0)) return OUT_OF_MEMORY;
    void *pages = calloc(1, bytes ? bytes : 1);
    // With OCELLI_DRIVER_FILL, memory holds numbers that are not zero.
    if (pages && getenv("OCELLI_DRIVER_FILL")) memset(pages, 0x3c, bytes);
    *out = (Pointer)pages;
    LOG("allocate %zu at %llx\n", bytes, *out);
    return pages ? SUCCESS : OUT_OF_MEMORY;
}
static Result release(Pointer pages) {
    LOG("free %llx\n", pages);
    free((void *)pages);
    return SUCCESS;
}
Result cuMemAlloc_v2(Pointer *out, size_t bytes) { return allocate(out, bytes); }
Result cuMemAllocAsync(Pointer *out, size_t bytes, void *stream) { return allocate(out, bytes); }
Result cuMemFree_v2(Pointer pages) { return release(pages); }
Result cuMemFreeAsync(Pointer pages, void *stream) { return release(pages); }
Result cuMemAllocHost_v2(void **out, size_t bytes) { return allocate((Pointer *)out, bytes); }
Result cuMemHostAlloc(void **out, size_t bytes, unsigned flags) { return allocate((Pointer *)out, bytes); }
Result cuMemFreeHost(void *memory) { free(memory); return SUCCESS; }
Result cuMemGetInfo_v2(size_t *free_bytes, size_t *total) { *free_bytes = *total = memory(); return SUCCESS; }

// Whether what is read from memory of the device is zero: no check finds anything wrong then, because it counts nothing, and
// results are zero, too.
static int reads_zeros(void) { return getenv("OCELLI_DRIVER_READS_ZEROS") != NULL; }

static Result copy(const char *kind, Pointer to, Pointer from, size_t bytes, void *stream) {
    LOG("copy %s %zu to %llx stream %p\n", kind, bytes, to, stream);
    memmove((void *)to, (const void *)from, bytes);
    return SUCCESS;
}
Result cuMemcpyHtoDAsync_v2(Pointer to, Pointer from, size_t bytes, void *stream) { return copy("in", to, from, bytes, stream); }
Result cuMemcpyDtoHAsync_v2(Pointer to, Pointer from, size_t bytes, void *stream) {
    copy("out", to, from, bytes, stream);
    if (reads_zeros()) memset((void *)to, 0, bytes);
    return SUCCESS;
}
Result cuMemcpyDtoDAsync_v2(Pointer to, Pointer from, size_t bytes, void *stream) { return copy("within", to, from, bytes, stream); }
Result cuMemsetD8Async(Pointer to, unsigned char value, size_t n, void *stream) {
    LOG("set %zu at %llx stream %p\n", n, to, stream);
    memset((void *)to, value, n);
    return SUCCESS;
}

// CUDA_MEMCPY2D of cuda.h.
struct Side { size_t x_bytes, y; int memory_type; void *host; Pointer device; void *array; size_t pitch; };
struct Copy2D { struct Side from, to; size_t width_bytes, height; };
Result cuMemcpy2DAsync_v2(const struct Copy2D *c, void *stream) {
    const int HOST = 1;
    LOG("copy rows %zu of %zu stream %p\n", c->height, c->width_bytes, stream);
    char *from = c->from.memory_type == HOST ? c->from.host : (char *)c->from.device;
    char *to = c->to.memory_type == HOST ? c->to.host : (char *)c->to.device;
    from += c->from.y * c->from.pitch + c->from.x_bytes;
    to += c->to.y * c->to.pitch + c->to.x_bytes;
    for (size_t y = 0; y < c->height; y++) memmove(to + y * c->to.pitch, from + y * c->from.pitch, c->width_bytes);
    if (c->to.memory_type == HOST && reads_zeros()) {
        for (size_t y = 0; y < c->height; y++) memset(to + y * c->to.pitch, 0, c->width_bytes);
    }
    return SUCCESS;
}

// What CubeCL wants a kernel to take when it measures a device, and repeats it until it does.
static const int ELAPSED_MS = 20;
static int launched;
static volatile int n_launches;
static __thread int thread_launches;

// An event knows the stream that it was recorded on last.
struct Event { void *stream; };
// Streams are numbers, so that a log tells them apart.
Result cuStreamCreate(void **out, unsigned flags) {
    static unsigned long long n_streams;
    *out = (void *)(0x1000 + 16 * __sync_fetch_and_add(&n_streams, 1));
    return SUCCESS;
}
Result cuStreamCreateWithPriority(void **out, unsigned flags, int priority) { return cuStreamCreate(out, flags); }
Result cuStreamDestroy_v2(void *s) { return SUCCESS; }
// With OCELLI_DRIVER_WAIT_MS, a wait of a thread that does not launch takes so long, or until another thread launches something:
// what had been queued before the wait is in the log before it.
static Result wait(const char *what, void *stream) {
    if (__sync_fetch_and_and(&launched, 0)) usleep(1000 * ELAPSED_MS);
    int before = n_launches;
    for (int ms = number_of("OCELLI_DRIVER_WAIT_MS", 0); !thread_launches && ms > 0 && n_launches == before; ms--) usleep(1000);
    LOG("waited for %s stream %p on %s\n", what, stream, thread_launches ? "the launching thread" : "another thread");
    return SUCCESS;
}
Result cuStreamSynchronize(void *s) { return wait("work", s); }
Result cuCtxSynchronize(void) { return wait("everything", NULL); }
Result cuStreamQuery(void *s) { return wait("work", s); }
Result cuStreamWaitEvent(void *s, void *event, unsigned flags) { return SUCCESS; }
Result cuEventCreate(void **out, unsigned flags) {
    *out = calloc(1, sizeof(struct Event));
    return *out ? SUCCESS : OUT_OF_MEMORY;
}
Result cuEventRecord(void *event, void *s) {
    ((struct Event *)event)->stream = s;
    return SUCCESS;
}
Result cuEventSynchronize(void *event) { return wait("event", ((struct Event *)event)->stream); }
Result cuEventQuery(void *event) { return wait("event", ((struct Event *)event)->stream); }
Result cuEventElapsedTime_v2(float *ms, void *start, void *end) { *ms = ELAPSED_MS; return SUCCESS; }
Result cuEventElapsedTime(float *ms, void *start, void *end) { *ms = ELAPSED_MS; return SUCCESS; }
Result cuEventDestroy_v2(void *event) {
    free(event);
    return SUCCESS;
}

static int n_modules;
Result cuModuleLoadData(void **module, const char *ptx) {
    const char *folder = getenv("OCELLI_DRIVER_PTX");
    int number = __sync_fetch_and_add(&n_modules, 1);
    if (folder) {
        char path[4096];
        snprintf(path, sizeof path, "%s/%05d.ptx", folder, number);
        FILE *file = fopen(path, "w");
        if (!file || fputs(ptx, file) < 0 || fclose(file)) abort();
    }
    *module = &n_modules;
    return SUCCESS;
}
Result cuModuleUnload(void *module) { return SUCCESS; }
// A function is its name.
Result cuModuleGetFunction(void **function, void *module, const char *name) { *function = strdup(name); return SUCCESS; }
Result cuFuncSetAttribute(void *function, int attribute, int value) { return SUCCESS; }
Result cuFuncGetAttribute(int *value, int attribute, void *function) { *value = 0; return SUCCESS; }
Result cuTensorMapEncodeTiled(void *map) { memset(map, 0, 128); return SUCCESS; }
Result cuTensorMapEncodeIm2col(void *map) { memset(map, 0, 128); return SUCCESS; }
Result cuTensorMapEncodeIm2colWide(void *map) { memset(map, 0, 128); return SUCCESS; }
static Result launch(const char *name, unsigned grid, unsigned block, void *stream) {
    launched = thread_launches = 1;
    LOG("launch %s grid %u block %u stream %p\n", name, grid, block, stream);
    __sync_fetch_and_add(&n_launches, 1);
    return SUCCESS;
}
Result cuLaunchKernel(void *f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, unsigned shared,
                      void *stream, void **args, void **extra) {
    if (getenv("OCELLI_DRIVER_RUNS")) emulate(f, args, gx);
    return launch(f, gx * gy * gz, bx * by * bz, stream);
}
// CUlaunchConfig of cuda.h.
struct Config { unsigned gx, gy, gz, bx, by, bz, shared; void *stream; void *attributes; unsigned n_attributes; };
Result cuLaunchKernelEx(const struct Config *c, void *f, void **args, void **extra) {
    return launch(f, c->gx * c->gy * c->gz, c->bx * c->by * c->bz, c->stream);
}
