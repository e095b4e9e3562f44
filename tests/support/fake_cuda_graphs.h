// What the parts of the fake libcuda that know kernels and graphs share.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

extern "C" {
int fake_entered(const char *name);
int fake_backed(std::uint64_t address, std::size_t bytes);
void fake_fault();
void *fake_context();
}

constexpr int KERNEL = 0, MEMCPY = 1, MEMSET = 2, EMPTY = 5;

struct Module;

struct Function {
    Module *module;
    std::string name, code;
    std::vector<std::pair<std::size_t, std::size_t>> params;  // offsets and bytes
    std::size_t param_bytes = 0;
    int registers = 0, threads = 1024;
    bool threads_required = false, is_loaded = false, is_silent = false;
    std::map<int, int> attributes;
};

struct Module {
    std::map<std::string, std::unique_ptr<Function>> functions;
    bool is_pruned = false;
};

struct KernelParams {
    Function *func;
    unsigned grid[3], block[3], shared;
    void **params;
    void **extra;
    void *kernel;
    void *context;
};

struct AnyParams {
    int type, reserved[3];
    KernelParams kernel;
};

struct Attribute {
    unsigned char bytes[64];
};

struct EdgeData {
    unsigned char bytes[8];
};

struct Node {
    int type = EMPTY;
    KernelParams kernel{};
    std::string bytes;  // parameters, whole
    bool packed = false;
    std::vector<void *> places;
    void *extra[5];
    std::size_t extra_bytes = 0;
    std::map<int, Attribute> attributes;
};

struct Edge {
    Node *from, *to;
    EdgeData data;
};

struct Graph {
    std::vector<std::unique_ptr<Node>> nodes;
    std::vector<Edge> edges;
};

struct Exec {
    std::vector<Node> nodes;
};

// Makes a kernel's node of what the driver is given, by its rules.
int kernel_node(const KernelParams &given, Node *node);
int set_attribute(Node *node, int id, const Attribute &value);

// A node does what it does, at once, and is written down: see fake_cuda_launches.cpp.
void run(const Node &node);

// A graph is being made: waits for as long as a test says so.
void instantiating();

#define ENTER(name) \
    if (int code = fake_entered(name)) return code
