// The fake libcuda's launches without a graph, copies and memory that is set, and what all nodes do. What ran is written down: as a graph and
// launched one by one, the same nodes leave the same lines.
#include "fake_cuda_graphs.h"

#include <condition_variable>
#include <cstring>
#include <mutex>

namespace {

constexpr int INVALID_VALUE = 1, DEVICE = 2;

struct Config {
    unsigned grid[3], block[3], shared;
    void *stream;
    const char *attributes;  // 72 bytes each: the number, and 64 of value behind eight
    unsigned num_attributes;
};

struct Memset {
    std::uint64_t to;
    std::size_t pitch;
    unsigned value, element;
    std::size_t width, height;
};

// A copy's places of the driver's 200 bytes: what is one row from device to device.
struct Memcpy {
    std::uint64_t from, to;
    std::size_t width, height, depth;
    unsigned from_type, to_type;
};

std::string ran;
void *last_stream = nullptr;
std::mutex making_lock;
std::condition_variable making_changed;
bool making_held = false, making_now = false;

template <class Value>
Value at(const std::string &bytes, std::size_t place) {
    Value value{};
    if (place + sizeof value <= bytes.size()) std::memcpy(&value, &bytes[place], sizeof value);
    return value;
}

Memcpy copy_of(const std::string &bytes) {
    return {at<std::uint64_t>(bytes, 48), at<std::uint64_t>(bytes, 136), at<std::size_t>(bytes, 176), at<std::size_t>(bytes, 184),
            at<std::size_t>(bytes, 192), at<unsigned>(bytes, 32), at<unsigned>(bytes, 120)};
}

void note(const void *data, std::size_t bytes) { ran.append(static_cast<const char *>(data), bytes); }

void run_kernel(const Node &node) {
    std::uint64_t hash = 1469598103934665603ULL, place = at<std::uint64_t>(node.bytes, 0);
    auto mix = [&hash](const void *data, std::size_t bytes) {
        for (std::size_t one = 0; one < bytes; one++) hash = (hash ^ static_cast<const unsigned char *>(data)[one]) * 1099511628211ULL;
    };
    note(node.kernel.grid, sizeof node.kernel.grid);
    note(node.kernel.block, sizeof node.kernel.block);
    note(&node.kernel.shared, sizeof node.kernel.shared);
    note(&node.packed, sizeof node.packed);
    note(node.kernel.func->code.data(), node.kernel.func->code.size());
    for (auto &[id, value] : node.attributes) note(&id, sizeof id), note(&value, sizeof value);
    if (!fake_backed(place, 8)) return fake_fault();
    mix(reinterpret_cast<void *>(place), 8);
    mix(node.kernel.func->code.data(), node.kernel.func->code.size());
    mix(node.kernel.grid, sizeof node.kernel.grid);
    mix(node.bytes.data(), node.bytes.size());
    std::memcpy(reinterpret_cast<void *>(place), &hash, 8);
}

void run_copy(const Memcpy &copy) {
    if (!fake_backed(copy.from, copy.width) || !fake_backed(copy.to, copy.width)) return fake_fault();
    std::memmove(reinterpret_cast<void *>(copy.to), reinterpret_cast<void *>(copy.from), copy.width);
}

void run_set(const Memset &set) {
    for (std::size_t row = 0; row < set.height; row++)
        for (std::size_t place = 0; place < set.width; place++) {
            std::uint64_t to = set.to + row * set.pitch + place * set.element;
            if (!fake_backed(to, set.element)) return fake_fault();
            std::memcpy(reinterpret_cast<void *>(to), &set.value, set.element);
        }
}

int check_copy(const Memcpy &copy) {
    bool one_row = copy.height == 1 && copy.depth == 1 && copy.from_type == DEVICE && copy.to_type == DEVICE;
    return one_row && fake_backed(copy.from, copy.width) && fake_backed(copy.to, copy.width) ? 0 : INVALID_VALUE;
}

// One row has no pitch, and a launch of it is not asked for one.
int set(std::uint64_t to, std::size_t pitch, unsigned value, unsigned element, std::size_t width, std::size_t height, void *stream) {
    if (!fake_backed(to, 1) || (height > 1 && pitch < width * element)) return INVALID_VALUE;
    Memset made{to, height > 1 ? pitch : 0, value, element, width, height};
    Node node;
    node.type = MEMSET;
    node.bytes.assign(reinterpret_cast<const char *>(&made), sizeof made);
    last_stream = stream;
    run(node);
    return 0;
}

}  // namespace

void run(const Node &node) {
    if (node.type == EMPTY) return;  // it does nothing
    note(&node.type, sizeof node.type);
    note(node.bytes.data(), node.bytes.size());
    if (node.type == KERNEL) return run_kernel(node);
    if (node.type == MEMCPY) return run_copy(copy_of(node.bytes));
    run_set(at<Memset>(node.bytes, 0));
}

