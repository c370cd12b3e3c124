// An NVRTC that compiles nothing: every program becomes the same text, which driver.c accepts as a module. With both, the
// launches of a step are seen on a machine without NVIDIA's compiler.

#include <stddef.h>
#include <string.h>

typedef int Result;

static const char PTX[] = ".version 8.0\n.target sm_80\n.address_size 64\n";

Result nvrtcVersion(int *major, int *minor) { *major = 13; *minor = 0; return 0; }
const char *nvrtcGetErrorString(Result result) { return "an error of the compiler that compiles nothing"; }
Result nvrtcCreateProgram(void **program, const char *source, const char *name, int n, const char *const *headers,
                          const char *const *names) {
    static int any;
    *program = &any;
    return 0;
}
Result nvrtcDestroyProgram(void **program) { return 0; }
Result nvrtcCompileProgram(void *program, int n, const char *const *options) { return 0; }
Result nvrtcGetPTXSize(void *program, size_t *size) { *size = sizeof PTX; return 0; }
Result nvrtcGetPTX(void *program, char *ptx) { memcpy(ptx, PTX, sizeof PTX); return 0; }
Result nvrtcGetProgramLogSize(void *program, size_t *size) { *size = 1; return 0; }
Result nvrtcGetProgramLog(void *program, char *log) { *log = 0; return 0; }
