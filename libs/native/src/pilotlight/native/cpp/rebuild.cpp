// Makes graphs again from what was written down: without torch, without running a kernel first, and without changing an address.
#include <algorithm>
#include <array>
#include <atomic>
#include <cstdio>
#include <cstring>
#include <memory>
#include <mutex>
#include <vector>

#include "archive.h"
#include "graph_api.h"
#include "kernels.h"
#include "launch_list.h"
#include "stopwatch.h"

namespace pilotlight {

namespace {

std::string address_text(std::uint64_t address) {
    char text[24];
    std::snprintf(text, sizeof text, "0x%llx", static_cast<unsigned long long>(address));
    return text;
}

// A graph that is made piece by piece.
struct Unmade {
    CUgraph graph = nullptr;
    CUgraphExec exec = nullptr;

    void destroy() {
        if (exec) graph_driver().exec_destroy(exec);
        if (graph) graph_driver().graph_destroy(graph);
        *this = {};
    }
};

}  // namespace

class Archive {
  public:
    // The bytes stay the caller's, and where they are for as long as this lives.
    Archive(CUcontext context, const char *bytes) : context_(context), bytes_(bytes) {
        std::memcpy(&header_, bytes_, sizeof header_);
        images_ = reinterpret_cast<const ImageEntry *>(at(header_.images));
        kernels_ = reinterpret_cast<const KernelEntry *>(at(header_.kernels));
        graphs_ = reinterpret_cast<const GraphEntry *>(at(header_.graphs));
        modules_.resize(header_.num_images);
        functions_.resize(header_.num_kernels);
        silent_.resize(header_.num_kernels);
        loaded_ = std::make_unique<std::atomic<bool>[]>(header_.num_graphs);
        execs_.resize(header_.num_graphs);
        unmade_.resize(header_.num_graphs);
    }

    ~Archive() {
        driver().ctx_set_current(context_);
        for (Unmade &unmade : unmade_) unmade.destroy();
        for (CUgraphExec exec : execs_)
            if (exec) graph_driver().exec_destroy(exec);
        for (CUmodule module : modules_)
            if (module) graph_driver().module_unload(module);
    }

    // Loads the images that one graph needs: what of its restoring needs no memory of the arena.
    int load(std::uint32_t number) {
        std::lock_guard guard(lock_);
        if (number >= header_.num_graphs) return fail(MISUSED, "the archive has no graph " + std::to_string(number));
        PILOTLIGHT_TRY(driver().ctx_set_current(context_));
        std::uint32_t all = header_.num_kernels;
        return load_kernels(graphs_[number], &all);
    }

    // Makes one graph ready to be launched, and loads the images that it needs.
    int build(std::uint32_t number, CUstream stream) {
        for (std::uint64_t left = 1; left;)
            if (int failed = advance(number, stream, &left)) return failed;
        return OK;
    }

    // The next piece of that, as much as the driver does at once: a kernel, the nodes, the instantiation, the upload. `*left`: it was not the last.
    int advance(std::uint32_t number, CUstream stream, std::uint64_t *left) {
        std::lock_guard guard(lock_);
        *left = 0;
        if (number >= header_.num_graphs) return fail(MISUSED, "the archive has no graph " + std::to_string(number));
        if (execs_[number]) return OK;
        PILOTLIGHT_TRY(driver().ctx_set_current(context_));
        Unmade &unmade = unmade_[number];
        int failed = OK;
        std::uint32_t kernels = 1;
        *left = 1;
        if (!loaded_[number]) failed = load_kernels(graphs_[number], &kernels);
        if (failed || !kernels) {
            // One was loaded, and that is enough for now.
        } else if (!unmade.graph) {
            PILOTLIGHT_TRY(graph_driver().graph_create(&unmade.graph, 0));
            failed = add_nodes(graphs_[number], unmade.graph);
        } else if (!unmade.exec) {
            Stopwatch watch(&spent_[INSTANTIATE]);
            failed = check(graph_driver().instantiate(&unmade.exec, unmade.graph, 0), "graph_driver().instantiate");
        } else {
            Stopwatch watch(&spent_[UPLOAD]);
            failed = check(graph_driver().upload(unmade.exec, stream), "graph_driver().upload");
            if (!failed) std::swap(execs_[number], unmade.exec);
            *left = 0;
        }
        if (failed || !*left) unmade.destroy();
        return failed;
    }

