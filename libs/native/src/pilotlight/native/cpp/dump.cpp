// Writes captured graphs down: see archive.h.
#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <map>
#include <unordered_map>
#include <vector>

#include "archive.h"
#include "graph_api.h"
#include "images.h"
#include "kernels.h"

namespace pilotlight {

int check_node(int type, const std::string &kernel) {
    static const char *const TYPES[] = {"kernel",       "memcpy",           "memset",         "host",      "graph",    "empty",        "wait_event",
                                        "event_record", "ext_semas_signal", "ext_semas_wait", "mem_alloc", "mem_free", "batch_mem_op", "conditional"};
    // torch writes a generator's state into the graph's inputs at each replay, which a launch by the driver leaves out.
    static const char *const RANDOM[] = {"philox", "curand", "distribution_", "dropout", "random_", "randperm", "bernoulli"};
    if (type != KERNEL && type != MEMCPY && type != MEMSET && type != EMPTY) {
        bool known = type >= 0 && type < static_cast<int>(sizeof TYPES / sizeof *TYPES);
        std::string name = known ? TYPES[type] : "type_" + std::to_string(type);
        return fail(MISUSED, "a graph has a node of type " + name + ", which no other process can have");
    }
    std::string lower(kernel);
    for (char &letter : lower) letter = letter >= 'A' && letter <= 'Z' ? char(letter + 32) : letter;
    for (const char *word : RANDOM)
        if (lower.find(word) != std::string::npos) return fail(MISUSED, "the kernel " + kernel + " draws random numbers, which no graph repeats");
    return OK;
}

namespace {

// What was found in the parameters of all nodes.
struct Report {
    std::uint64_t nodes, kernels, images, image_bytes, addresses_inside, addresses_outside, images_whole, params_unknown;
};

class Bytes {
  public:
    std::uint64_t put(const void *data, std::size_t size) {
        while (bytes.size() % 16) bytes += '\0';
        std::uint64_t place = bytes.size();
        bytes.append(static_cast<const char *>(data), size);
        return place;
    }
    template <class Entry>
    std::uint64_t put(const std::vector<Entry> &entries) {
        return put(entries.data(), entries.size() * sizeof(Entry));
    }
    std::string bytes;
};

struct KnownKernel {
    std::string name;
    KernelEntry entry;
    KernelForm form;
    std::map<int, CUattributeValue> plain;  // attributes of a node without any
};

class Dumper {
  public:
    // The images of `whole` are not pruned: these are names of kernels.
    Dumper(std::uint64_t arena_address, std::uint64_t arena_bytes, std::set<std::string> whole)
        : arena_address_(arena_address), arena_bytes_(arena_bytes), whole_(std::move(whole)) {}
    ~Dumper() {
        if (scratch_) graph_driver().graph_destroy(scratch_);
    }

    int run(const std::uint64_t *graphs, const std::uint64_t *tags, int count, bool prune, std::string *made, Report *report) {
        PILOTLIGHT_TRY(graph_driver().graph_create(&scratch_, 0));
        Header header{};
        out_.put(&header, sizeof header);
        std::vector<GraphEntry> entries;
        for (int number = 0; number < count; number++) {
            GraphEntry entry{};
            entry.tag = tags[number];
            if (int failed = dump(reinterpret_cast<CUgraph>(graphs[number]), &entry)) return failed;
            entries.push_back(entry);
        }
        std::vector<ImageEntry> images;
        if (int failed = put_images(prune, &images)) return failed;
        std::vector<KernelEntry> kernels;
        for (KnownKernel &kernel : kernels_) {
            kernel.entry.name = out_.put(kernel.name.c_str(), kernel.name.size() + 1);
            kernel.entry.params = out_.put(kernel.form.params);
            kernel.entry.num_params = kernel.form.params.size() / 2;
            kernels.push_back(kernel.entry);
        }
        std::memcpy(header.magic, MAGIC, sizeof MAGIC);
        header.num_images = images.size();
        header.num_kernels = kernels.size();
        header.num_graphs = entries.size();
        header.images = out_.put(images);
        header.kernels = out_.put(kernels);
        header.graphs = out_.put(entries);
        header.total_bytes = out_.bytes.size();
        header.arena_address = arena_address_;
        header.arena_bytes = arena_bytes_;
        std::memcpy(&out_.bytes[0], &header, sizeof header);
        *made = std::move(out_.bytes);
        report_.kernels = kernels.size();
        report_.images = images.size();
        *report = report_;
        return check_archive(made->data(), made->size());
    }

