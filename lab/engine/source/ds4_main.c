// Start of every program of the stand-in: an ELF that carries the CUDA kernel and runs, in its own process, the Python
// that is appended to it. So /proc/PID/exe, cmdline and comm are those of a native engine.
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#ifndef DS4_CPU_ONLY
__asm__(".section .nv_fatbin,\"a\"\n.balign 16\n.incbin \"ds4_cuda.fatbin\"\n.previous\n");
#endif

const char ds4_build_version[] = DS4_BUILD_VERSION;

int main(int argc, char **argv) {
    char self[4096];
    ssize_t length = readlink("/proc/self/exe", self, sizeof self - 1);
    if (length < 0) {
        perror("ds4: /proc/self/exe");
        return 1;
    }
    self[length] = 0;

    void *python = dlopen(LIBPYTHON, RTLD_NOW | RTLD_GLOBAL);
    if (!python) python = dlopen(LIBPYTHON_DIR "/" LIBPYTHON, RTLD_NOW | RTLD_GLOBAL);
    if (!python) {
        fprintf(stderr, "ds4: %s (the stand-in engine needs the Debian package libpython3.x)\n", dlerror());
        return 1;
    }
    int (*run)(int, char **) = (int (*)(int, char **))dlsym(python, "Py_BytesMain");
    if (!run) {
        fprintf(stderr, "ds4: %s\n", dlerror());
        return 1;
    }

    const char *before[] = {argv[0], "-I", "-S", "-B", self};
    const int extra = sizeof before / sizeof *before;
    char **arguments = calloc(argc + extra, sizeof *arguments);
    if (!arguments) return 1;
    for (int i = 0; i < extra; i++) arguments[i] = (char *)before[i];
    for (int i = 1; i < argc; i++) arguments[extra + i - 1] = argv[i];
    return run(extra + argc - 1, arguments);
}
