/* Put before libc (LD_PRELOAD): calls on files fail with EIO while the file $FAILING_CALLS names them. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static int named(const char *call) {
    char text[64] = "";
    int before = errno, handle = open(getenv("FAILING_CALLS"), O_RDONLY);
    if (handle >= 0) {
        ssize_t length = read(handle, text, sizeof text - 1);
        (void)length;
        close(handle);
    }
    errno = before;
    return strstr(text, call) != NULL;
}

static int is_file(int handle) {
    struct stat about;
    return fstat(handle, &about) == 0 && S_ISREG(about.st_mode);
}

#define FAILING(type, name, parameters, arguments, fails) \
    type name parameters {                                \
        type(*real) parameters = dlsym(RTLD_NEXT, #name); \
        if (fails) {                                      \
            errno = EIO;                                  \
            return -1;                                    \
        }                                                 \
        return real arguments;                            \
    }

FAILING(int, fsync, (int h), (h), named("fsync"))
FAILING(int, fdatasync, (int h), (h), named("fsync"))
FAILING(ssize_t, write, (int h, const void *b, size_t n), (h, b, n), is_file(h) && named("write"))
FAILING(ssize_t, pwrite, (int h, const void *b, size_t n, off_t o), (h, b, n, o), named("write"))
FAILING(ssize_t, pwrite64, (int h, const void *b, size_t n, off64_t o), (h, b, n, o), named("write"))
FAILING(int, rename, (const char *from, const char *to), (from, to), named("rename"))
