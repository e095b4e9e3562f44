#include "driver.h"

#include <dlfcn.h>

namespace pilotlight {

namespace {
thread_local std::string last_error;
}

Driver &driver() {
    static Driver opened;
    return opened;
}

const std::string &error_text() { return last_error; }

int fail(int code, const std::string &message) {
    last_error = message;
    return code;
}

int check(CUresult result, const char *call) {
    if (result == CUDA_SUCCESS) return OK;
    const char *name = nullptr, *text = nullptr;
    if (driver().get_error_name) driver().get_error_name(result, &name);
    if (driver().get_error_string) driver().get_error_string(result, &text);
    std::string step(call);
    step = step.substr(step.find('.') + 1);
    return fail(result, std::string(name ? name : "unknown error") + " (" + std::to_string(result) + ") in " +
                            step.substr(0, step.find('(')) + ": " + (text ? text : "no text"));
}

}  // namespace pilotlight

using namespace pilotlight;

// What went wrong last in this thread.
PILOTLIGHT_EXPORT const char *pilotlight_error() { return error_text().c_str(); }

// Finds the driver's functions in a library and initialises it. Once in a process: a second time it does nothing.
PILOTLIGHT_EXPORT int pilotlight_driver_open(const char *path) {
    static std::string opened;
    Driver &api = driver();
    if (api.library) return opened == path ? OK : fail(MISUSED, "this process has opened another driver, " + opened);
    void *library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (!library) return fail(NO_DRIVER, dlerror());
    Driver found;
    found.library = library;
#define X(member, symbol, parameters)                                                                         \
    found.member = reinterpret_cast<decltype(found.member)>(dlsym(library, #symbol));                         \
    if (!found.member) {                                                                                      \
        dlclose(library);                                                                                     \
        return fail(NO_DRIVER, std::string(path) + " has no " #symbol ": the driver is too old");             \
    }
    PILOTLIGHT_DRIVER_FUNCTIONS(X)
#undef X
    if (CUresult refused = found.init(0); refused != CUDA_SUCCESS) {
        const char *name = nullptr;
        found.get_error_name(refused, &name);
        dlclose(library);
        return fail(NO_DRIVER, std::string("the driver does not start: ") + (name ? name : std::to_string(refused).c_str()));
    }
    api = found;
    opened = path;
    return OK;
}

// Makes a device's primary context, the one that torch uses, current in this thread.
PILOTLIGHT_EXPORT int pilotlight_device_open(int ordinal, CUcontext *context) {
    Driver &api = driver();
    if (!api.library) return fail(NO_DRIVER, "no driver is open");
    CUdevice device = 0;
    PILOTLIGHT_TRY(api.device_get(&device, ordinal));
    PILOTLIGHT_TRY(api.primary_ctx_retain(context, device));
    PILOTLIGHT_TRY(api.ctx_set_current(*context));
    return OK;
}

PILOTLIGHT_EXPORT int pilotlight_device_memory(CUcontext context, std::uint64_t *free_bytes, std::uint64_t *total_bytes) {
    Driver &api = driver();
    std::size_t free_now = 0, total = 0;
    PILOTLIGHT_TRY(api.ctx_set_current(context));
    PILOTLIGHT_TRY(api.mem_get_info(&free_now, &total));
    *free_bytes = free_now;
    *total_bytes = total;
    return OK;
}
