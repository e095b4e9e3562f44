// Records the image of every kernel module that this process loads, however it comes: CUPTI tells, and is found at run time.
#include "images.h"

#include <dlfcn.h>

#include <mutex>

#include "driver.h"

namespace pilotlight {

namespace {

struct ResourceData {
    CUcontext context;
    void *handle;
    void *descriptor;
};

struct ModuleData {
    std::uint32_t id;
    std::size_t bytes;
    const char *image;
};

constexpr int RESOURCES = 3, MODULE_LOADED = 6;
std::mutex images_lock;

void add(const char *image, std::size_t bytes) {
    std::lock_guard guard(images_lock);
    std::string data(image, bytes);
    for (const Image &known : recorded_images())
        if (known.data == data) return;
    std::set<std::string> kernels = kernels_of(data);
    recorded_images().push_back({std::move(data), std::move(kernels)});
}

void on_event(void *, int domain, std::uint32_t event, const void *data) {
    if (domain != RESOURCES || event != MODULE_LOADED) return;
    auto *module = static_cast<const ModuleData *>(static_cast<const ResourceData *>(data)->descriptor);
    if (module && module->image && module->bytes) add(module->image, module->bytes);
}

}  // namespace

std::vector<Image> &recorded_images() {
    static std::vector<Image> images;
    return images;
}

}  // namespace pilotlight

using namespace pilotlight;

// From now on, images are recorded; before the first kernel is loaded. Replays are some 7 % slower afterwards.
PILOTLIGHT_EXPORT int pilotlight_images_record(const char *cupti) {
    void *library = dlopen(cupti, RTLD_NOW | RTLD_LOCAL);
    if (!library) return fail(NO_DRIVER, dlerror());
    using Callback = void (*)(void *, int, std::uint32_t, const void *);
    auto subscribe = reinterpret_cast<int (*)(void **, Callback, void *)>(dlsym(library, "cuptiSubscribe"));
    auto enable = reinterpret_cast<int (*)(std::uint32_t, void *, int, std::uint32_t)>(dlsym(library, "cuptiEnableCallback"));
    if (!subscribe || !enable) return fail(NO_DRIVER, std::string(cupti) + " is no CUPTI");
    void *subscriber = nullptr;
    int refused = subscribe(&subscriber, on_event, nullptr);
    if (!refused) refused = enable(1, subscriber, RESOURCES, MODULE_LOADED);
    return refused ? fail(NO_DRIVER, "CUPTI refuses with code " + std::to_string(refused)) : OK;
}

// Adds an image that was had in another way.
PILOTLIGHT_EXPORT int pilotlight_images_add(const char *image, std::uint64_t bytes) {
    std::string data(image, bytes);
    if (kernels_of(data).empty()) return fail(MISUSED, "no kernel is in this image");
    add(image, bytes);
    return OK;
}

// How many there are, and their bytes.
PILOTLIGHT_EXPORT int pilotlight_images_count(std::uint64_t *bytes) {
    std::lock_guard guard(images_lock);
    *bytes = 0;
    for (const Image &image : recorded_images()) *bytes += image.data.size();
    return static_cast<int>(recorded_images().size());
}