  private:
    // Nodes in an order in which every edge leads forward; of those that may come next, the one that was made first.
    int in_order(CUgraph graph, std::vector<CUgraphNode> *nodes, std::vector<EdgeEntry> *edges) {
        std::size_t num_nodes = 0, num_edges = 0;
        PILOTLIGHT_TRY(graph_driver().graph_get_nodes(graph, nullptr, &num_nodes));
        std::vector<CUgraphNode> made(num_nodes);
        if (num_nodes) PILOTLIGHT_TRY(graph_driver().graph_get_nodes(graph, made.data(), &num_nodes));
        PILOTLIGHT_TRY(graph_driver().graph_get_edges(graph, nullptr, nullptr, nullptr, &num_edges));
        std::vector<CUgraphNode> from(num_edges), to(num_edges);
        std::vector<CUgraphEdgeData> data(num_edges);
        if (num_edges) PILOTLIGHT_TRY(graph_driver().graph_get_edges(graph, from.data(), to.data(), data.data(), &num_edges));
        std::unordered_map<CUgraphNode, std::uint32_t> number_of;
        for (std::uint32_t number = 0; number < num_nodes; number++) number_of[made[number]] = number;
        std::vector<std::vector<std::uint32_t>> followers(num_nodes);
        std::vector<std::uint32_t> before(num_nodes), place(num_nodes);
        for (std::size_t edge = 0; edge < num_edges; edge++) {
            followers[number_of[from[edge]]].push_back(number_of[to[edge]]);
            before[number_of[to[edge]]]++;
        }
        std::set<std::uint32_t> next;
        for (std::uint32_t number = 0; number < num_nodes; number++)
            if (!before[number]) next.insert(number);
        while (!next.empty()) {
            std::uint32_t number = *next.begin();
            next.erase(next.begin());
            place[number] = nodes->size();
            nodes->push_back(made[number]);
            for (std::uint32_t follower : followers[number])
                if (--before[follower] == 0) next.insert(follower);
        }
        for (std::size_t edge = 0; edge < num_edges; edge++) {
            EdgeEntry entry{place[number_of[from[edge]]], place[number_of[to[edge]]], {}};
            std::memcpy(entry.data, &data[edge], sizeof entry.data);
            edges->push_back(entry);
        }
        std::stable_sort(edges->begin(), edges->end(), [](const EdgeEntry &left, const EdgeEntry &right) {
            return left.to < right.to || (left.to == right.to && left.from < right.from);
        });
        return OK;
    }

    int dump(CUgraph graph, GraphEntry *entry) {
        std::vector<CUgraphNode> handles;
        std::vector<EdgeEntry> edges;
        if (int failed = in_order(graph, &handles, &edges)) return failed;
        std::vector<NodeEntry> nodes;
        attributes_.clear();
        parameters_ = Bytes();
        for (CUgraphNode handle : handles) {
            NodeEntry node{};
            if (int failed = dump_node(handle, &node)) return failed;
            nodes.push_back(node);
        }
        for (std::uint32_t edge = 0; edge < edges.size(); edge++) {
            NodeEntry &node = nodes[edges[edge].to];
            if (!node.num_edges++) node.first_edge = edge;
        }
        entry->num_nodes = nodes.size();
        entry->num_edges = edges.size();
        entry->num_attributes = attributes_.size();
        entry->nodes = out_.put(nodes);
        entry->edges = out_.put(edges);
        entry->attributes = out_.put(attributes_);
        entry->parameters = out_.put(parameters_.bytes.data(), parameters_.bytes.size());
        entry->parameter_bytes = parameters_.bytes.size();
        report_.nodes += nodes.size();
        return OK;
    }

    int dump_node(CUgraphNode handle, NodeEntry *node) {
        int type = 0;
        PILOTLIGHT_TRY(graph_driver().node_get_type(handle, &type));
        if (int failed = check_node(type, "")) return failed;
        node->type = type;
        node->first_attribute = attributes_.size();
        std::string params;
        if (type == KERNEL) {
            if (int failed = dump_kernel(handle, node, &params)) return failed;
        } else if (type == MEMCPY) {
            CUmemcpy3D copy{};
            PILOTLIGHT_TRY(graph_driver().memcpy_node_get(handle, &copy));
            params.assign(reinterpret_cast<const char *>(&copy), sizeof copy);
        } else if (type == MEMSET) {
            CUmemsetNodeParams set{};
            PILOTLIGHT_TRY(graph_driver().memset_node_get(handle, &set));
            params.assign(reinterpret_cast<const char *>(&set), sizeof set);
        }
        audit(params);
        node->params = parameters_.put(params.data(), params.size());
        node->param_bytes = params.size();
        node->num_attributes = attributes_.size() - node->first_attribute;
        return OK;
    }

