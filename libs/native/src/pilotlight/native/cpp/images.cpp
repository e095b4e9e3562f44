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
thread_local int not_recorded = 0;

// The image's number. The lock is held.
std::uint32_t add(const char *image, std::size_t bytes) {
    std::vector<Image> &images = recorded_images();
    std::string data(image, bytes);
    for (std::uint32_t number = 0; number < images.size(); number++)
        if (images[number].data == data) return number;
    std::set<std::string> kernels = kernels_of(data);
    images.push_back({std::move(data), std::move(kernels)});
    return images.size() - 1;
}

void on_event(void *, int domain, std::uint32_t event, const void *data) {
    if (domain != RESOURCES || event != MODULE_LOADED || not_recorded) return;
    auto *module = static_cast<const ModuleData *>(static_cast<const ResourceData *>(data)->descriptor);
    std::lock_guard guard(images_lock);
    if (module && module->image && module->bytes) add(module->image, module->bytes);
}

}  // namespace

std::vector<Image> &recorded_images() {
    static std::vector<Image> images;
    return images;
}

std::map<std::uint64_t, std::uint32_t> &images_of_functions() {
    static std::map<std::uint64_t, std::uint32_t> images;
    return images;
}

NotRecorded::NotRecorded() { not_recorded++; }
NotRecorded::~NotRecorded() { not_recorded--; }

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

// Adds an image that was had in another way. `function` is the driver's handle of a kernel that was loaded from it; 0: it is not known.
PILOTLIGHT_EXPORT int pilotlight_images_add(const char *image, std::uint64_t bytes, std::uint64_t function) {
    if (kernels_of(std::string(image, bytes)).empty()) return fail(MISUSED, "no kernel is in this image");
    std::lock_guard guard(images_lock);
    std::uint32_t number = add(image, bytes);
    if (function) images_of_functions()[function] = number;
    return OK;
}

// How many there are, and their bytes.
PILOTLIGHT_EXPORT int pilotlight_images_count(std::uint64_t *bytes) {
    std::lock_guard guard(images_lock);
    *bytes = 0;
    for (const Image &image : recorded_images()) *bytes += image.data.size();
    return static_cast<int>(recorded_images().size());
}
