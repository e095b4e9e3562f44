// The few types and functions of NVIDIA's driver API that are used here, declared by ourselves: no header of CUDA is needed to build.
// Layouts and numbers are those of the driver's stable ABI.
#pragma once

#include <cstddef>
#include <cstdint>

using CUresult = int;
using CUdevice = int;
using CUdeviceptr = std::uint64_t;
using CUmemHandle = std::uint64_t;
using CUcontext = struct CUctx_st *;
using CUstream = struct CUstream_st *;
using CUevent = struct CUevent_st *;

constexpr CUresult CUDA_SUCCESS = 0;
constexpr CUresult CUDA_ERROR_OUT_OF_MEMORY = 2;

struct CUmemLocation {
    int type;  // 1: a device
    int id;
};

struct CUmemAllocationProp {
    int type;                  // 1: pinned
    int requestedHandleTypes;  // 1: a POSIX file descriptor
    CUmemLocation location;
    void *win32HandleMetaData;
    struct {
        unsigned char compressionType;
        unsigned char gpuDirectRDMACapable;
        unsigned short usage;
        unsigned char reserved[4];
    } allocFlags;
};
static_assert(sizeof(CUmemAllocationProp) == 32, "layout of the driver's ABI");

struct CUmemAccessDesc {
    CUmemLocation location;
    int flags;  // 3: read and write
};
static_assert(sizeof(CUmemAccessDesc) == 12, "layout of the driver's ABI");

constexpr int CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED = 110;
constexpr unsigned CU_STREAM_NON_BLOCKING = 1;
constexpr unsigned CU_EVENT_DISABLE_TIMING = 2;
constexpr unsigned CU_MEMHOSTREGISTER_PORTABLE = 1, CU_MEMHOSTREGISTER_READ_ONLY = 8;
constexpr int CU_STREAM_CAPTURE_MODE_RELAXED = 2;
constexpr int CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR = 1;

// X(name of the member, exported symbol, parameters)
#define PILOTLIGHT_DRIVER_FUNCTIONS(X)                                                                                        \
    X(init, cuInit, (unsigned))                                                                                               \
    X(get_error_name, cuGetErrorName, (CUresult, const char **))                                                              \
    X(get_error_string, cuGetErrorString, (CUresult, const char **))                                                          \
    X(device_get, cuDeviceGet, (CUdevice *, int))                                                                             \
    X(device_get_attribute, cuDeviceGetAttribute, (int *, int, CUdevice))                                                     \
    X(primary_ctx_retain, cuDevicePrimaryCtxRetain, (CUcontext *, CUdevice))                                                  \
    X(ctx_set_current, cuCtxSetCurrent, (CUcontext))                                                                          \
    X(ctx_synchronize, cuCtxSynchronize, ())                                                                                  \
    X(ctx_get_stream_priority_range, cuCtxGetStreamPriorityRange, (int *, int *))                                             \
    X(thread_exchange_stream_capture_mode, cuThreadExchangeStreamCaptureMode, (int *))                                        \
    X(mem_get_info, cuMemGetInfo_v2, (std::size_t *, std::size_t *))                                                          \
    X(mem_get_allocation_granularity, cuMemGetAllocationGranularity, (std::size_t *, const CUmemAllocationProp *, int))       \
    X(mem_address_reserve, cuMemAddressReserve, (CUdeviceptr *, std::size_t, std::size_t, CUdeviceptr, std::uint64_t))        \
    X(mem_address_free, cuMemAddressFree, (CUdeviceptr, std::size_t))                                                         \
    X(mem_create, cuMemCreate, (CUmemHandle *, std::size_t, const CUmemAllocationProp *, std::uint64_t))                      \
    X(mem_release, cuMemRelease, (CUmemHandle))                                                                               \
    X(mem_map, cuMemMap, (CUdeviceptr, std::size_t, std::size_t, CUmemHandle, std::uint64_t))                                 \
    X(mem_unmap, cuMemUnmap, (CUdeviceptr, std::size_t))                                                                      \
    X(mem_set_access, cuMemSetAccess, (CUdeviceptr, std::size_t, const CUmemAccessDesc *, std::size_t))                       \
    X(mem_export, cuMemExportToShareableHandle, (void *, CUmemHandle, int, std::uint64_t))                                    \
    X(mem_import, cuMemImportFromShareableHandle, (CUmemHandle *, void *, int))                                               \
    X(memcpy_dtod, cuMemcpyDtoD_v2, (CUdeviceptr, CUdeviceptr, std::size_t))                                                  \
    X(memcpy_dtoh, cuMemcpyDtoH_v2, (void *, CUdeviceptr, std::size_t))                                                       \
    X(memcpy_htod, cuMemcpyHtoD_v2, (CUdeviceptr, const void *, std::size_t))                                                 \
    X(memcpy_htod_async, cuMemcpyHtoDAsync_v2, (CUdeviceptr, const void *, std::size_t, CUstream))                            \
    X(mem_host_register, cuMemHostRegister_v2, (void *, std::size_t, unsigned))                                               \
    X(mem_host_unregister, cuMemHostUnregister, (void *))                                                                     \
    X(mem_host_alloc, cuMemHostAlloc, (void **, std::size_t, unsigned))                                                       \
    X(mem_free_host, cuMemFreeHost, (void *))                                                                                 \
    X(stream_create, cuStreamCreateWithPriority, (CUstream *, unsigned, int))                                                 \
    X(stream_destroy, cuStreamDestroy_v2, (CUstream))                                                                         \
    X(stream_wait_event, cuStreamWaitEvent, (CUstream, CUevent, unsigned))                                                    \
    X(event_create, cuEventCreate, (CUevent *, unsigned))                                                                     \
    X(event_record, cuEventRecord, (CUevent, CUstream))                                                                       \
    X(event_synchronize, cuEventSynchronize, (CUevent))                                                                       \
    X(event_destroy, cuEventDestroy_v2, (CUevent))