    int dump_kernel(CUgraphNode handle, NodeEntry *node, std::string *params) {
        CUkernelNodeParams given{};
        PILOTLIGHT_TRY(graph_driver().kernel_node_get(handle, &given));
        CUfunction function = given.func;
        if (!function) PILOTLIGHT_TRY(graph_driver().kernel_get_function(&function, given.kern));
        if (int failed = find_kernel(function, given, &node->kernel)) return failed;
        const KnownKernel &kernel = kernels_[node->kernel];
        std::copy(given.grid, given.grid + 3, node->grid);
        std::copy(given.block, given.block + 3, node->block);
        node->shared_bytes = given.sharedMemBytes;
        params->assign(kernel.form.param_bytes, '\0');
        if (given.kernelParams) {
            for (std::size_t param = 0; param < kernel.form.params.size(); param += 2)
                std::memcpy(&(*params)[kernel.form.params[param]], given.kernelParams[param / 2], kernel.form.params[param + 1]);
        } else if (given.extra) {
            // cuBLASLt's kernels have their parameters so: one buffer, with descriptors for the tensor memory accelerator in it.
            const char *buffer = nullptr;
            std::size_t bytes = 0;
            for (void **item = given.extra; *item != PARAM_END; item += 2) {
                if (*item == PARAM_BUFFER_POINTER) buffer = static_cast<const char *>(item[1]);
                if (*item == PARAM_BUFFER_SIZE) bytes = *static_cast<std::size_t *>(item[1]);
            }
            if (!buffer) return fail(MISUSED, "a node of " + kernel.name + " has no parameters");
            params->assign(buffer, bytes);
            node->packed = 1;
        } else if (kernel.form.param_bytes) {
            return fail(MISUSED, "a node of " + kernel.name + " has no parameters");
        }
        for (int id : NODE_ATTRIBUTES) {
            AttributeEntry entry{};
            CUattributeValue value{};
            if (graph_driver().kernel_node_get_attribute(handle, id, &value) != CUDA_SUCCESS) continue;
            auto plain = kernel.plain.find(id);
            if (plain != kernel.plain.end() && !std::memcmp(&plain->second, &value, sizeof value)) continue;
            entry.id = id;
            std::memcpy(entry.value, &value, sizeof value);
            attributes_.push_back(entry);
        }
        return OK;
    }

    int find_kernel(CUfunction function, const CUkernelNodeParams &given, std::uint32_t *number) {
        auto known = number_of_.find(function);
        if (known != number_of_.end()) {
            *number = known->second;
            return OK;
        }
        KnownKernel kernel{};
        const char *name = nullptr;
        PILOTLIGHT_TRY(graph_driver().func_get_name(&name, function));
        kernel.name = name;
        if (int failed = check_node(KERNEL, kernel.name)) return failed;
        auto attribute = [&](int id) {
            int value = 0;
            return graph_driver().func_get_attribute(&value, id, function) == CUDA_SUCCESS ? value : -1;
        };
        kernel.entry.max_dynamic_shared = attribute(FUNC_MAX_DYNAMIC_SHARED_BYTES);
        kernel.entry.carveout = attribute(FUNC_CARVEOUT);
        kernel.entry.non_portable_cluster = attribute(FUNC_NON_PORTABLE_CLUSTER);
        kernel.entry.cluster_policy = attribute(FUNC_CLUSTER_POLICY);
        kernel.form = form_of(function);
        if (int failed = finder_.find(function, kernel.name, &kernel.entry.image)) return failed;
        used_[kernel.entry.image].insert(kernel.name);
        CUgraphNode plain = nullptr;
        PILOTLIGHT_TRY(graph_driver().add_kernel(&plain, scratch_, nullptr, 0, &given));
        for (int id : NODE_ATTRIBUTES) {
            CUattributeValue value{};
            if (graph_driver().kernel_node_get_attribute(plain, id, &value) == CUDA_SUCCESS) kernel.plain[id] = value;
        }
        *number = number_of_[function] = kernels_.size();
        kernels_.push_back(kernel);
        return OK;
    }

    int put_images(bool prune, std::vector<ImageEntry> *entries) {
        std::map<std::uint32_t, std::uint32_t> placed;
        for (auto &[image, names] : used_) {
            std::string data;
            if (int failed = smallest_image(image, names, prune, &data)) return failed;
            placed[image] = entries->size();
            std::uint64_t start = out_.put(data.data(), data.size());
            entries->push_back({start, data.size()});
            report_.image_bytes += data.size();
        }
        for (KnownKernel &kernel : kernels_) kernel.entry.image = placed[kernel.entry.image];
        return OK;
    }

