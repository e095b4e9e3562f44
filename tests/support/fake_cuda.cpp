// A *fake* libcuda for tests on machines without a GPU: device memory is memory of this process (memfd), mapped at the very addresses that
// the driver would give. It checks what the driver checks, counts calls, and fails where a test says so. Streams do at once what they are
// told. None of NVIDIA's code is in it.
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <condition_variable>
#include <cstdint>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <string>

namespace {

constexpr int INVALID_VALUE = 1, OUT_OF_MEMORY = 2, ILLEGAL_ADDRESS = 700, CAPTURE_UNSUPPORTED = 900;
constexpr std::size_t GRANULE = 2 << 20;

struct Memory {
    int fd;
    std::size_t bytes;
    bool imported;
    Memory(int fd, std::size_t bytes, bool imported) : fd(fd), bytes(bytes), imported(imported) {}
    Memory(const Memory &) = delete;
    ~Memory();
};

struct Mapping {
    std::size_t bytes;
    std::shared_ptr<Memory> memory;
    bool accessible;
};

struct Failure {
    std::uint64_t after;
    int code;
};

std::recursive_mutex lock;
std::size_t total_bytes = std::size_t(4) << 30, used_bytes = 0;
std::uint64_t next_handle = 1;
std::map<std::uint64_t, std::size_t> reserved;
std::map<std::uint64_t, std::shared_ptr<Memory>> handles;
std::map<std::uint64_t, Mapping> mappings;
std::map<std::uint64_t, std::size_t> registered;
std::map<std::string, std::uint64_t> calls;
std::map<std::string, Failure> failures;
bool capturing = false, capture_spoilt = false;
int faulted = 0;  // a kernel touched what is not there: the context answers nothing else any more
std::mutex events_lock;
std::condition_variable events_changed;
bool events_held = false;

Memory::~Memory() {
    close(fd);
    if (!imported) used_bytes -= bytes;
}

int entered(const char *name) {
    std::uint64_t count = ++calls[name];
    auto failure = failures.find(name);
    if (failure == failures.end() || count < failure->second.after) return 0;
    int code = failure->second.code;
    failures.erase(failure);
    return code;
}

#define ENTER(name)                  \
    std::lock_guard guard(lock);     \
    if (int code = entered(name)) return code

bool within_reserved(std::uint64_t address, std::size_t bytes) {
    auto range = reserved.upper_bound(address);
    return range != reserved.begin() && (--range, address + bytes <= range->first + range->second);
}

bool overlaps(std::uint64_t address, std::size_t bytes) {
    auto next = mappings.lower_bound(address);
    if (next != mappings.end() && next->first < address + bytes) return true;
    return next != mappings.begin() && (--next, next->first + next->second.bytes > address);
}

// Whether [address, address + bytes) is made of whole mappings without a gap.
bool whole_mappings(std::uint64_t address, std::size_t bytes) {
    std::uint64_t at = address;
    while (at < address + bytes) {
        auto mapping = mappings.find(at);
        if (mapping == mappings.end()) return false;
        at += mapping->second.bytes;
    }
    return at == address + bytes;
}

}  // namespace

