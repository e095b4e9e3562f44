// The driver's functions, found in libcuda at run time, and one device's context.
#pragma once

#include <cstdint>
#include <string>

#include "cuda_api.h"

#define PILOTLIGHT_EXPORT extern "C" __attribute__((visibility("default")))

namespace pilotlight {

// Results of this library's functions: 0, a CUresult above it, or one of these below it.
enum Result : int {
    OK = 0,
    MISUSED = -1,     // the books say that this cannot be
    TAKEN = -2,       // something else has the addresses
    NO_DRIVER = -3,   // libcuda is not there, or too old
    OUT_OF_ROOM = -4, // the region has no addresses left
    TIMED_OUT = -5,
    NOWHERE = -6,     // an address lies where nothing is known to be
};

struct Driver {
#define X(member, symbol, parameters) CUresult(*member) parameters = nullptr;
    PILOTLIGHT_DRIVER_FUNCTIONS(X)
#undef X
    void *library = nullptr;
};

// The driver that was opened; there is one in a process.
Driver &driver();

// What fail() was last told in this thread.
const std::string &error_text();

// Keeps the message for pilotlight_error() of this thread, and returns the code.
int fail(int code, const std::string &message);

// The same for what the driver answered to `call`; CUDA_SUCCESS is 0.
int check(CUresult result, const char *call);

}  // namespace pilotlight

// Returns from the calling function when the driver refuses.
#define PILOTLIGHT_TRY(expression)                                                            \
    do {                                                                                      \
        if (int failed = ::pilotlight::check((expression), #expression); failed) return failed; \
    } while (0)
