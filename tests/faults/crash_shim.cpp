// Preloaded into a training process (LD_PRELOAD). It counts the I/O operations on files below one folder. At the k-th
// operation the process is killed (SIGKILL, as if the machine were lost), or the disk fails (an errno). These variables
// are read from the environment at the first operation of each process:
//
//   CRASH_FOLDER   absolute path of the folder, without a slash at its end; operations elsewhere are not counted
//   CRASH_RANK     only the process with this RANK is killed or fails; by default all processes do
//   CRASH_AT       k, from 1; 0: never
//   CRASH_ERRNO    from the k-th operation on, fail with this errno instead of killing the process
//   CRASH_FAILING  comma-separated operations that fail; by default all do
//   CRASH_LOG      file to which every process appends a line before each operation, with these fields between tabs:
//                  number of the operation in its process, process, thread, operation, size, path, source of a rename
//                  or target of a link. The size is the length of a file that is flushed, else -1. After an fsync has
//                  succeeded, its line is appended again, with the operation "flushed".
//   CRASH_TRASH    folder on the same file system: a file that is deleted or replaced stays there as PROCESS-NUMBER
//
// From the log and the deleted files, `disk.py` computes what is on the disk if the machine is lost at that moment.
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
std::string folder, log_path, trash, failing;
pid_t known_pid = 0;
int crash_at = 0, crash_errno = 0;

void configure() {
  if (known_pid == getpid()) return;  // a forked process has another environment
  known_pid = getpid();
  auto value = [](const char *name) { return getenv(name) ? getenv(name) : ""; };
  const char *rank = getenv("RANK"), *wanted = getenv("CRASH_RANK");
  folder = value("CRASH_FOLDER");
  log_path = value("CRASH_LOG");
  trash = value("CRASH_TRASH");
  failing = *value("CRASH_FAILING") ? std::string(",") + value("CRASH_FAILING") + "," : "";
  crash_at = !wanted || !rank || !strcmp(wanted, rank) ? atoi(value("CRASH_AT")) : 0;
  crash_errno = atoi(value("CRASH_ERRNO"));
  operations = 0;
}

std::string absolute(const char *path) {
  if (!path || !*path) return "";
  char here[PATH_MAX];
  std::string full = path[0] != '/' && getcwd(here, sizeof here) ? std::string(here) + "/" + path : path;
  size_t slash = full.rfind('/');
  if (slash && realpath(full.substr(0, slash).c_str(), here)) full = here + full.substr(slash);  // through links
  return full;
}

bool is_below(const std::string &path) {
  configure();
  return !folder.empty() && !path.compare(0, folder.size(), folder) &&
         (path.size() == folder.size() || path[folder.size()] == '/');
}

// Keeps the file that an operation deletes or replaces.
void keep(const std::string &path, int number) {
  if (trash.empty()) return;
  std::string kept = trash + "/" + std::to_string(getpid()) + "-" + std::to_string(number);
  syscall(SYS_linkat, AT_FDCWD, path.c_str(), AT_FDCWD, kept.c_str(), 0);  // it fails for a folder, which is right
}

void append(int number, const char *operation, long long size, const std::string &path, const std::string &other) {
  if (log_path.empty()) return;
  std::string line = std::to_string(number) + "\t" + std::to_string(getpid()) + "\t" +
                     std::to_string(syscall(SYS_gettid)) + "\t" + operation + "\t" + std::to_string(size) + "\t" +
                     path + "\t" + other + "\n";
  int out = syscall(SYS_openat, AT_FDCWD, log_path.c_str(), O_WRONLY | O_CREAT | O_APPEND, 0644);
  if (out < 0) return;
  syscall(SYS_write, out, line.data(), line.size());
  syscall(SYS_close, out);
}