    int launch(std::uint32_t number, CUstream stream) {
        if (number >= header_.num_graphs || !execs_[number]) return fail(MISUSED, "graph " + std::to_string(number) + " is not built");
        PILOTLIGHT_TRY(graph_driver().launch(execs_[number], stream));
        return OK;
    }

    // For who launches its nodes while another thread makes graphs. MISUSED: it has kernels that are not loaded.
    int loaded(std::uint32_t number, LoadedGraph *graph) const {
        if (number >= header_.num_graphs || !loaded_[number]) return fail(MISUSED, "the kernels of graph " + std::to_string(number) + " are not loaded");
        *graph = {bytes_, &graphs_[number], kernels_, functions_.data(), silent_.data(), context_};
        return OK;
    }

    // For diagnosis: runs a graph's nodes one after the other, each as a graph of its own, and waits for each. The first one that fails is
    // described; an address that is wrong is seen at its node.
    int walk(std::uint32_t number, CUstream stream) {
        std::lock_guard guard(lock_);
        if (number >= header_.num_graphs) return fail(MISUSED, "the archive has no graph " + std::to_string(number));
        PILOTLIGHT_TRY(driver().ctx_set_current(context_));
        for (std::uint32_t node = 0; node < graphs_[number].num_nodes; node++)
            if (int failed = run_alone(graphs_[number], node, stream)) return explain(failed, graphs_[number], node);
        return OK;
    }

    // Whether every word of parameters that is an address in [first, stop) lies in one of `ranges`, which are in order; asks nothing of the
    // driver. Of the graphs [from, to). Counts the words that are addresses of the arena, but not there: some kernels have bytes in their parameters that they never read.
    int check_addresses(std::uint32_t from, std::uint32_t to, const std::uint64_t *ranges, std::uint64_t count, std::uint64_t first,
                        std::uint64_t stop, std::uint64_t *elsewhere) const {
        const std::uint64_t arena_stop = header_.arena_address + header_.arena_bytes;
        *elsewhere = 0;
        for (std::uint32_t number = from; number < std::min(to, header_.num_graphs); number++) {
            const GraphEntry &entry = graphs_[number];
            auto *nodes = reinterpret_cast<const NodeEntry *>(at(entry.nodes));
            for (std::uint32_t node = 0; node < entry.num_nodes; node++) {
                const char *params = at(entry.parameters) + nodes[node].params;
                for (std::uint32_t place = 0; place + 8 <= nodes[node].param_bytes; place += 8) {
                    std::uint64_t word = 0;
                    std::memcpy(&word, params + place, sizeof word);
                    if (word < header_.arena_address || word >= arena_stop) continue;
                    if (word < first || word >= stop) {
                        ++*elsewhere;
                        continue;
                    }
                    // Bounds alternate: within a range, an odd number of them is not above.
                    if ((std::upper_bound(ranges, ranges + 2 * count, word) - ranges) % 2 == 0)
                        return explain(fail(NOWHERE, "nothing is known at " + address_text(word) + ", in byte " + std::to_string(place)), entry, node);
                }
            }
        }
        return OK;
    }

    // Loads every kernel, as building all graphs would, and says which ones the driver refuses: a line each, the name, a tab, and why.
    std::string refused() {
        std::lock_guard guard(lock_);
        std::string text;
        for (std::uint32_t number = 0; number < header_.num_kernels; number++) {
            CUfunction loaded = nullptr;
            if (function(number, &loaded)) text += std::string(at(kernels_[number].name)) + '\t' + error_text() + '\n';
        }
        return text;
    }

    // A kernel that somebody else has loaded stands for one that no graph needed yet; it stays theirs.
    int offer(std::uint32_t number, CUfunction loaded) {
        std::lock_guard guard(lock_);
        if (number >= header_.num_kernels || functions_[number]) return fail(MISUSED, "the archive lacks no kernel " + std::to_string(number));
        PILOTLIGHT_TRY(driver().ctx_set_current(context_));
        PILOTLIGHT_TRY(graph_driver().func_load(loaded));
        return adopt(number, loaded);
    }

