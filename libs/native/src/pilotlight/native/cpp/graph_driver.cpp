// Finds what graphs need of the driver: see graph_api.h.
#include <dlfcn.h>

#include "graph_api.h"

namespace pilotlight {

GraphDriver &graph_driver() {
    static GraphDriver found;
    return found;
}

int open_graph_driver() {
    GraphDriver &api = graph_driver();
    if (api.found) return OK;
    void *library = driver().library;
    if (!library) return fail(NO_DRIVER, "no driver is open");
#define X(member, symbol, parameters)                                                 \
    api.member = reinterpret_cast<decltype(api.member)>(dlsym(library, #symbol));     \
    if (!api.member) return fail(NO_DRIVER, "the driver has no " #symbol ": it is too old to rebuild graphs");
    PILOTLIGHT_GRAPH_FUNCTIONS(X)
#undef X
    api.found = true;
    return OK;
}

}  // namespace pilotlight
