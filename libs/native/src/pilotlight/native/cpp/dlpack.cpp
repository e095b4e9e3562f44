// A tensor over given memory, in the form that torch.from_dlpack takes. The struct and its release function have to outlive Python's
// view of them, which is why they are made here.
#include <cstdint>
#include <cstdlib>

#include "driver.h"

namespace {

struct DLTensor {
    void *data;
    std::int32_t device_type, device_id;
    std::int32_t num_dims;
    std::uint8_t type_code, type_bits;
    std::uint16_t type_lanes;
    std::int64_t *shape, *strides;
    std::uint64_t byte_offset;
};

struct DLManagedTensor {
    DLTensor tensor;
    void *context;
    void (*deleter)(DLManagedTensor *);
};
static_assert(sizeof(DLTensor) == 48 && sizeof(DLManagedTensor) == 64, "layout of DLPack's ABI");

void release(DLManagedTensor *managed) { std::free(managed); }

}  // namespace

// Null: the process is out of memory. The consumer of the tensor calls its deleter.
PILOTLIGHT_EXPORT void *pilotlight_dlpack(std::uint64_t address, int device_type, int device_id, int type_code, int type_bits, int num_dims,
                                          const std::int64_t *shape) {
    auto *managed = static_cast<DLManagedTensor *>(std::calloc(1, sizeof(DLManagedTensor) + num_dims * sizeof(std::int64_t)));
    if (!managed) return nullptr;
    auto *sizes = reinterpret_cast<std::int64_t *>(managed + 1);
    for (int dim = 0; dim < num_dims; dim++) sizes[dim] = shape[dim];
    managed->tensor = {reinterpret_cast<void *>(address),
                       device_type,
                       device_id,
                       num_dims,
                       static_cast<std::uint8_t>(type_code),
                       static_cast<std::uint8_t>(type_bits),
                       1,
                       sizes,
                       nullptr,
                       0};
    managed->deleter = release;
    return managed;
}
