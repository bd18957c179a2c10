/* Preloaded into a process and all that it starts: makes the n-th change of a file below one folder fail, or right
   before it kills or stops the process, sets the clock of all processes, or moves a folder. The folder, n and the error
   stand in a shared page (tests/faults/failing_disk.py), which also counts the changes of all processes. A log, if one
   is named there, gets each change with Python's stack. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/sendfile.h>
#include <sys/stat.h>
#include <sys/time.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

enum { KILL = 0, STOP = -1, SET_CLOCK = -2, MOVE = -3 }; /* what happens in place of an error */

struct control {
    unsigned long long count, number; /* changes so far; the one that fails, 0 for none */
    int error;                        /* of errno.h, or one of the above */
    int done;                         /* set by the process that it happened to */
    int lasting;                      /* all after the n-th fail, too */
    long long jump, clock;            /* seconds by which SET_CLOCK sets the clock, and by which it is set */
    char root[1024], what[1024], log[1024], from[1024], to[1024]; /* MOVE renames `from` to `to` */
};

static struct control *page;

__attribute__((constructor)) static void attach(void) {
    const char *path = getenv("FAILING_DISK");
    int file = path ? open(path, O_RDWR | O_CLOEXEC) : -1;
    if (file < 0) return;
    void *found = mmap(NULL, sizeof *page, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    close(file);
    if (found != MAP_FAILED) page = found;
}

#define REAL(name) ((__typeof__(&name))real(#name))

static void *real(const char *name) { return dlsym(RTLD_NEXT, name); }

/* The call, and from which lines of Python it came: both functions are made to be called without the interpreter's lock. */
static void note(unsigned long long number, const char *call, const char *path) {
    void *(*thread)(void) = real("PyGILState_GetThisThreadState"), *state;
    void (*dump)(int, void *) = real("_Py_DumpTraceback");
    int before = errno, log = open(page->log, O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0600);
    if (log < 0) return;
    flock(log, LOCK_EX);
    dprintf(log, "%llu %s %s\n", number, call, path);
    if (thread && dump && (state = thread())) dump(log, state);
    close(log);
    errno = before;
}

static int fails_at(const char *call, const char *path) {
    if (strncmp(path, page->root, strlen(page->root))) return 0;
    unsigned long long number = __atomic_add_fetch(&page->count, 1, __ATOMIC_SEQ_CST);
    if (page->log[0]) note(number, call, path);
    if (page->lasting ? number < page->number : number != page->number) return 0;
    snprintf(page->what, sizeof page->what, "%s %s", call, path);
    page->done = getpid();
    if (page->error == KILL || page->error == STOP) kill(getpid(), page->error == KILL ? SIGKILL : SIGSTOP);
    if (page->error == SET_CLOCK) page->clock = page->jump;
    if (page->error == MOVE) ((int (*)(const char *, const char *))real("rename"))(page->from, page->to);
    errno = page->error;
    return page->error > 0;
}

static int on_path(const char *call, int folder, const char *path) {
    char full[4096] = "", link[64];
    if (!page || !page->root[0] || !path) return 0;
    if (path[0] != '/') {
        if (folder == AT_FDCWD) strcpy(link, "/proc/self/cwd");
        else snprintf(link, sizeof link, "/proc/self/fd/%d", folder);
        ssize_t length = readlink(link, full, 2000);
        if (length < 0) return 0;
        full[length] = '/';
        full[length + 1] = 0;
    }
    if (strlen(path) > 2000) return 0;
    strcat(full, path);
    return fails_at(call, full);
}

static int on_file(const char *call, int file) {
    char link[64], full[4096];
    if (!page || !page->root[0]) return 0;
    snprintf(link, sizeof link, "/proc/self/fd/%d", file);
    ssize_t length = readlink(link, full, sizeof full - 1);
    if (length < 0) return 0;
    full[length] = 0;
    return fails_at(call, full);
}

static int writes(int flags) { return flags & (O_CREAT | O_TRUNC | O_WRONLY | O_RDWR); }

#define OPEN(name)                                                                                                     \
    int name(const char *path, int flags, ...) {                                                                       \
        va_list rest;                                                                                                  \
        va_start(rest, flags);                                                                                         \
        mode_t mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(rest, mode_t) : 0;                                        \
        va_end(rest);                                                                                                  \
        if (writes(flags) && on_path("open", AT_FDCWD, path)) return -1;                                               \
        return REAL(name)(path, flags, mode);                                                                          \
    }
OPEN(open)
OPEN(open64)

#define OPENAT(name)                                                                                                   \
    int name(int folder, const char *path, int flags, ...) {                                                           \
        va_list rest;                                                                                                  \
        va_start(rest, flags);                                                                                         \
        mode_t mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(rest, mode_t) : 0;                                        \
        va_end(rest);                                                                                                  \
        if (writes(flags) && on_path("open", folder, path)) return -1;                                                 \
        return REAL(name)(folder, path, flags, mode);                                                                  \
    }
OPENAT(openat)
OPENAT(openat64)

#define FOPEN(name)                                                                                                    \
    FILE *name(const char *path, const char *mode) {                                                                   \
        if (strpbrk(mode, "wa+") && on_path("open", AT_FDCWD, path)) return NULL;                                      \
        return REAL(name)(path, mode);                                                                                 \
    }
FOPEN(fopen)
FOPEN(fopen64)

#define ON_FILE(type, name, parameters, arguments)                                                                     \
    type name parameters {                                                                                             \
        if (on_file(#name, file)) return -1;                                                                           \
        return REAL(name) arguments;                                                                                   \
    }
ON_FILE(ssize_t, write, (int file, const void *bytes, size_t count), (file, bytes, count))
ON_FILE(ssize_t, writev, (int file, const struct iovec *parts, int count), (file, parts, count))
ON_FILE(ssize_t, pwrite, (int file, const void *bytes, size_t count, off_t at), (file, bytes, count, at))
ON_FILE(ssize_t, pwrite64, (int file, const void *bytes, size_t count, off64_t at), (file, bytes, count, at))
ON_FILE(int, ftruncate, (int file, off_t size), (file, size))
ON_FILE(int, ftruncate64, (int file, off64_t size), (file, size))
ON_FILE(int, fsync, (int file), (file))
ON_FILE(int, fdatasync, (int file), (file))
ON_FILE(ssize_t, sendfile, (int file, int from, off_t *at, size_t count), (file, from, at, count))
ON_FILE(ssize_t, sendfile64, (int file, int from, off64_t *at, size_t count), (file, from, at, count))

#define ON_PATH(name, parameters, folder, path, arguments)                                                             \
    int name parameters {                                                                                              \
        if (on_path(#name, folder, path)) return -1;                                                                   \
        return REAL(name) arguments;                                                                                   \
    }
ON_PATH(mkdir, (const char *path, mode_t mode), AT_FDCWD, path, (path, mode))
ON_PATH(mkdirat, (int folder, const char *path, mode_t mode), folder, path, (folder, path, mode))
ON_PATH(rename, (const char *path, const char *to), AT_FDCWD, to, (path, to))
ON_PATH(renameat, (int from, const char *path, int folder, const char *to), folder, to, (from, path, folder, to))
ON_PATH(unlink, (const char *path), AT_FDCWD, path, (path))
ON_PATH(unlinkat, (int folder, const char *path, int flags), folder, path, (folder, path, flags))
ON_PATH(rmdir, (const char *path), AT_FDCWD, path, (path))
ON_PATH(link, (const char *path, const char *to), AT_FDCWD, to, (path, to))
ON_PATH(linkat, (int from, const char *path, int folder, const char *to, int flags), folder, to,
        (from, path, folder, to, flags))
ON_PATH(symlink, (const char *to, const char *path), AT_FDCWD, path, (to, path))

/* Called for every look at a clock, so the address is looked up once. */
int clock_gettime(clockid_t clock, struct timespec *now) {
    static int (*found)(clockid_t, struct timespec *);
    if (!found) found = real("clock_gettime");
    int failed = found(clock, now);
    if (page && !failed && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) now->tv_sec += page->clock;
    return failed;
}

time_t time(time_t *now) {
    struct timespec read;
    clock_gettime(CLOCK_REALTIME, &read);
    if (now) *now = read.tv_sec;
    return read.tv_sec;
}

int gettimeofday(struct timeval *now, void *zone) {
    (void)zone;
    struct timespec read;
    clock_gettime(CLOCK_REALTIME, &read);
    now->tv_sec = read.tv_sec;
    now->tv_usec = read.tv_nsec / 1000;
    return 0;
}