    // The image with those kernels alone; whole, where it cannot be pruned, or the driver says other things of the smaller one's.
    int smallest_image(std::uint32_t image, const std::set<std::string> &names, bool prune, std::string *data) {
        const Image &recorded = recorded_images()[image];
        if (prune && names.size() < recorded.kernels.size()) {
            bool whole = std::any_of(names.begin(), names.end(), [this](const std::string &name) { return whole_.count(name); });
            if (!whole && prune_image(recorded.data, names, data) == OK && prove_image(image, *data, false) == OK) return OK;
            report_.images_whole++;
        }
        *data = recorded.data;
        return prove_image(image, *data, true);
    }

    // Loads an image as another process will, and compares its kernels with those of the graphs.
    int prove_image(std::uint32_t image, const std::string &data, bool whole) {
        NotRecorded guard;
        CUmodule module = nullptr;
        PILOTLIGHT_TRY(graph_driver().module_load(&module, data.data()));
        int failed = OK;
        for (std::size_t number = 0; number < kernels_.size() && !failed; number++)
            if (kernels_[number].entry.image == image) failed = prove_kernel(kernels_[number], module, whole);
        graph_driver().module_unload(module);
        return failed;
    }

    int prove_kernel(const KnownKernel &kernel, CUmodule module, bool whole) {
        CUfunction loaded = nullptr;
        if (int failed = load_kernel(module, kernel.name.c_str(), &loaded)) return failed;
        KernelForm form = form_of(loaded);
        if (whole && is_silent(kernel.form, form) && has_one_image(kernel.name)) {
            // All that there is to go by, then: nothing else has this name, and what the driver does say is compared.
            form.params = kernel.form.params;
            report_.params_unknown++;
        }
        std::string other = difference(kernel.form, form);
        return other.empty() ? OK : fail(MISUSED, "the image kept of the kernel " + kernel.name + " has another one of that name: " + other);
    }

    static bool has_one_image(const std::string &name) {
        const auto &images = recorded_images();
        return std::count_if(images.begin(), images.end(), [&name](const Image &image) { return image.kernels.count(name); }) == 1;
    }

    // Counts the words that are addresses of the device: outside of the arena, another process has something else there.
    void audit(const std::string &params) {
        for (std::size_t at = 0; at + 8 <= params.size(); at += 8) {
            std::uint64_t word = 0;
            std::memcpy(&word, &params[at], 8);
            if (word < 0x10000 || word >> 49) continue;
            if (word >= arena_address_ && word < arena_address_ + arena_bytes_) {
                report_.addresses_inside++;
                continue;
            }
            auto seen = outside_.find(word);
            if (seen == outside_.end()) {
                unsigned kind = 0;
                bool known = graph_driver().pointer_get_attribute(&kind, POINTER_MEMORY_TYPE, word) == CUDA_SUCCESS && kind;
                seen = outside_.emplace(word, known).first;
            }
            if (seen->second) report_.addresses_outside++;
        }
    }

    const std::uint64_t arena_address_, arena_bytes_;
    const std::set<std::string> whole_;
    CUgraph scratch_ = nullptr;
    Bytes out_, parameters_;
    std::vector<AttributeEntry> attributes_;
    std::vector<KnownKernel> kernels_;
    std::unordered_map<CUfunction, std::uint32_t> number_of_;
    ImageFinder finder_;
    std::map<std::uint32_t, std::set<std::string>> used_;  // kernels by image
    std::unordered_map<std::uint64_t, bool> outside_;
    Report report_{};
};

}  // namespace

}  // namespace pilotlight

using namespace pilotlight;

// Writes graphs down. `*bytes` is the caller's, to be given to pilotlight_free. `whole` are names of kernels, each ended by a zero: their
// images keep all of their kernels.
PILOTLIGHT_EXPORT int pilotlight_graphs_dump(const std::uint64_t *graphs, const std::uint64_t *tags, int count, std::uint64_t arena_address,
                                             std::uint64_t arena_bytes, int prune, const char *whole, std::uint64_t whole_bytes, char **bytes,
                                             std::uint64_t *size, Report *report) {
    if (int failed = open_graph_driver()) return failed;
    std::string made;
    Dumper dumper(arena_address, arena_bytes, names_in(whole, whole_bytes));
    if (int failed = dumper.run(graphs, tags, count, prune != 0, &made, report)) return failed;
    *bytes = static_cast<char *>(std::malloc(made.size()));
    if (!*bytes) return fail(CUDA_ERROR_OUT_OF_MEMORY, "the host has no memory for an archive");
    std::memcpy(*bytes, made.data(), made.size());
    *size = made.size();
    return OK;
}

PILOTLIGHT_EXPORT int pilotlight_graphs_check_node(int type, const char *kernel) { return check_node(type, kernel); }

PILOTLIGHT_EXPORT void pilotlight_free(char *bytes) { std::free(bytes); }