    const char *kernel_name(std::uint32_t number) const { return number < header_.num_kernels ? at(kernels_[number].name) : nullptr; }

    std::uint64_t tag(std::uint32_t number) const { return number < header_.num_graphs ? graphs_[number].tag : 0; }
    const Header &header() const { return header_; }
    // What building took so far, in nanoseconds, as `Part` says.
    void spent(std::uint64_t *parts) {
        std::lock_guard guard(lock_);
        std::copy(spent_.begin(), spent_.end(), parts);
    }

  private:
    const char *at(std::uint64_t place) const { return bytes_ + place; }

    int adopt(std::uint32_t number, CUfunction loaded) {
        const KernelEntry &kernel = kernels_[number];
        bool silent = false;
        int failed = adopt_kernel(loaded, at(kernel.name), kernel, reinterpret_cast<const std::uint32_t *>(at(kernel.params)), &silent);
        silent_[number] = silent;
        if (!failed) functions_[number] = loaded;
        return failed;
    }

    int function(std::uint32_t number, CUfunction *found) {
        if (!functions_[number]) {
            const KernelEntry &kernel = kernels_[number];
            CUmodule &module = modules_[kernel.image];
            if (!module) PILOTLIGHT_TRY(graph_driver().module_load(&module, at(images_[kernel.image].start)));
            CUfunction loaded = nullptr;
            if (int failed = load_kernel(module, at(kernel.name), &loaded)) return failed;
            if (int failed = adopt(number, loaded)) return failed;
        }
        *found = functions_[number];
        return OK;
    }

    // Those that are not there, and `*most` of them at most, less by each.
    int load_kernels(const GraphEntry &entry, std::uint32_t *most) {
        Stopwatch watch(&spent_[IMAGES]);
        auto *nodes = reinterpret_cast<const NodeEntry *>(at(entry.nodes));
        CUfunction loaded = nullptr;
        for (std::uint32_t number = 0; number < entry.num_nodes; number++) {
            if (nodes[number].type != KERNEL || functions_[nodes[number].kernel]) continue;
            if (!*most) return OK;
            if (int failed = function(nodes[number].kernel, &loaded)) return explain(failed, entry, number);
            --*most;
        }
        loaded_[&entry - graphs_] = true;
        return OK;
    }

    int add_nodes(const GraphEntry &entry, CUgraph graph) {
        Stopwatch watch(&spent_[NODES]);
        auto *nodes = reinterpret_cast<const NodeEntry *>(at(entry.nodes));
        auto *edges = reinterpret_cast<const EdgeEntry *>(at(entry.edges));
        std::vector<CUgraphNode> made(entry.num_nodes), before;
        std::vector<CUgraphEdgeData> data;
        for (std::uint32_t number = 0; number < entry.num_nodes; number++) {
            const NodeEntry &node = nodes[number];
            before.clear();
            data.clear();
            for (std::uint32_t edge = node.first_edge; edge < node.first_edge + node.num_edges; edge++) {
                before.push_back(made[edges[edge].from]);
                CUgraphEdgeData kind{};
                std::memcpy(&kind, edges[edge].data, sizeof kind);
                data.push_back(kind);
            }
            if (int failed = add_node(entry, node, graph, before, data, &made[number])) return explain(failed, entry, number);
        }
        return OK;
    }

    int add_node(const GraphEntry &entry, const NodeEntry &node, CUgraph graph, const std::vector<CUgraphNode> &before,
                 const std::vector<CUgraphEdgeData> &data, CUgraphNode *made) {
        const char *params = at(entry.parameters) + node.params;
        if (node.type == KERNEL) return add_kernel(entry, node, params, graph, before, data, made);
        if (node.type == MEMCPY) {
            CUmemcpy3D copy{};
            std::memcpy(&copy, params, sizeof copy);
            PILOTLIGHT_TRY(graph_driver().add_memcpy(made, graph, before.data(), before.size(), &copy, context_));
        } else if (node.type == MEMSET) {
            CUmemsetNodeParams set{};
            std::memcpy(&set, params, sizeof set);
            PILOTLIGHT_TRY(graph_driver().add_memset(made, graph, before.data(), before.size(), &set, context_));
        } else {
            PILOTLIGHT_TRY(graph_driver().add_empty(made, graph, before.data(), before.size()));
        }
        return OK;
    }

