// See launch_list.h.
//
// An archive's nodes are in an order in which every edge leads forward, and a stream runs one after the other: so each node begins when all
// that it waits for has ended, whatever kind its edges are. What a graph would run side by side, or begin early, runs alone here.
#include "launch_list.h"

#include <dlfcn.h>

#include <algorithm>
#include <cstring>
#include <iterator>
#include <mutex>
#include <string>
#include <vector>

namespace pilotlight {

LaunchDriver &launch_driver() {
    static LaunchDriver found;
    return found;
}

namespace {

int open_launch_driver() {
    static std::mutex opening;
    std::lock_guard guard(opening);
    LaunchDriver &api = launch_driver();
    if (api.found) return OK;
#define X(member, symbol, parameters)                                                      \
    api.member = reinterpret_cast<decltype(api.member)>(dlsym(driver().library, #symbol)); \
    if (!api.member) return fail(NO_DRIVER, "the driver has no " #symbol ": it is too old to launch a graph's nodes");
    PILOTLIGHT_LAUNCH_FUNCTIONS(X)
#undef X
    api.found = true;
    return OK;
}

class LaunchList {
  public:
    explicit LaunchList(const LoadedGraph &graph)
        : graph_(graph),
          nodes_(reinterpret_cast<const NodeEntry *>(graph.bytes + graph.entry->nodes)),
          attributes_(reinterpret_cast<const AttributeEntry *>(graph.bytes + graph.entry->attributes)) {}

    // Whether each node can be launched; asks nothing of the driver. Looked at before the first one runs: half a step must not.
    int check() const {
        for (std::uint32_t number = 0; number < graph_.entry->num_nodes; number++)
            if (int failed = check(nodes_[number])) return explain(failed, number);
        return OK;
    }

    int run(CUstream stream) const {
        PILOTLIGHT_TRY(driver().ctx_set_current(graph_.context));
        for (std::uint32_t number = 0; number < graph_.entry->num_nodes; number++)
            if (int failed = launch(nodes_[number], stream)) return explain(failed, number);
        return OK;
    }

  private:
    int check(const NodeEntry &node) const {
        if (node.type == MEMSET) {
            std::size_t bytes = set_of(node).elementSize;
            if (bytes != 1 && bytes != 2 && bytes != 4)
                return fail(MISUSED, "a memset of elements of " + std::to_string(bytes) + " bytes cannot be launched");
        }
        if (node.type == KERNEL)
            for (std::uint32_t number = node.first_attribute; number < node.first_attribute + node.num_attributes; number++)
                if (!std::count(std::begin(NODE_ATTRIBUTES), std::end(NODE_ATTRIBUTES), attributes_[number].id))
                    return fail(MISUSED, "a kernel with the attribute " + std::to_string(attributes_[number].id) + " cannot be launched");
        return OK;
    }

    int launch(const NodeEntry &node, CUstream stream) const {
        if (node.type == KERNEL) return launch_kernel(node, stream);
        if (node.type == MEMCPY) {
            CUmemcpy3D copy{};
            std::memcpy(&copy, params_of(node), sizeof copy);
            PILOTLIGHT_TRY(launch_driver().copy(&copy, stream));
        }
        return node.type == MEMSET ? launch_memset(set_of(node), stream) : OK;
    }

    int launch_kernel(const NodeEntry &node, CUstream stream) const {
        const KernelEntry &kernel = graph_.kernels[node.kernel];
        std::vector<LaunchAttribute> attributes(node.num_attributes);
        for (std::uint32_t number = 0; number < node.num_attributes; number++)
            std::memcpy(&attributes[number], &attributes_[node.first_attribute + number], sizeof attributes[number]);
        LaunchConfig config{};
        std::copy(node.grid, node.grid + 3, config.grid);
        std::copy(node.block, node.block + 3, config.block);
        config.sharedMemBytes = node.shared_bytes;
        config.stream = stream;
        config.attributes = attributes.data();
        config.numAttributes = node.num_attributes;
        char *params = const_cast<char *>(params_of(node));
        std::size_t bytes = node.param_bytes;
        void *packed[] = {PARAM_BUFFER_POINTER, params, PARAM_BUFFER_SIZE, &bytes, PARAM_END};
        auto *layout = reinterpret_cast<const std::uint32_t *>(graph_.bytes + kernel.params);
        std::vector<void *> places;
        for (std::uint32_t param = 0; param < kernel.num_params; param++) places.push_back(params + layout[2 * param]);
        bool one_buffer = node.packed || graph_.silent[node.kernel];
        PILOTLIGHT_TRY(launch_driver().kernel(&config, graph_.functions[node.kernel], one_buffer ? nullptr : places.data(),
                                              one_buffer ? packed : nullptr));
        return OK;
    }

    static int launch_memset(const CUmemsetNodeParams &set, CUstream stream) {
        LaunchDriver &api = launch_driver();
        // Of one row the pitch is anything.
        if (set.height > 1) {
            if (set.elementSize == 1) PILOTLIGHT_TRY(api.rows8(set.dst, set.pitch, set.value, set.width, set.height, stream));
            if (set.elementSize == 2) PILOTLIGHT_TRY(api.rows16(set.dst, set.pitch, set.value, set.width, set.height, stream));
            if (set.elementSize == 4) PILOTLIGHT_TRY(api.rows32(set.dst, set.pitch, set.value, set.width, set.height, stream));
        } else {
            if (set.elementSize == 1) PILOTLIGHT_TRY(api.set8(set.dst, set.value, set.width, stream));
            if (set.elementSize == 2) PILOTLIGHT_TRY(api.set16(set.dst, set.value, set.width, stream));
            if (set.elementSize == 4) PILOTLIGHT_TRY(api.set32(set.dst, set.value, set.width, stream));
        }
        return OK;
    }

    const char *params_of(const NodeEntry &node) const { return graph_.bytes + graph_.entry->parameters + node.params; }

    CUmemsetNodeParams set_of(const NodeEntry &node) const {
        CUmemsetNodeParams set{};
        std::memcpy(&set, params_of(node), sizeof set);
        return set;
    }

    int explain(int failed, std::uint32_t number) const {
        const NodeEntry &node = nodes_[number];
        std::string what = node.type == KERNEL ? std::string("kernel ") + (graph_.bytes + graph_.kernels[node.kernel].name)
                                               : "type " + std::to_string(node.type);
        return fail(failed, error_text() + "; launching node " + std::to_string(number) + " of " + std::to_string(graph_.entry->num_nodes) +
                                " of graph " + std::to_string(graph_.entry->tag) + ", " + what);
    }

    const LoadedGraph graph_;
    const NodeEntry *const nodes_;
    const AttributeEntry *const attributes_;
};

}  // namespace

}  // namespace pilotlight

using namespace pilotlight;

// Whether a graph can be launched node by node now: its kernels are loaded, and it has nothing that no launch takes. Asks nothing of the device.
PILOTLIGHT_EXPORT int pilotlight_archive_check_list(Archive *archive, std::uint32_t number) {
    LoadedGraph graph{};
    if (int failed = loaded_graph(archive, number, &graph)) return failed;
    if (int failed = open_launch_driver()) return failed;
    return LaunchList(graph).check();
}

// Launches a graph's nodes, none of them if there is one that cannot be.
PILOTLIGHT_EXPORT int pilotlight_archive_launch_list(Archive *archive, std::uint32_t number, CUstream stream) {
    if (int failed = pilotlight_archive_check_list(archive, number)) return failed;
    LoadedGraph graph{};
    if (int failed = loaded_graph(archive, number, &graph)) return failed;
    return LaunchList(graph).run(stream);
}
