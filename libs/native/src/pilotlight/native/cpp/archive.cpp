#include "archive.h"

#include <algorithm>
#include <cstring>

#include "elf64.h"
#include "graph_api.h"

namespace pilotlight {

namespace {

constexpr std::uint64_t MAX_NAME_BYTES = 1 << 16, MAX_PARAMS = 4096;

struct Bounds {
    std::uint64_t size;
    // Whether `count` entries lie from `start` on, where the machine can read them.
    template <class Entry>
    bool hold(std::uint64_t start, std::uint64_t count) const {
        return start % alignof(Entry) == 0 && hold_bytes(start, count, sizeof(Entry));
    }
    bool hold_bytes(std::uint64_t start, std::uint64_t count, std::uint64_t bytes) const {
        return start <= size && (!count || bytes <= (size - start) / count);
    }
};

// One entry of a table in an image, which need not be aligned.
template <class Entry>
Entry entry_of(const char *image, std::uint64_t table, std::uint32_t number) {
    Entry entry;
    std::memcpy(&entry, image + table + number * sizeof entry, sizeof entry);
    return entry;
}

// Whether an image's own tables lie in it: the driver is given no length, and believes them.
bool is_whole_image(const char *image, std::uint64_t size) {
    Bounds bounds{size};
    if (size < sizeof(ElfHeader) || std::memcmp(image, ELF_BEGINS, sizeof ELF_BEGINS - 1)) return false;
    auto header = entry_of<ElfHeader>(image, 0, 0);
    if ((header.num_sections && header.section_bytes != sizeof(Section)) ||
        !bounds.hold_bytes(header.sections, header.num_sections, sizeof(Section)) ||
        (header.num_segments && header.segment_bytes != sizeof(Segment)) ||
        !bounds.hold_bytes(header.segments, header.num_segments, sizeof(Segment)) || header.names >= header.num_sections)
        return false;
    for (std::uint32_t number = 0; number < header.num_sections; number++) {
        auto section = entry_of<Section>(image, header.sections, number);
        if (section.type && section.type != NO_BITS && !bounds.hold_bytes(section.offset, 1, section.bytes)) return false;
    }
    for (std::uint32_t number = 0; number < header.num_segments; number++) {
        auto segment = entry_of<Segment>(image, header.segments, number);
        if (!bounds.hold_bytes(segment.offset, 1, segment.file_bytes)) return false;
    }
    return true;
}

int check_graph(const char *bytes, const Bounds &bounds, const Header &header, const GraphEntry &graph) {
    if (!bounds.hold<NodeEntry>(graph.nodes, graph.num_nodes) || !bounds.hold<EdgeEntry>(graph.edges, graph.num_edges) ||
        !bounds.hold<AttributeEntry>(graph.attributes, graph.num_attributes) || !bounds.hold_bytes(graph.parameters, 1, graph.parameter_bytes))
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
        if (node.type != KERNEL && node.type != MEMCPY && node.type != MEMSET && node.type != EMPTY) return check_node(node.type, "");
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
    if (!bounds.hold<ImageEntry>(header.images, header.num_images) || !bounds.hold<KernelEntry>(header.kernels, header.num_kernels) ||
        !bounds.hold<GraphEntry>(header.graphs, header.num_graphs))
        return fail(MISUSED, "an archive's tables lie outside of it");
    auto *images = reinterpret_cast<const ImageEntry *>(bytes + header.images);
    std::uint64_t image_bytes = 0;
    for (std::uint32_t number = 0; number < header.num_images; number++) {
        const ImageEntry &image = images[number];
        image_bytes += image.bytes;
        if (image.start % alignof(Section) || !bounds.hold_bytes(image.start, 1, image.bytes) || image_bytes > size)
            return fail(MISUSED, "an image lies outside of its archive");
        if (!is_whole_image(bytes + image.start, image.bytes)) return fail(MISUSED, "an image does not hold together");
    }
    auto *kernels = reinterpret_cast<const KernelEntry *>(bytes + header.kernels);
    for (std::uint32_t number = 0; number < header.num_kernels; number++) {
        const KernelEntry &kernel = kernels[number];
        bool named = kernel.name < size && std::memchr(bytes + kernel.name, 0, std::min(MAX_NAME_BYTES, size - kernel.name));
        if (!named || kernel.image >= header.num_images || kernel.num_params > MAX_PARAMS ||
            !bounds.hold<std::uint32_t>(kernel.params, 2 * std::uint64_t(kernel.num_params)))
            return fail(MISUSED, "a kernel lies outside of its archive");
    }
    auto *graphs = reinterpret_cast<const GraphEntry *>(bytes + header.graphs);
    std::uint64_t nodes = 0;
    for (std::uint32_t number = 0; number < header.num_graphs; number++) {
        // Graphs that share their nodes would take for ever to check.
        nodes += graphs[number].num_nodes;
        if (nodes > size / sizeof(NodeEntry)) return fail(MISUSED, "a graph lies outside of its archive");
        if (int failed = check_graph(bytes, bounds, header, graphs[number])) return failed;
    }
    return OK;
}

}  // namespace pilotlight

using namespace pilotlight;

PILOTLIGHT_EXPORT int pilotlight_archive_check(const char *bytes, std::uint64_t size) { return check_archive(bytes, size); }
PILOTLIGHT_EXPORT int pilotlight_image_check(const char *image, std::uint64_t size) {
    return is_whole_image(image, size) ? OK : fail(MISUSED, "an image does not hold together");
}
