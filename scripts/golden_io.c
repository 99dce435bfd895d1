// Logs what a process writes and syncs, below the package and whatever its engine is called: preload it, and name a
// directory in GOLDEN_IO_LOG. One line an event, whole because the file is opened to append:
//
//   W path offset bytes hash     pwrite, pwritev: what was written, as FNV-1a of 64 bits
//   P path offset bytes          a punched hole
//   S path                       fdatasync, fsync
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <linux/falloc.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/uio.h>
#include <unistd.h>

static void record(char event, int fd, long long offset, long long bytes, uint64_t hash) {
    const char* directory = getenv("GOLDEN_IO_LOG");
    char link[64], path[3072], line[4096];
    if (directory == NULL) return;
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, path, sizeof path - 1);
    if (length < 0) return;
    path[length] = 0;
    int n = snprintf(line, sizeof line, "%c\t%s\t%lld\t%lld\t%016llx\n", event, path, offset, bytes,
                     (unsigned long long)hash);
    snprintf(path, sizeof path, "%s/%d", directory, getpid());
    int log = open(path, O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0644);
    if (log < 0 || write(log, line, n) != n) abort();
    close(log);
}

static uint64_t fnv(uint64_t hash, const unsigned char* bytes, size_t n) {
    for (size_t i = 0; i < n; i++) hash = (hash ^ bytes[i]) * 1099511628211u;
    return hash;
}

#define BASIS 14695981039346656037u
#define REAL(name) (typeof(&name))dlsym(RTLD_NEXT, #name)

#define PWRITE(name)                                                                 \
    ssize_t name(int fd, const void* data, size_t n, off64_t offset) {               \
        ssize_t done = (REAL(name))(fd, data, n, offset);                            \
        if (done > 0) record('W', fd, offset, done, fnv(BASIS, data, done));         \
        return done;                                                                 \
    }
#define PWRITEV(name)                                                                \
    ssize_t name(int fd, const struct iovec* parts, int count, off64_t offset) {     \
        ssize_t done = (REAL(name))(fd, parts, count, offset), left = done;          \
        uint64_t hash = BASIS;                                                       \
        for (int i = 0; i < count && left > 0; left -= parts[i++].iov_len)           \
            hash = fnv(hash, parts[i].iov_base,                                      \
                       parts[i].iov_len < (size_t)left ? parts[i].iov_len : (size_t)left); \
        if (done > 0) record('W', fd, offset, done, hash);                           \
        return done;                                                                 \
    }
#define SYNC(name)                                                                   \
    int name(int fd) {                                                               \
        int result = (REAL(name))(fd);                                               \
        if (result == 0) record('S', fd, 0, 0, 0);                                   \
        return result;                                                               \
    }
#define FALLOCATE(name)                                                              \
    int name(int fd, int mode, off64_t offset, off64_t n) {                          \
        int result = (REAL(name))(fd, mode, offset, n);                              \
        if (result == 0 && (mode & FALLOC_FL_PUNCH_HOLE)) record('P', fd, offset, n, 0); \
        return result;                                                               \
    }

PWRITE(pwrite)
PWRITE(pwrite64)
PWRITEV(pwritev)
PWRITEV(pwritev64)
SYNC(fsync)
SYNC(fdatasync)
FALLOCATE(fallocate)
FALLOCATE(fallocate64)
