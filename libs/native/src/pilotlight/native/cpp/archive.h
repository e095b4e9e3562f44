// Graphs as bytes: what is written in one process and rebuilt in another whose arena lies at the same addresses.
//
//     [ header )[ kernels, names, parameter layouts )[ graph 0: nodes, edges, attributes, parameters )[ graph 1 ...)[ images )
//
// All places are offsets from the beginning; parameters are verbatim, addresses included. It is executable input: a process that loads one has
// checked where it comes from; what is checked here is that it holds together.
#pragma once

#include <cstdint>
#include <string>

namespace pilotlight {

constexpr char MAGIC[8] = {'P', 'L', 'G', 'R', 'A', 'P', 'H', '1'};
constexpr std::uint32_t NO_IMAGE = ~std::uint32_t(0);

struct Header {
    char magic[8];
    std::uint32_t num_images, num_kernels, num_graphs;
    std::uint32_t pointers;  // where the table of addresses is (pointers.h), in units of 16 bytes; 0: there is none
    std::uint64_t images, kernels, graphs, total_bytes, arena_address, arena_bytes;
};

struct ImageEntry {
    std::uint64_t start, bytes;
};

struct KernelEntry {
    std::uint64_t name, params;  // params: pairs of (offset, bytes), 32 bits each
    std::uint32_t image, num_params;
    std::int32_t max_dynamic_shared, carveout, non_portable_cluster, cluster_policy;
};

struct GraphEntry {
    std::uint64_t tag, nodes, edges, attributes, parameters, parameter_bytes;
    std::uint32_t num_nodes, num_edges, num_attributes, reserved;
};

struct NodeEntry {
    std::uint32_t type, kernel;
    std::uint32_t grid[3], block[3], shared_bytes;
    std::uint32_t packed;  // parameters are one buffer, given as such
    std::uint64_t params;  // from the graph's parameters
    std::uint32_t param_bytes, first_attribute, num_attributes, first_edge, num_edges, reserved;
};

struct EdgeEntry {
    std::uint32_t from, to;
    unsigned char data[8];
};

struct AttributeEntry {
    std::uint32_t id, reserved;
    unsigned char value[64];
};

// Whether every offset and index in an archive lies where it should; the message says what does not.
int check_archive(const char *bytes, std::uint64_t size);

}  // namespace pilotlight