extern "C" {

// For the parts of the fake in other files.
int fake_entered(const char *name) {
    std::lock_guard guard(lock);
    return faulted ? faulted : entered(name);
}
int fake_backed(std::uint64_t address, std::size_t bytes) {
    std::lock_guard guard(lock);
    auto mapping = mappings.upper_bound(address);
    if (mapping == mappings.begin()) return 0;
    --mapping;
    return mapping->second.accessible && address + bytes <= mapping->first + mapping->second.bytes;
}
void fake_fault() { faulted = ILLEGAL_ADDRESS; }
void *fake_context() { return &total_bytes; }

// What tests say and ask.
void fake_set_memory(std::uint64_t bytes) { total_bytes = bytes; }
std::uint64_t fake_used() { return used_bytes; }
std::uint64_t fake_mappings() { return mappings.size(); }
std::uint64_t fake_reserved() { return reserved.size(); }
std::uint64_t fake_registered() { return registered.size(); }
std::uint64_t fake_calls(const char *name) { return calls[name]; }
void fake_fail(const char *name, std::uint64_t in_calls, int code) { failures[name] = {calls[name] + in_calls, code}; }
void fake_forgive() { failures.clear(), faulted = 0; }
void fake_capture(int on) { capturing = on, capture_spoilt = false; }
int fake_capture_spoilt() { return capture_spoilt; }
void fake_hold_events(int on) {
    std::lock_guard guard(events_lock);
    events_held = on;
    events_changed.notify_all();
}

int cuInit(unsigned) {
    ENTER("cuInit");
    return 0;
}
int cuGetErrorName(int code, const char **name) {
    *name = code == OUT_OF_MEMORY ? "CUDA_ERROR_OUT_OF_MEMORY" : code == INVALID_VALUE ? "CUDA_ERROR_INVALID_VALUE" : "CUDA_ERROR_OTHER";
    return 0;
}
int cuGetErrorString(int, const char **text) {
    *text = "said by the fake";
    return 0;
}
int cuDeviceGet(int *device, int ordinal) {
    ENTER("cuDeviceGet");
    if (ordinal) return 101;
    *device = 0;
    return 0;
}
int cuDeviceGetAttribute(int *value, int, int) {
    *value = 1;
    return 0;
}
int cuDevicePrimaryCtxRetain(void **context, int) {
    ENTER("cuDevicePrimaryCtxRetain");
    *context = &total_bytes;
    return 0;
}
int cuCtxSetCurrent(void *) { return 0; }
int cuCtxSynchronize() {
    ENTER("cuCtxSynchronize");
    capture_spoilt |= capturing;
    return capturing ? CAPTURE_UNSUPPORTED : faulted;
}
int cuCtxGetStreamPriorityRange(int *least, int *greatest) {
    *least = 0;
    *greatest = -5;
    return 0;
}
int cuThreadExchangeStreamCaptureMode(int *) { return 0; }
int cuMemGetInfo_v2(std::size_t *free, std::size_t *total) {
    std::lock_guard guard(lock);
    *free = total_bytes - used_bytes;
    *total = total_bytes;
    return 0;
}
int cuMemGetAllocationGranularity(std::size_t *granule, const void *, int) {
    *granule = GRANULE;
    return 0;
}
int cuMemAddressReserve(std::uint64_t *address, std::size_t bytes, std::size_t, std::uint64_t hint, std::uint64_t) {
    ENTER("cuMemAddressReserve");
    if (bytes % GRANULE) return INVALID_VALUE;
    // Room to align: the system's own places are those of pages.
    void *got = mmap(reinterpret_cast<void *>(hint), bytes + (hint ? 0 : GRANULE), PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (got == MAP_FAILED) return OUT_OF_MEMORY;
    *address = (reinterpret_cast<std::uint64_t>(got) + (hint ? 0 : GRANULE - 1)) / (hint ? 1 : GRANULE) * (hint ? 1 : GRANULE);
    reserved[*address] = bytes;
    return 0;
}
int cuMemAddressFree(std::uint64_t address, std::size_t bytes) {
    ENTER("cuMemAddressFree");
    auto range = reserved.find(address);
    if (range == reserved.end() || range->second != bytes || overlaps(address, bytes)) return INVALID_VALUE;
    munmap(reinterpret_cast<void *>(address), bytes);
    reserved.erase(range);
    return 0;
}
int cuMemCreate(std::uint64_t *handle, std::size_t bytes, const void *, std::uint64_t) {
    ENTER("cuMemCreate");
    if (!bytes || bytes % GRANULE) return INVALID_VALUE;
    if (used_bytes + bytes > total_bytes) return OUT_OF_MEMORY;
    int fd = memfd_create("fake-device-memory", MFD_CLOEXEC);
    if (fd < 0 || ftruncate(fd, bytes)) return 999;
    used_bytes += bytes;
    handles[*handle = next_handle++] = std::make_shared<Memory>(fd, bytes, false);
    return 0;
}
int cuMemRelease(std::uint64_t handle) {
    ENTER("cuMemRelease");
    return handles.erase(handle) ? 0 : INVALID_VALUE;
}
int cuMemMap(std::uint64_t address, std::size_t bytes, std::size_t offset, std::uint64_t handle, std::uint64_t) {
    ENTER("cuMemMap");
    auto memory = handles.find(handle);
    if (offset || memory == handles.end() || memory->second->bytes != bytes || address % GRANULE || !within_reserved(address, bytes) ||
        overlaps(address, bytes))
        return INVALID_VALUE;
    void *wanted = reinterpret_cast<void *>(address);
    if (mmap(wanted, bytes, PROT_NONE, MAP_SHARED | MAP_FIXED, memory->second->fd, 0) != wanted) return 999;
    mappings[address] = {bytes, memory->second, false};
    return 0;
}
int cuMemUnmap(std::uint64_t address, std::size_t bytes) {
    ENTER("cuMemUnmap");
    if (!whole_mappings(address, bytes)) return INVALID_VALUE;
    for (std::uint64_t at = address; at < address + bytes;) {
        auto mapping = mappings.find(at);
        at += mapping->second.bytes;
        mappings.erase(mapping);
    }
    mmap(reinterpret_cast<void *>(address), bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
    return 0;
}
int cuMemSetAccess(std::uint64_t address, std::size_t bytes, const void *, std::size_t) {
    ENTER("cuMemSetAccess");
    if (!whole_mappings(address, bytes)) return INVALID_VALUE;
    for (std::uint64_t at = address; at < address + bytes; at += mappings[at].bytes) mappings[at].accessible = true;
    return mprotect(reinterpret_cast<void *>(address), bytes, PROT_READ | PROT_WRITE) ? 999 : 0;
}
int cuMemExportToShareableHandle(void *fd, std::uint64_t handle, int type, std::uint64_t) {
    ENTER("cuMemExportToShareableHandle");
    auto memory = handles.find(handle);
    if (type != 1 || memory == handles.end()) return INVALID_VALUE;
    *static_cast<int *>(fd) = fcntl(memory->second->fd, F_DUPFD_CLOEXEC, 0);
    return 0;
}
int cuMemImportFromShareableHandle(std::uint64_t *handle, void *fd, int type) {
    ENTER("cuMemImportFromShareableHandle");
    struct stat status {};
    int own = fcntl(static_cast<int>(reinterpret_cast<std::intptr_t>(fd)), F_DUPFD_CLOEXEC, 0);
    if (type != 1 || own < 0 || fstat(own, &status)) return INVALID_VALUE;
    handles[*handle = next_handle++] = std::make_shared<Memory>(own, static_cast<std::size_t>(status.st_size), true);
    return 0;
}
int cuMemcpyDtoD_v2(std::uint64_t to, std::uint64_t from, std::size_t bytes) {
    ENTER("cuMemcpyDtoD");
    std::memcpy(reinterpret_cast<void *>(to), reinterpret_cast<void *>(from), bytes);
    return 0;
}
int cuMemcpyDtoH_v2(void *to, std::uint64_t from, std::size_t bytes) {
    ENTER("cuMemcpyDtoH");
    std::memcpy(to, reinterpret_cast<void *>(from), bytes);
    return 0;
}
int cuMemcpyHtoD_v2(std::uint64_t to, const void *from, std::size_t bytes) {
    ENTER("cuMemcpyHtoD");
    std::memcpy(reinterpret_cast<void *>(to), from, bytes);
    return 0;
}
int cuMemcpyHtoDAsync_v2(std::uint64_t to, const void *from, std::size_t bytes, void *) {
    ENTER("cuMemcpyHtoDAsync");
    std::memcpy(reinterpret_cast<void *>(to), from, bytes);
    return 0;
}
int cuMemHostRegister_v2(void *address, std::size_t bytes, unsigned) {
    ENTER("cuMemHostRegister");
    registered[reinterpret_cast<std::uint64_t>(address)] = bytes;
    return 0;
}
int cuMemHostUnregister(void *address) {
    ENTER("cuMemHostUnregister");
    return registered.erase(reinterpret_cast<std::uint64_t>(address)) ? 0 : INVALID_VALUE;
}
int cuMemHostAlloc(void **address, std::size_t bytes, unsigned) {
    ENTER("cuMemHostAlloc");
    return posix_memalign(address, 4096, bytes) ? OUT_OF_MEMORY : 0;
}
int cuMemFreeHost(void *address) {
    free(address);
    return 0;
}
int cuStreamCreateWithPriority(void **stream, unsigned, int) {
    ENTER("cuStreamCreate");
    *stream = new int(0);
    return 0;
}
int cuStreamDestroy_v2(void *stream) {
    ENTER("cuStreamDestroy");
    delete static_cast<int *>(stream);
    return 0;
}
int cuStreamSynchronize(void *) { return fake_entered("cuStreamSynchronize"); }
int cuStreamWaitEvent(void *, void *, unsigned) {
    ENTER("cuStreamWaitEvent");
    return 0;
}
int cuEventCreate(void **event, unsigned) {
    ENTER("cuEventCreate");
    *event = new int(0);
    return 0;
}
int cuEventRecord(void *, void *) {
    ENTER("cuEventRecord");
    return 0;
}
int cuEventSynchronize(void *) {
    {
        std::unique_lock held(events_lock);
        events_changed.wait(held, [] { return !events_held; });
    }
    ENTER("cuEventSynchronize");
    return 0;
}
int cuEventDestroy_v2(void *event) {
    ENTER("cuEventDestroy");
    delete static_cast<int *>(event);
    return 0;
}
}
