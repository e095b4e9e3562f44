// Kernels that this process has loaded, whoever did it: MEDUSA's triggering kernels. A library loads its kernels by modules: where one of a
// module was launched, the driver names all of them.
#include <cstdlib>
#include <cstring>
#include <set>
#include <string>
#include <vector>

#include "graph_api.h"

namespace pilotlight {

namespace {

// Modules of the kernels in a graph.
int add_modules(CUgraph graph, std::set<CUmodule> *modules) {
    std::size_t count = 0;
    PILOTLIGHT_TRY(graph_driver().graph_get_nodes(graph, nullptr, &count));
    std::vector<CUgraphNode> nodes(count);
    if (count) PILOTLIGHT_TRY(graph_driver().graph_get_nodes(graph, nodes.data(), &count));
    for (CUgraphNode node : nodes) {
        int type = 0;
        PILOTLIGHT_TRY(graph_driver().node_get_type(node, &type));
        if (type != KERNEL) continue;
        CUkernelNodeParams given{};
        PILOTLIGHT_TRY(graph_driver().kernel_node_get(node, &given));
        CUfunction function = given.func;
        if (!function) PILOTLIGHT_TRY(graph_driver().kernel_get_function(&function, given.kern));
        CUmodule module = nullptr;
        PILOTLIGHT_TRY(graph_driver().func_get_module(&module, function));
        modules->insert(module);
    }
    return OK;
}

int add_functions(CUmodule module, std::string *text) {
    unsigned count = 0;
    PILOTLIGHT_TRY(graph_driver().module_count(&count, module));
    std::vector<CUfunction> functions(count);
    if (count) PILOTLIGHT_TRY(graph_driver().module_enumerate(functions.data(), count, module));
    for (CUfunction function : functions) {
        const char *name = nullptr;
        if (graph_driver().func_get_name(&name, function) != CUDA_SUCCESS) continue;
        *text += std::to_string(reinterpret_cast<std::uint64_t>(function)) + '\t' + name + '\n';
    }
    return OK;
}

}  // namespace

}  // namespace pilotlight

using namespace pilotlight;

// All kernels of the modules that have one in these graphs: a line each, the handle, a tab, and the name. `*text` is the caller's, to be given
// to pilotlight_free.
PILOTLIGHT_EXPORT int pilotlight_graphs_kernels(const std::uint64_t *graphs, int count, char **text) {
    if (int failed = open_graph_driver()) return failed;
    std::set<CUmodule> modules;
    for (int number = 0; number < count; number++)
        if (int failed = add_modules(reinterpret_cast<CUgraph>(graphs[number]), &modules)) return failed;
    std::string found;
    for (CUmodule module : modules)
        if (int failed = add_functions(module, &found)) return failed;
    *text = strdup(found.c_str());
    return *text ? OK : fail(CUDA_ERROR_OUT_OF_MEMORY, "the host has no memory for names of kernels");
}