// Counts one operation. Returns true if it must fail with the errno that has been set.
bool must_fail(const char *operation, const std::string &path, long long size = -1, const std::string &other = "") {
  int number = ++operations;
  append(number, operation, size, path, other);
  if (!strcmp(operation, "unlink") || !strcmp(operation, "rename")) keep(path, number);
  if (!crash_at || number < crash_at) return false;
  if (!crash_errno) kill(getpid(), SIGKILL);
  errno = crash_errno;
  return failing.empty() || failing.find(std::string(",") + operation + ",") != std::string::npos;
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

// The absolute path of a name relative to an open folder, "" if the folder is not below ours.
std::string path_at(int at, const char *path) {
  if (at == AT_FDCWD || (path && path[0] == '/')) return absolute(path);
  return known(at) ? *paths[at] + "/" + path : "";
}

template <typename Open>
int opened(const char *path, int flags, Open open) {
  if ((flags & O_TMPFILE) == O_TMPFILE) return open();  // the file has no name
  std::string full = absolute(path);
  bool writes = (flags & (O_WRONLY | O_RDWR | O_CREAT)) && is_below(full);
  bool is_folder = !writes && is_below(full);  // opened read-only: counted when it is flushed
  if (writes && must_fail(flags & O_CREAT ? "create" : "open", full)) return -1;
  int descriptor = open();
  if (writes || is_folder) remember(descriptor, full);
  return descriptor;
}

template <typename Open>
FILE *opened_stream(const char *path, const char *mode, Open open) {
  std::string full = absolute(path);
  bool writes = strpbrk(mode, "wa+") && is_below(full);
  if (writes && must_fail(strpbrk(mode, "wa") ? "create" : "open", full)) return nullptr;
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
    std::string full = path_at(at, path);                                                     \
    return opened(full.c_str(), flags, [&] { return real(at, path, flags, mode); });          \
  }
#define FOPEN(name)                                                                           \
  FILE *name(const char *path, const char *mode) {                                            \
    static auto real = next<FILE *(*)(const char *, const char *)>(#name);                    \
    return opened_stream(path, mode, [&] { return real(path, mode); });                       \
  }
#define ON_DESCRIPTOR(type, name, operation, parameters, arguments)                                \
  type name parameters {                                                                      \
    static auto real = next<type(*) parameters>(#name);                                       \
    if (known(fd) && is_below(*paths[fd]) && must_fail(operation, *paths[fd])) return -1;        \
    return real arguments;                                                                    \
  }
#define FSYNC(name)                                                                           \
  int name(int fd) {                                                                          \
    static auto real = next<int (*)(int)>(#name);                                             \
    if (!known(fd) || !is_below(*paths[fd])) return real(fd);                                 \
    struct stat status;                                                                       \
    long long size = fstat(fd, &status) ? -1 : status.st_size;                                \
    if (must_fail("fsync", *paths[fd], size)) return -1;                                      \
    int result = real(fd);                                                                    \
    if (!result) append(operations, "flushed", size, *paths[fd], "");                         \
    return result;                                                                            \
  }
#define ON_PATH(name, operation, parameters, arguments, path, other)                                \
  int name parameters {                                                                       \
    static auto real = next<int(*) parameters>(#name);                                        \
    std::string full = absolute(path);                                                        \
    if (is_below(full) && must_fail(operation, full, -1, other)) return -1;                          \
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
FSYNC(fsync)
FSYNC(fdatasync)
ON_DESCRIPTOR(int, ftruncate, "truncate", (int fd, off_t length), (fd, length))
ON_DESCRIPTOR(int, ftruncate64, "truncate", (int fd, off64_t length), (fd, length))
ON_PATH(rename, "rename", (const char *from, const char *to), (from, to), to, absolute(from))
ON_PATH(symlink, "symlink", (const char *from, const char *to), (from, to), to, from)
ON_PATH(unlink, "unlink", (const char *path), (path), path, "")
ON_PATH(rmdir, "rmdir", (const char *path), (path), path, "")
ON_PATH(mkdir, "mkdir", (const char *path, mode_t mode), (path, mode), path, "")

int unlinkat(int at, const char *path, int flags) {  // shutil.rmtree uses names relative to an open folder
  static auto real = next<int (*)(int, const char *, int)>("unlinkat");
  std::string full = path_at(at, path);
  bool exists = !faccessat(at, path, F_OK, AT_SYMLINK_NOFOLLOW);
  if (exists && is_below(full) && must_fail(flags & AT_REMOVEDIR ? "rmdir" : "unlink", full)) return -1;
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
