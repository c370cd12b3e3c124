// A CUDA driver without a device. It claims the compute capability of OCELLI_DRIVER_SM ("80", "90"), hands out host memory,
// copies, and launches nothing; what it is given to load is PTX, which it writes to the folder OCELLI_DRIVER_PTX, a file a
// module. With it as libcuda.so.1, and NVIDIA's own NVRTC, a step compiles every kernel that it would launch.

#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

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

static const size_t MEMORY = 64ull << 30;

static int sm(void) {
    const char *value = getenv("OCELLI_DRIVER_SM");
    return value ? atoi(value) : 80;
}

Result cuInit(unsigned flags) { return SUCCESS; }
Result cuDriverGetVersion(int *version) { *version = 13020; return SUCCESS; }
Result cuGetErrorName(Result error, const char **name) { *name = "an error"; return SUCCESS; }
Result cuGetErrorString(Result error, const char **text) { *text = "an error of the driver without a device"; return SUCCESS; }

Result cuDeviceGetCount(int *count) { *count = 1; return SUCCESS; }
Result cuDeviceGet(int *device, int ordinal) { *device = ordinal; return SUCCESS; }
Result cuDeviceGetName(char *name, int len, int device) { snprintf(name, len, "no device, sm_%d", sm()); return SUCCESS; }
Result cuDeviceGetUuid_v2(char *uuid, int device) { memset(uuid, 0, 16); return SUCCESS; }
Result cuDeviceGetPCIBusId(char *id, int len, int device) { snprintf(id, len, "0000:00:00.0"); return SUCCESS; }
Result cuDeviceTotalMem_v2(size_t *bytes, int device) { *bytes = MEMORY; return SUCCESS; }
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
    void *memory = calloc(1, bytes ? bytes : 1);
    *out = (Pointer)memory;
    return memory ? SUCCESS : OUT_OF_MEMORY;
}
Result cuMemAlloc_v2(Pointer *out, size_t bytes) { return allocate(out, bytes); }
Result cuMemAllocAsync(Pointer *out, size_t bytes, void *stream) { return allocate(out, bytes); }
Result cuMemFree_v2(Pointer memory) { free((void *)memory); return SUCCESS; }
Result cuMemFreeAsync(Pointer memory, void *stream) { free((void *)memory); return SUCCESS; }
Result cuMemAllocHost_v2(void **out, size_t bytes) { return allocate((Pointer *)out, bytes); }
Result cuMemHostAlloc(void **out, size_t bytes, unsigned flags) { return allocate((Pointer *)out, bytes); }
Result cuMemFreeHost(void *memory) { free(memory); return SUCCESS; }
Result cuMemGetInfo_v2(size_t *free_bytes, size_t *total) { *free_bytes = *total = MEMORY; return SUCCESS; }

static Result copy(Pointer to, Pointer from, size_t bytes) {
    memmove((void *)to, (const void *)from, bytes);
    return SUCCESS;
}
Result cuMemcpyHtoDAsync_v2(Pointer to, Pointer from, size_t bytes, void *stream) { return copy(to, from, bytes); }
Result cuMemcpyDtoHAsync_v2(Pointer to, Pointer from, size_t bytes, void *stream) { return copy(to, from, bytes); }
Result cuMemcpyDtoDAsync_v2(Pointer to, Pointer from, size_t bytes, void *stream) { return copy(to, from, bytes); }
Result cuMemsetD8Async(Pointer to, unsigned char value, size_t n, void *stream) { memset((void *)to, value, n); return SUCCESS; }

// CUDA_MEMCPY2D of cuda.h.
struct Side { size_t x_bytes, y; int memory_type; void *host; Pointer device; void *array; size_t pitch; };
struct Copy2D { struct Side from, to; size_t width_bytes, height; };
Result cuMemcpy2DAsync_v2(const struct Copy2D *c, void *stream) {
    const int HOST = 1;
    char *from = c->from.memory_type == HOST ? c->from.host : (char *)c->from.device;
    char *to = c->to.memory_type == HOST ? c->to.host : (char *)c->to.device;
    from += c->from.y * c->from.pitch + c->from.x_bytes;
    to += c->to.y * c->to.pitch + c->to.x_bytes;
    for (size_t y = 0; y < c->height; y++) memmove(to + y * c->to.pitch, from + y * c->from.pitch, c->width_bytes);
    return SUCCESS;
}

// What CubeCL wants a kernel to take when it measures a device, and repeats it until it does.
static const int ELAPSED_MS = 20;
static int launched;

static int stream;
Result cuStreamCreate(void **out, unsigned flags) { *out = &stream; return SUCCESS; }
Result cuStreamCreateWithPriority(void **out, unsigned flags, int priority) { *out = &stream; return SUCCESS; }
Result cuStreamDestroy_v2(void *s) { return SUCCESS; }
static Result wait(void) {
    if (__sync_fetch_and_and(&launched, 0)) usleep(1000 * ELAPSED_MS);
    return SUCCESS;
}
Result cuStreamSynchronize(void *s) { return wait(); }
Result cuCtxSynchronize(void) { return wait(); }
Result cuStreamQuery(void *s) { return wait(); }
Result cuStreamWaitEvent(void *s, void *event, unsigned flags) { return SUCCESS; }
Result cuEventCreate(void **out, unsigned flags) { *out = &stream; return SUCCESS; }
Result cuEventRecord(void *event, void *s) { return SUCCESS; }
Result cuEventSynchronize(void *event) { return wait(); }
Result cuEventQuery(void *event) { return wait(); }
Result cuEventElapsedTime_v2(float *ms, void *start, void *end) { *ms = ELAPSED_MS; return SUCCESS; }
Result cuEventElapsedTime(float *ms, void *start, void *end) { *ms = ELAPSED_MS; return SUCCESS; }
Result cuEventDestroy_v2(void *event) { return SUCCESS; }

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
Result cuModuleGetFunction(void **function, void *module, const char *name) { *function = &n_modules; return SUCCESS; }
Result cuFuncSetAttribute(void *function, int attribute, int value) { return SUCCESS; }
Result cuFuncGetAttribute(int *value, int attribute, void *function) { *value = 0; return SUCCESS; }
Result cuTensorMapEncodeTiled(void *map) { memset(map, 0, 128); return SUCCESS; }
Result cuTensorMapEncodeIm2col(void *map) { memset(map, 0, 128); return SUCCESS; }
Result cuTensorMapEncodeIm2colWide(void *map) { memset(map, 0, 128); return SUCCESS; }
Result cuLaunchKernel(void) { launched = 1; return SUCCESS; }
Result cuLaunchKernelEx(void) { launched = 1; return SUCCESS; }