    int run_alone(const GraphEntry &entry, std::uint32_t number, CUstream stream) {
        CUgraph graph = nullptr;
        CUgraphNode made = nullptr;
        CUgraphExec exec = nullptr;
        PILOTLIGHT_TRY(graph_driver().graph_create(&graph, 0));
        int failed = add_node(entry, reinterpret_cast<const NodeEntry *>(at(entry.nodes))[number], graph, {}, {}, &made);
        if (!failed) failed = check(graph_driver().instantiate(&exec, graph, 0), "graph_driver().instantiate");
        if (!failed) failed = check(graph_driver().launch(exec, stream), "graph_driver().launch");
        if (!failed) failed = check(driver().ctx_synchronize(), "driver().ctx_synchronize");
        if (exec) graph_driver().exec_destroy(exec);
        graph_driver().graph_destroy(graph);
        return failed;
    }

    // Adds to the message which node it was, and all that the driver looks at.
    int explain(int failed, const GraphEntry &entry, std::uint32_t number) const {
        const NodeEntry &node = reinterpret_cast<const NodeEntry *>(at(entry.nodes))[number];
        std::string text = error_text() + "; node " + std::to_string(number) + " of " + std::to_string(entry.num_nodes) + " of graph " +
                           std::to_string(entry.tag) + ", after " + std::to_string(node.num_edges) + " nodes, ";
        auto *attributes = reinterpret_cast<const AttributeEntry *>(at(entry.attributes)) + node.first_attribute;
        return fail(failed, text + (node.type == KERNEL ? launch_text(bytes_, kernels_[node.kernel], node, attributes, functions_[node.kernel])
                                                        : "type " + std::to_string(node.type)));
    }

    int add_kernel(const GraphEntry &entry, const NodeEntry &node, const char *params, CUgraph graph, const std::vector<CUgraphNode> &before,
                   const std::vector<CUgraphEdgeData> &data, CUgraphNode *made) {
        const KernelEntry &kernel = kernels_[node.kernel];
        CUkernelNodeParams given{};
        if (int failed = function(node.kernel, &given.func)) return failed;
        std::copy(node.grid, node.grid + 3, given.grid);
        std::copy(node.block, node.block + 3, given.block);
        given.sharedMemBytes = node.shared_bytes;
        std::size_t bytes = node.param_bytes;
        void *packed[] = {PARAM_BUFFER_POINTER, const_cast<char *>(params), PARAM_BUFFER_SIZE, &bytes, PARAM_END};
        std::vector<void *> places;
        auto *layout = reinterpret_cast<const std::uint32_t *>(at(kernel.params));
        for (std::uint32_t param = 0; param < kernel.num_params; param++) places.push_back(const_cast<char *>(params) + layout[2 * param]);
        if (node.packed || silent_[node.kernel])
            given.extra = packed;
        else
            given.kernelParams = places.data();
        bool plain = true;
        for (const CUgraphEdgeData &kind : data) plain = plain && !kind.from_port && !kind.to_port && !kind.type;
        if (plain) {
            PILOTLIGHT_TRY(graph_driver().add_kernel(made, graph, before.data(), before.size(), &given));
        } else {
            CUgraphNodeParams any{};
            any.type = KERNEL;
            any.kernel = given;
            PILOTLIGHT_TRY(graph_driver().add_node(made, graph, before.data(), data.data(), before.size(), &any));
        }
        auto *attributes = reinterpret_cast<const AttributeEntry *>(at(entry.attributes)) + node.first_attribute;
        for (std::uint32_t number = 0; number < node.num_attributes; number++) {
            CUattributeValue value{};
            std::memcpy(&value, attributes[number].value, sizeof value);
            PILOTLIGHT_TRY(graph_driver().kernel_node_set_attribute(*made, attributes[number].id, &value));
        }
        return OK;
    }

