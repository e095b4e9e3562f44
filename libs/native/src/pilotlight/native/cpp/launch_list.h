// A graph's nodes launched one after the other on a stream: what a step runs while its graph is still being made.
#pragma once

#include "archive.h"
#include "graph_api.h"

namespace pilotlight {

class Archive;

// A graph of an archive whose kernels are all loaded. What is here changes no more, whatever else is made of the archive meanwhile.
struct LoadedGraph {
    const char *bytes;
    const GraphEntry *entry;
    const KernelEntry *kernels;
    const CUfunction *functions;
    const char *silent;  // of which kernels the driver says no parameters
    CUcontext context;
};

// MISUSED: it has kernels that are not loaded. Asks nothing of the driver, and waits for nobody who does.
int loaded_graph(const Archive *archive, std::uint32_t number, LoadedGraph *graph);

struct LaunchAttribute {
    std::uint32_t id, reserved;
    CUattributeValue value;
};
static_assert(sizeof(LaunchAttribute) == 72 && sizeof(AttributeEntry) == 72, "layout of the driver's ABI");

struct LaunchConfig {
    unsigned grid[3], block[3], sharedMemBytes;
    CUstream stream;
    LaunchAttribute *attributes;
    unsigned numAttributes;
};
static_assert(sizeof(LaunchConfig) == 56, "layout of the driver's ABI");

#define PILOTLIGHT_LAUNCH_FUNCTIONS(X)                                                                       \
    X(kernel, cuLaunchKernelEx, (const LaunchConfig *, CUfunction, void **, void **))                        \
    X(copy, cuMemcpy3DAsync_v2, (const CUmemcpy3D *, CUstream))                                              \
    X(set8, cuMemsetD8Async, (CUdeviceptr, unsigned char, std::size_t, CUstream))                            \
    X(set16, cuMemsetD16Async, (CUdeviceptr, unsigned short, std::size_t, CUstream))                         \
    X(set32, cuMemsetD32Async, (CUdeviceptr, unsigned, std::size_t, CUstream))                               \
    X(rows8, cuMemsetD2D8Async, (CUdeviceptr, std::size_t, unsigned char, std::size_t, std::size_t, CUstream))   \
    X(rows16, cuMemsetD2D16Async, (CUdeviceptr, std::size_t, unsigned short, std::size_t, std::size_t, CUstream)) \
    X(rows32, cuMemsetD2D32Async, (CUdeviceptr, std::size_t, unsigned, std::size_t, std::size_t, CUstream))

// Found when a list is first looked at: whoever launches none needs none of them.
struct LaunchDriver {
#define X(member, symbol, parameters) CUresult(*member) parameters = nullptr;
    PILOTLIGHT_LAUNCH_FUNCTIONS(X)
#undef X
    bool found = false;
};

LaunchDriver &launch_driver();

}  // namespace pilotlight
