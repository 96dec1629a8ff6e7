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

// A native engine carries the names of the variables that it reads; the appended Python is compressed and shows none.
const char ds4_variables[] =
    "DS4_GGUF_DIR\0" "GGUF_FILE\0" "MTP_FILE\0" "DSPARK_FILE\0" "DS4_DSPARK_MODEL\0" "DS4_LOCK_FILE\0"
    "DS4_NO_UPDATE_CHECK\0" "DS4_UPDATE_URL\0" "DS4_CODEX_MODELS_FILE\0" "DS4_MEM_FLOOR_GB\0" "DS4_MEMGOV\0"
    "DS4_BATCH_FIT\0" "DS4_BATCH_FIT_KV\0" "DS4_BATCH_FIT_HEADROOM_MB\0" "DS4_BATCH_FIT_BURST_MB\0"
    "DS4_BATCH_FIT_HEADROOM_DERIVED\0" "DS4_BATCH_VMM_BUDGET_MB\0" "DS4_BATCH_VMM_FLOOR_PACKED\0"
    "DS4_BATCH_VMM_TRIM\0" "DS4_BATCH_VMM_COMP\0" "DS4_BATCH_TRIM_VICTIM\0" "DS4_BATCH_TRIM_BESTFIT\0"
    "DS4_CONT_ADMIT_BAND_X1024\0" "DS4_CONT_ADMIT_TRANCHE\0" "DS4_SERIAL_RESERVE_CTX\0" "DS4_SERIAL_IDLE_REAP_S\0"
    "DS4_SERVER_SERIAL_RIGHTSIZE\0" "DS4_SERVER_SERIAL_MAX_TOKENS\0" "DS4_SESSION_GRAPH_FIT\0"
    "DS4_SESSION_GRAPH_HEADROOM_MB\0" "DS4_SESSION_LAZY_GRAPH\0" "DS4_MEM_OWN_TRIM\0" "DS4_MEM_RECONCILE_TOL_MB\0"
    "DS4_MEM_RECONCILE_STRICT\0" "DS4_MEM_RECONCILE_WARMUP_MB\0" "DS4_WEIGHT_RESIDENCY\0" "DS4_WEIGHT_RESIDENCY_%s\0"
    "DS4_CUDA_NO_HBM_CACHE\0" "DS4_CUDA_NO_FD_CACHE\0" "DS4_CUDA_DIRECT_MODEL\0" "DS4_CUDA_WEIGHT_CACHE_LIMIT_GB\0"
    "DS4_MODEL_ANON_HUGE\0" "DS4_CUDA_COPY_MODEL\0" "DS4_CUDA_FP8_KV\0" "DS4_CUDA_FP4_INDEX\0"
    "DS4_CUDA_BUILD_ARTIFACTS\0" "DS4_CUDA_NO_DERIVED_WEIGHTS\0" "DS4_SERVER_COALESCE\0" "DS4_SERVER_COALESCE_MAX\0"
    "DS4_SERVER_COALESCE_MAX_TOKENS\0" "DS4_SERVER_COALESCE_WAIT_MS\0" "DS4_SERVER_CONTINUOUS\0"
    "DS4_SERVER_NO_SERIAL\0" "DS4_CONT_PREFILL_CHUNK\0" "DS4_CONT_PREFILL_CHUNK_LIVE\0" "DS4_PREFILL_NOFENCE\0"
    "DS4_METAL_PREFILL_CHUNK\0" "DS4_SERVER_WARM\0" "DS4_SERVER_FORK\0" "DS4_SERVER_FORK_PARTIAL\0"
    "DS4_SERVER_FORK_PARTIAL_MIN\0" "DS4_SERVER_PIN_MIN_TOKENS\0" "DS4_SERVER_DISK_PARTIAL\0"
    "DS4_SERVER_BANK_CHECKPOINT\0" "DS4_SERVER_DISCONNECT_ABORT\0" "DS4_SERVER_CHUNKED\0" "DS4_SERVER_MAX_CLIENTS\0"
    "DS4_SERVER_MAX_QUEUE\0" "DS4_SERVER_MAX_QUEUE_BYTES\0" "DS4_SERVER_MAX_QUEUE_AGE_S\0" "DS4_SERVER_OUT_AGG_CAP\0"
    "DS4_SERVER_OUT_AGG_EVICT_MIN\0" "DS4_SERVER_CLIENT_SNDBUF\0" "DS4_CONT_GRACE_S\0" "DS4_CONT_TTL_S\0"
    "DS4_CONT_PIN_DEADLINE_S\0" "DS4_CONT_HOLD_SHED_S\0" "DS4_CONT_REGISTRY_MAX\0" "DS4_SERVER_DEFAULT_TEMP\0"
    "DS4_REASONING_EFFORT_NATIVE\0" "DS4_REASONING_REPLAY\0" "DS4_TOOL_CALL_REMINDER\0"
    "DS4_TOOL_CALL_REMINDER_MIN_BYTES\0" "DS4_TOOL_SLIP_RESAMPLE\0" "DS4_TOOL_SLIP_DUMP_DIR\0"
    "DS4_SERVER_CONT_ANTHROPIC\0" "DS4_SERVER_CONT_RESPONSES\0" "DS4_SERVER_CONT_TOOLS_ANTHROPIC\0"
    "DS4_SERVER_CONT_TOOLS_RESPONSES\0" "DS4_CONT_MTP_MODE\0" "DS4_CONT_DSPARK\0" "DS4_DSPARK_MAX_NLIVE\0"
    "DS4_DSPARK_MAX_KV\0" "DS4_DSPARK_QUENCH\0" "DS4_DSPARK_QUENCH_FORCE_STEP\0" "DS4_DSPARK_VERIFY_DEPTH\0"
    "DS4_DSPARK_ADAPT_GATE\0" "DS4_DSPARK_ADAPT_DEPTH\0" "DS4_DSPARK_SHADOW_GUARD\0" "DS4_DSPARK_SHADOW_ALPHA\0"
    "DS4_DSPARK_SHADOW_MINEV\0" "DS4_DSPARK_SHADOW_BUDGET\0" "DS4_DSPARK_SHADOW_CREDIT_CAP\0" "DS4_DSPARK_TRACE\0"
    "DS4_DSPARK_PROFILE\0" "DS4_MTP_ACCEPT_GUARD\0" "DS4_MTP_SPEC_DISABLE\0" "DS4_CUDA_WEIGHT_IPC_MANIFEST\0"
    "DS4_WEIGHT_FP_CHECK\0" "DS4_CUDA_VMM_ARENA\0" "DS4_CUDA_VMM_ARENA_CHUNK_MB\0" "DS4_CUDA_PREFILL_PATH\0"
    "DS4_CUDA_USE_MMQ\0" "DS4_CUDA_LAYER_GRAPHS\0" "DS4_CUDA_MOE_GRAPHS\0" "DS4_CUDA_MMQ_MOE_MIN_TOKENS\0"
    "DS4_CONT_MTP_GATE\0" "DS4_CONT_WARM_GATE\0";

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