    const CUcontext context_;
    const char *const bytes_;
    Header header_{};
    const ImageEntry *images_;
    const KernelEntry *kernels_;
    const GraphEntry *graphs_;
    std::vector<CUmodule> modules_;
    std::vector<CUfunction> functions_;
    std::vector<char> silent_;  // of which the driver says no parameters
    std::unique_ptr<std::atomic<bool>[]> loaded_;  // all kernels of a graph are: nothing of them changes any more
    std::vector<CUgraphExec> execs_;
    std::vector<Unmade> unmade_;
    std::array<std::uint64_t, NUM_PARTS> spent_{};
    std::mutex lock_;
};

int loaded_graph(const Archive *archive, std::uint32_t number, LoadedGraph *graph) { return archive->loaded(number, graph); }

}  // namespace pilotlight

using namespace pilotlight;

// Opens an archive for an arena at `arena_address`; the bytes stay the caller's until it is closed.
PILOTLIGHT_EXPORT int pilotlight_archive_open(CUcontext context, const char *bytes, std::uint64_t size, std::uint64_t arena_address,
                                              Archive **archive, std::uint64_t *num_graphs) {
    if (int failed = open_graph_driver()) return failed;
    if (int failed = check_archive(bytes, size)) return failed;
    auto made = std::make_unique<Archive>(context, bytes);
    if (made->header().arena_address != arena_address)
        return fail(TAKEN, "these graphs are for an arena at " + std::to_string(made->header().arena_address) + ", not at " +
                               std::to_string(arena_address));
    *num_graphs = made->header().num_graphs;
    *archive = made.release();
    return OK;
}

PILOTLIGHT_EXPORT std::uint64_t pilotlight_archive_tag(Archive *archive, std::uint32_t number) { return archive->tag(number); }
// The name of a kernel; null behind the last.
PILOTLIGHT_EXPORT const char *pilotlight_archive_kernel(Archive *archive, std::uint32_t number) { return archive->kernel_name(number); }
PILOTLIGHT_EXPORT int pilotlight_archive_offer(Archive *archive, std::uint32_t number, CUfunction loaded) { return archive->offer(number, loaded); }
PILOTLIGHT_EXPORT int pilotlight_archive_load(Archive *archive, std::uint32_t number) { return archive->load(number); }
PILOTLIGHT_EXPORT void pilotlight_archive_spent(Archive *archive, std::uint64_t *parts) { archive->spent(parts); }
PILOTLIGHT_EXPORT int pilotlight_archive_build(Archive *archive, std::uint32_t number, CUstream stream) {
    return archive->build(number, stream);
}
PILOTLIGHT_EXPORT int pilotlight_archive_advance(Archive *archive, std::uint32_t number, CUstream stream, std::uint64_t *left) {
    return archive->advance(number, stream, left);
}
PILOTLIGHT_EXPORT int pilotlight_archive_launch(Archive *archive, std::uint32_t number, CUstream stream) {
    return archive->launch(number, stream);
}
PILOTLIGHT_EXPORT int pilotlight_archive_check_addresses(Archive *archive, std::uint32_t from, std::uint32_t to, const std::uint64_t *ranges,
                                                         std::uint64_t count, std::uint64_t first, std::uint64_t stop,
                                                         std::uint64_t *elsewhere) {
    return archive->check_addresses(from, to, ranges, count, first, stop, elsewhere);
}
PILOTLIGHT_EXPORT int pilotlight_archive_walk(Archive *archive, std::uint32_t number, CUstream stream) {
    return archive->walk(number, stream);
}
// Which of an archive's kernels this process cannot load; it needs no arena. `*text` is the caller's, to be given to pilotlight_free.
PILOTLIGHT_EXPORT int pilotlight_archive_prove(CUcontext context, const char *bytes, std::uint64_t size, char **text) {
    if (int failed = open_graph_driver()) return failed;
    if (int failed = check_archive(bytes, size)) return failed;
    PILOTLIGHT_TRY(driver().ctx_set_current(context));
    *text = strdup(Archive(context, bytes).refused().c_str());
    return *text ? OK : fail(CUDA_ERROR_OUT_OF_MEMORY, "the host has no memory for an archive's kernels");
}
PILOTLIGHT_EXPORT void pilotlight_archive_close(Archive *archive) { delete archive; }
