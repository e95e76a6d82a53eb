// Preloaded into a training process (LD_PRELOAD). It counts the I/O operations on files below one folder. At the k-th
// operation the process is killed (SIGKILL, as if the machine were lost), or the disk fails (an errno). These variables
// are read from the environment at the first operation of each process:
//
//   CRASH_FOLDER  absolute path of the folder; operations elsewhere are not counted
//   CRASH_RANK    only the process with this RANK counts; by default all processes do
//   CRASH_AT      k, from 1; 0: never
//   CRASH_ERRNO   from the k-th operation on, fail with this errno instead of killing the process
//   CRASH_LOG     file to which a line "k operation size path" is appended before each operation; size is the length
//                 of a file that is flushed, else -1
//
// The tests read the log to determine which data had been flushed to the disk at that moment.
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#include <atomic>
#include <string>

namespace {
constexpr int kDescriptors = 65536;
std::string *paths[kDescriptors];  // paths of the files below the folder that are open for writing
std::atomic<int> operations{0};
std::string folder, log_path;
pid_t known_pid = 0;
int crash_at = 0, crash_errno = 0;
bool counts = false;

void configure() {
  if (known_pid == getpid()) return;  // a forked process has another environment
  known_pid = getpid();
  const char *name = getenv("CRASH_FOLDER");
  const char *rank = getenv("RANK"), *wanted = getenv("CRASH_RANK");
  counts = name && (!wanted || !rank || !strcmp(wanted, rank));
  folder = name ? name : "";
  log_path = getenv("CRASH_LOG") ? getenv("CRASH_LOG") : "";
  crash_at = getenv("CRASH_AT") ? atoi(getenv("CRASH_AT")) : 0;
  crash_errno = getenv("CRASH_ERRNO") ? atoi(getenv("CRASH_ERRNO")) : 0;
  operations = 0;
}

std::string absolute(const char *path) {
  if (!path) return "";
  char here[PATH_MAX];
  std::string full = path[0] != '/' && getcwd(here, sizeof here) ? std::string(here) + "/" + path : path;
  size_t slash = full.rfind('/');
  if (slash && realpath(full.substr(0, slash).c_str(), here)) full = here + full.substr(slash);  // through links
  return full;
}

bool is_below(const std::string &path) {
  configure();
  return counts && path.compare(0, folder.size(), folder) == 0;
}

// Counts one operation. Returns true if it must fail with the errno that has been set.
bool must_fail(const char *operation, const std::string &path, int fd = -1) {
  int number = ++operations;
  if (!log_path.empty()) {
    struct stat status;
    long long size = fd >= 0 && !strcmp(operation, "fsync") && !fstat(fd, &status) ? status.st_size : -1;
    std::string line = std::to_string(number) + " " + operation + " " + std::to_string(size) + " " + path + "\n";
    int out = syscall(SYS_openat, AT_FDCWD, log_path.c_str(), O_WRONLY | O_CREAT | O_APPEND, 0644);
    if (out >= 0) {
      syscall(SYS_write, out, line.data(), line.size());
      syscall(SYS_close, out);
    }
  }
  if (!crash_at || number < crash_at) return false;
  if (!crash_errno) kill(getpid(), SIGKILL);
  errno = crash_errno;
  return strcmp(operation, "unlink") && strcmp(operation, "rmdir");  // files can be deleted on a full disk
}

template <typename Function>
Function next(const char *name) {
  return reinterpret_cast<Function>(dlsym(RTLD_NEXT, name));
}

void remember(int descriptor, const std::string &path) {
  if (descriptor >= 0 && descriptor < kDescriptors) {
    delete paths[descriptor];
    paths[descriptor] = new std::string(path);
  }
}

bool known(int descriptor) { return descriptor >= 0 && descriptor < kDescriptors && paths[descriptor]; }

template <typename Open>
int opened(const char *path, int flags, Open open) {
  std::string full = absolute(path);
  bool writes = (flags & (O_WRONLY | O_RDWR | O_CREAT)) && is_below(full);
  bool is_folder = !writes && is_below(full);  // opened read-only: counted when it is flushed
  if (writes && must_fail("open", full)) return -1;
  int descriptor = open();
  if (writes || is_folder) remember(descriptor, full);
  return descriptor;
}

template <typename Open>
FILE *opened_stream(const char *path, const char *mode, Open open) {
  std::string full = absolute(path);
  bool writes = strpbrk(mode, "wa+") && is_below(full);
  if (writes && must_fail("open", full)) return nullptr;
  FILE *stream = open();
  if (writes && stream) remember(fileno(stream), full);
  return stream;
}
}  // namespace

