// What graphs need of the driver, beside cuda_api.h: found when graphs are first asked for, because an older driver has the rest.
#pragma once

#include "driver.h"

using CUfunction = struct CUfunc_st *;
using CUkernel = struct CUkern_st *;
using CUmodule = struct CUmod_st *;
using CUgraph = struct CUgraph_st *;
using CUgraphNode = struct CUgraphNode_st *;
using CUgraphExec = struct CUgraphExec_st *;

struct CUgraphEdgeData {
    unsigned char from_port, to_port, type, reserved[5];
};

struct CUkernelNodeParams {
    CUfunction func;
    unsigned grid[3], block[3], sharedMemBytes;
    void **kernelParams;
    void **extra;
    CUkernel kern;
    CUcontext ctx;
};
static_assert(sizeof(CUkernelNodeParams) == 72, "layout of the driver's ABI");

struct CUmemcpy3D {
    unsigned char fields[200];
};

struct CUmemsetNodeParams {
    CUdeviceptr dst;
    std::size_t pitch;
    unsigned value, elementSize;
    std::size_t width, height;
};
static_assert(sizeof(CUmemsetNodeParams) == 40, "layout of the driver's ABI");

struct CUgraphNodeParams {
    int type, reserved0[3];
    union {
        CUkernelNodeParams kernel;
        long long reserved1[29];
    };
    long long reserved2;
};
static_assert(sizeof(CUgraphNodeParams) == 256, "layout of the driver's ABI");

struct CUattributeValue {
    unsigned char bytes[64];
};

enum NodeType : std::uint32_t { KERNEL = 0, MEMCPY = 1, MEMSET = 2, EMPTY = 5 };

// Attributes of kernel nodes that are written down where they differ from those of a plain node: cooperative, scheduling policy, cluster size,
// priority, memory synchronisation, shared memory.
constexpr std::uint32_t NODE_ATTRIBUTES[] = {1, 2, 4, 5, 8, 9, 10, 11, 14, 16};

constexpr int FUNC_MAX_THREADS = 0, FUNC_STATIC_SHARED_BYTES = 1, FUNC_REGISTERS = 4;
constexpr int FUNC_MAX_DYNAMIC_SHARED_BYTES = 8, FUNC_CARVEOUT = 9, FUNC_NON_PORTABLE_CLUSTER = 14, FUNC_CLUSTER_POLICY = 15;
constexpr int POINTER_MEMORY_TYPE = 2;
inline void *const PARAM_END = nullptr;
inline void *const PARAM_BUFFER_POINTER = reinterpret_cast<void *>(1);
inline void *const PARAM_BUFFER_SIZE = reinterpret_cast<void *>(2);

#define PILOTLIGHT_GRAPH_FUNCTIONS(X)                                                                                         \
    X(graph_create, cuGraphCreate, (CUgraph *, unsigned))                                                                     \
    X(graph_destroy, cuGraphDestroy, (CUgraph))                                                                               \
    X(graph_get_nodes, cuGraphGetNodes, (CUgraph, CUgraphNode *, std::size_t *))                                              \
    X(graph_get_edges, cuGraphGetEdges_v2, (CUgraph, CUgraphNode *, CUgraphNode *, CUgraphEdgeData *, std::size_t *))         \
    X(node_get_type, cuGraphNodeGetType, (CUgraphNode, int *))                                                                \
    X(kernel_node_get, cuGraphKernelNodeGetParams_v2, (CUgraphNode, CUkernelNodeParams *))                                    \
    X(kernel_node_get_attribute, cuGraphKernelNodeGetAttribute, (CUgraphNode, int, CUattributeValue *))                       \
    X(kernel_node_set_attribute, cuGraphKernelNodeSetAttribute, (CUgraphNode, int, const CUattributeValue *))                 \
    X(memcpy_node_get, cuGraphMemcpyNodeGetParams, (CUgraphNode, CUmemcpy3D *))                                               \
    X(memset_node_get, cuGraphMemsetNodeGetParams, (CUgraphNode, CUmemsetNodeParams *))                                       \
    X(add_kernel, cuGraphAddKernelNode_v2, (CUgraphNode *, CUgraph, const CUgraphNode *, std::size_t, const CUkernelNodeParams *)) \
    X(add_node, cuGraphAddNode_v2,                                                                                            \
      (CUgraphNode *, CUgraph, const CUgraphNode *, const CUgraphEdgeData *, std::size_t, CUgraphNodeParams *))               \
    X(add_memcpy, cuGraphAddMemcpyNode,                                                                                       \
      (CUgraphNode *, CUgraph, const CUgraphNode *, std::size_t, const CUmemcpy3D *, CUcontext))                              \
    X(add_memset, cuGraphAddMemsetNode,                                                                                       \
      (CUgraphNode *, CUgraph, const CUgraphNode *, std::size_t, const CUmemsetNodeParams *, CUcontext))                      \
    X(add_empty, cuGraphAddEmptyNode, (CUgraphNode *, CUgraph, const CUgraphNode *, std::size_t))                             \
    X(instantiate, cuGraphInstantiateWithFlags, (CUgraphExec *, CUgraph, std::uint64_t))                                      \
    X(upload, cuGraphUpload, (CUgraphExec, CUstream))                                                                         \
    X(launch, cuGraphLaunch, (CUgraphExec, CUstream))                                                                         \
    X(exec_destroy, cuGraphExecDestroy, (CUgraphExec))                                                                        \
    X(func_get_name, cuFuncGetName, (const char **, CUfunction))                                                              \
    X(func_get_module, cuFuncGetModule, (CUmodule *, CUfunction))                                                             \
    X(func_get_param, cuFuncGetParamInfo, (CUfunction, std::size_t, std::size_t *, std::size_t *))                            \
    X(func_load, cuFuncLoad, (CUfunction))                                                                                    \
    X(func_get_attribute, cuFuncGetAttribute, (int *, int, CUfunction))                                                       \
    X(func_set_attribute, cuFuncSetAttribute, (CUfunction, int, int))                                                         \
    X(kernel_get_function, cuKernelGetFunction, (CUfunction *, CUkernel))                                                     \
    X(module_load, cuModuleLoadData, (CUmodule *, const void *))                                                              \
    X(module_unload, cuModuleUnload, (CUmodule))                                                                              \
    X(module_get_function, cuModuleGetFunction, (CUfunction *, CUmodule, const char *))                                       \
    X(module_count, cuModuleGetFunctionCount, (unsigned *, CUmodule))                                                         \
    X(module_enumerate, cuModuleEnumerateFunctions, (CUfunction *, unsigned, CUmodule))                                       \
    X(pointer_get_attribute, cuPointerGetAttribute, (void *, int, CUdeviceptr))

namespace pilotlight {

struct GraphDriver {
#define X(member, symbol, parameters) CUresult(*member) parameters = nullptr;
    PILOTLIGHT_GRAPH_FUNCTIONS(X)
#undef X
    bool found = false;
};

// Whether a node can be made again in another process: of its type, and of its kernel's name if it is a kernel. The message names what cannot.
int check_node(int type, const std::string &kernel);

// The functions; `open_graph_driver` finds them once.
GraphDriver &graph_driver();
int open_graph_driver();

}  // namespace pilotlight
