#include "archive.h"

#include <cstring>

#include "graph_api.h"

namespace pilotlight {

namespace {

struct Bounds {
    std::uint64_t size;
    // Whether `count` things of `bytes` each lie from `start` on.
    bool hold(std::uint64_t start, std::uint64_t count, std::uint64_t bytes) const {
        return start <= size && start % 4 == 0 && (!count || bytes <= (size - start) / count);
    }
};

int check_graph(const char *bytes, const Bounds &bounds, const Header &header, const GraphEntry &graph) {
    if (!bounds.hold(graph.nodes, graph.num_nodes, sizeof(NodeEntry)) || !bounds.hold(graph.edges, graph.num_edges, sizeof(EdgeEntry)) ||
        !bounds.hold(graph.attributes, graph.num_attributes, sizeof(AttributeEntry)) ||
        !bounds.hold(graph.parameters, 1, graph.parameter_bytes))
        return fail(MISUSED, "a graph lies outside of its archive");
    auto *nodes = reinterpret_cast<const NodeEntry *>(bytes + graph.nodes);
    auto *edges = reinterpret_cast<const EdgeEntry *>(bytes + graph.edges);
    auto *kernels = reinterpret_cast<const KernelEntry *>(bytes + header.kernels);
    for (std::uint32_t number = 0; number < graph.num_nodes; number++) {
        const NodeEntry &node = nodes[number];
        if (node.params > graph.parameter_bytes || node.param_bytes > graph.parameter_bytes - node.params ||
            node.first_attribute > graph.num_attributes || node.num_attributes > graph.num_attributes - node.first_attribute ||
            node.first_edge > graph.num_edges || node.num_edges > graph.num_edges - node.first_edge)
            return fail(MISUSED, "a node lies outside of its graph");
        for (std::uint32_t edge = node.first_edge; edge < node.first_edge + node.num_edges; edge++)
            if (edges[edge].to != number || edges[edge].from >= number) return fail(MISUSED, "an edge of a graph does not lead forward");
        bool fits = node.type == EMPTY || (node.type == MEMCPY && node.param_bytes == sizeof(CUmemcpy3D)) ||
                    (node.type == MEMSET && node.param_bytes == sizeof(CUmemsetNodeParams));
        if (node.type == KERNEL) {
            if (node.kernel >= header.num_kernels) return fail(MISUSED, "a node has no kernel");
            const KernelEntry &kernel = kernels[node.kernel];
            auto *params = reinterpret_cast<const std::uint32_t *>(bytes + kernel.params);
            fits = true;
            for (std::uint32_t param = 0; param < kernel.num_params && !node.packed; param++)
                fits = fits && params[2 * param] <= node.param_bytes && params[2 * param + 1] <= node.param_bytes - params[2 * param];
        }
        if (!fits) return fail(MISUSED, "a node's parameters do not fit its kind");
    }
    return OK;
}

}  // namespace

int check_archive(const char *bytes, std::uint64_t size) {
    Header header;
    if (size < sizeof header) return fail(MISUSED, "an archive of graphs is cut off");
    std::memcpy(&header, bytes, sizeof header);
    if (std::memcmp(header.magic, MAGIC, sizeof MAGIC)) return fail(MISUSED, "this is no archive of graphs, or one of another version");
    if (header.total_bytes != size) return fail(MISUSED, "an archive of graphs is cut off");
    Bounds bounds{size};
    if (!bounds.hold(header.images, header.num_images, sizeof(ImageEntry)) ||
        !bounds.hold(header.kernels, header.num_kernels, sizeof(KernelEntry)) ||
        !bounds.hold(header.graphs, header.num_graphs, sizeof(GraphEntry)))
        return fail(MISUSED, "an archive's tables lie outside of it");
    auto *images = reinterpret_cast<const ImageEntry *>(bytes + header.images);
    for (std::uint32_t number = 0; number < header.num_images; number++)
        if (!bounds.hold(images[number].start, 1, images[number].bytes)) return fail(MISUSED, "an image lies outside of its archive");
    auto *kernels = reinterpret_cast<const KernelEntry *>(bytes + header.kernels);
    for (std::uint32_t number = 0; number < header.num_kernels; number++) {
        const KernelEntry &kernel = kernels[number];
        bool named = kernel.name < size && std::memchr(bytes + kernel.name, 0, size - kernel.name);
        if (!named || kernel.image >= header.num_images || kernel.num_params > 4096 || !bounds.hold(kernel.params, kernel.num_params, 8))
            return fail(MISUSED, "a kernel lies outside of its archive");
    }
    auto *graphs = reinterpret_cast<const GraphEntry *>(bytes + header.graphs);
    for (std::uint32_t number = 0; number < header.num_graphs; number++)
        if (int failed = check_graph(bytes, bounds, header, graphs[number])) return failed;
    return OK;
}

}  // namespace pilotlight

using namespace pilotlight;

PILOTLIGHT_EXPORT int pilotlight_archive_check(const char *bytes, std::uint64_t size) { return check_archive(bytes, size); }