void instantiating() {
    std::unique_lock guard(making_lock);
    making_now = making_held;
    making_changed.notify_all();
    making_changed.wait(guard, [] { return !making_held; });
    making_now = false;
}

extern "C" {

void fake_hold_instantiate(int on) {
    std::lock_guard guard(making_lock);
    making_held = on;
    making_changed.notify_all();
}
void fake_wait_instantiate() {
    std::unique_lock guard(making_lock);
    making_changed.wait(guard, [] { return making_now; });
}

// What ran since the last time it was asked; the caller copies it at once.
const char *fake_ran(std::uint64_t *bytes) {
    static std::string told;
    told = std::move(ran);
    ran.clear();
    *bytes = told.size();
    return told.data();
}
void *fake_last_stream() { return last_stream; }

int fake_add_plain(Node **made, Graph *graph, Node *const *before, std::size_t count, int type, const char *params, std::size_t bytes);
int cuGraphAddMemcpyNode(Node **made, Graph *graph, Node *const *before, std::size_t count, const char *copy, void *) {
    ENTER("cuGraphAddMemcpyNode");
    if (int refused = check_copy(copy_of(std::string(copy, 200)))) return refused;
    return fake_add_plain(made, graph, before, count, MEMCPY, copy, 200);
}
int cuGraphAddMemsetNode(Node **made, Graph *graph, Node *const *before, std::size_t count, const Memset *given, void *) {
    ENTER("cuGraphAddMemsetNode");
    Memset set = *given;
    if (set.height == 1) set.pitch = 0;
    if (set.element < 4) set.value &= (1u << 8 * set.element) - 1;
    return fake_add_plain(made, graph, before, count, MEMSET, reinterpret_cast<const char *>(&set), sizeof set);
}
int cuGraphMemcpyNodeGetParams(Node *node, char *copy) { return std::memcpy(copy, node->bytes.data(), node->bytes.size()), 0; }
int cuGraphMemsetNodeGetParams(Node *node, char *set) { return std::memcpy(set, node->bytes.data(), node->bytes.size()), 0; }

int cuLaunchKernelEx(const Config *config, Function *function, void **params, void **extra) {
    ENTER("cuLaunchKernelEx");
    KernelParams given{};
    given.func = function;
    std::memcpy(given.grid, config->grid, sizeof given.grid);
    std::memcpy(given.block, config->block, sizeof given.block);
    given.shared = config->shared;
    given.params = params;
    given.extra = extra;
    Node node;
    if (int refused = kernel_node(given, &node)) return refused;
    for (unsigned number = 0; number < config->num_attributes; number++) {
        Attribute value;
        int id;
        std::memcpy(&id, config->attributes + 72 * number, sizeof id);
        std::memcpy(&value, config->attributes + 72 * number + 8, sizeof value);
        if (int refused = set_attribute(&node, id, value)) return refused;
    }
    last_stream = config->stream;
    run(node);
    return 0;
}
int cuMemcpy3DAsync_v2(const char *copy, void *stream) {
    ENTER("cuMemcpy3DAsync");
    Node node;
    node.type = MEMCPY;
    node.bytes.assign(copy, 200);
    if (int refused = check_copy(copy_of(node.bytes))) return refused;
    last_stream = stream;
    run(node);
    return 0;
}
int cuMemsetD8Async(std::uint64_t to, unsigned char value, std::size_t width, void *stream) {
    ENTER("cuMemsetD8Async");
    return set(to, 0, value, 1, width, 1, stream);
}
int cuMemsetD16Async(std::uint64_t to, unsigned short value, std::size_t width, void *stream) {
    ENTER("cuMemsetD16Async");
    return set(to, 0, value, 2, width, 1, stream);
}
int cuMemsetD32Async(std::uint64_t to, unsigned value, std::size_t width, void *stream) {
    ENTER("cuMemsetD32Async");
    return set(to, 0, value, 4, width, 1, stream);
}
int cuMemsetD2D8Async(std::uint64_t to, std::size_t pitch, unsigned char value, std::size_t width, std::size_t height, void *stream) {
    ENTER("cuMemsetD2D8Async");
    return set(to, pitch, value, 1, width, height, stream);
}
int cuMemsetD2D16Async(std::uint64_t to, std::size_t pitch, unsigned short value, std::size_t width, std::size_t height, void *stream) {
    ENTER("cuMemsetD2D16Async");
    return set(to, pitch, value, 2, width, height, stream);
}
int cuMemsetD2D32Async(std::uint64_t to, std::size_t pitch, unsigned value, std::size_t width, std::size_t height, void *stream) {
    ENTER("cuMemsetD2D32Async");
    return set(to, pitch, value, 4, width, height, stream);
}
}