#define MODE_OF(flags)                         \
  mode_t mode = 0;                             \
  if ((flags) & (O_CREAT | O_TMPFILE)) {       \
    va_list rest;                              \
    va_start(rest, flags);                     \
    mode = va_arg(rest, mode_t);               \
    va_end(rest);                              \
  }
#define OPEN(name)                                                                            \
  int name(const char *path, int flags, ...) {                                                \
    MODE_OF(flags)                                                                            \
    static auto real = next<int (*)(const char *, int, ...)>(#name);                          \
    return opened(path, flags, [&] { return real(path, flags, mode); });                      \
  }
#define OPENAT(name)                                                                          \
  int name(int at, const char *path, int flags, ...) {                                        \
    MODE_OF(flags)                                                                            \
    static auto real = next<int (*)(int, const char *, int, ...)>(#name);                     \
    return opened(at == AT_FDCWD ? path : nullptr, flags, [&] { return real(at, path, flags, mode); }); \
  }
#define FOPEN(name)                                                                           \
  FILE *name(const char *path, const char *mode) {                                            \
    static auto real = next<FILE *(*)(const char *, const char *)>(#name);                    \
    return opened_stream(path, mode, [&] { return real(path, mode); });                       \
  }
#define ON_DESCRIPTOR(type, name, operation, parameters, arguments)                                \
  type name parameters {                                                                      \
    static auto real = next<type(*) parameters>(#name);                                       \
    if (known(fd) && is_below(*paths[fd]) && must_fail(operation, *paths[fd], fd)) return -1;        \
    return real arguments;                                                                    \
  }
#define ON_PATH(name, operation, parameters, arguments, path)                                      \
  int name parameters {                                                                       \
    static auto real = next<int(*) parameters>(#name);                                        \
    std::string full = absolute(path);                                                        \
    if (is_below(full) && must_fail(operation, full)) return -1;                                     \
    return real arguments;                                                                    \
  }

extern "C" {
OPEN(open)
OPEN(open64)
OPENAT(openat)
OPENAT(openat64)
FOPEN(fopen)
FOPEN(fopen64)
ON_DESCRIPTOR(ssize_t, write, "write", (int fd, const void *data, size_t size), (fd, data, size))
ON_DESCRIPTOR(ssize_t, pwrite, "write", (int fd, const void *data, size_t size, off_t at), (fd, data, size, at))
ON_DESCRIPTOR(ssize_t, pwrite64, "write", (int fd, const void *data, size_t size, off64_t at), (fd, data, size, at))
ON_DESCRIPTOR(ssize_t, writev, "write", (int fd, const struct iovec *parts, int count), (fd, parts, count))
ON_DESCRIPTOR(int, fsync, "fsync", (int fd), (fd))
ON_DESCRIPTOR(int, fdatasync, "fsync", (int fd), (fd))
ON_DESCRIPTOR(int, ftruncate, "truncate", (int fd, off_t length), (fd, length))
ON_DESCRIPTOR(int, ftruncate64, "truncate", (int fd, off64_t length), (fd, length))
ON_PATH(rename, "rename", (const char *from, const char *to), (from, to), to)
ON_PATH(symlink, "symlink", (const char *from, const char *to), (from, to), to)
ON_PATH(unlink, "unlink", (const char *path), (path), path)
ON_PATH(rmdir, "rmdir", (const char *path), (path), path)
ON_PATH(mkdir, "mkdir", (const char *path, mode_t mode), (path, mode), path)

int unlinkat(int at, const char *path, int flags) {  // shutil.rmtree uses names relative to an open folder
  static auto real = next<int (*)(int, const char *, int)>("unlinkat");
  std::string full = at == AT_FDCWD ? absolute(path) : known(at) ? *paths[at] + "/" + path : "";
  if (is_below(full)) must_fail(flags & AT_REMOVEDIR ? "rmdir" : "unlink", full);
  return real(at, path, flags);
}

int close(int fd) {
  static auto real = next<int (*)(int)>("close");
  if (known(fd)) {
    delete paths[fd];
    paths[fd] = nullptr;
  }
  return real(fd);
}
}
