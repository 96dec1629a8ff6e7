/* nsenter --mount=FILE -- PROGRAM ...: for hosts under emulation, where the real one cannot work: an emulated process has
   a second thread, and no process with threads may change its mount namespace. Compiled static for this machine. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <sched.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

int main(int argc, char **argv) {
    if (argc < 4 || strncmp(argv[1], "--mount=", 8) || strcmp(argv[2], "--")) {
        fprintf(stderr, "nsenter: this one knows only --mount=FILE -- PROGRAM\n");
        return 1;
    }
    int file = open(argv[1] + 8, O_RDONLY | O_CLOEXEC);
    if (file < 0 || setns(file, CLONE_NEWNS) < 0) {
        perror("nsenter");
        return 1;
    }
    execvp(argv[3], argv + 3);
    perror(argv[3]);
    return 127;
}
