// Mutates archives of graphs and opens them, and images and prunes them, over a fake driver that lies in this file: nothing may crash, and
// what is refused must not have reached the driver. What is taken is built, and the fake reads all that it is given, so that the sanitizers
// see what a driver would read.
//
//     archive_fuzz SEED MUTATIONS FILE...   prints {"mutations": N, "refused": N, "taken": N, "moved": N, "driver_calls": N}
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iterator>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "archive.h"
#include "elf64.h"
#include "graph_api.h"
#include "images.h"
#include "launch_list.h"
#include "pointers.h"

namespace pilotlight {
class Archive;
}

using namespace pilotlight;

extern "C" {
int pilotlight_archive_open(CUcontext, const char *, std::uint64_t, std::uint64_t, Archive **, std::uint64_t *);
std::uint64_t pilotlight_archive_tag(Archive *, std::uint32_t);
int pilotlight_archive_build(Archive *, std::uint32_t, CUstream);
int pilotlight_archive_check_addresses(Archive *, std::uint32_t, std::uint32_t, const std::uint64_t *, std::uint64_t, std::uint64_t, std::uint64_t, std::uint64_t *);
int pilotlight_archive_launch(Archive *, std::uint32_t, CUstream);
int pilotlight_archive_launch_list(Archive *, std::uint32_t, CUstream);
void pilotlight_archive_close(Archive *);
int pilotlight_pointers_move(const char *, std::uint64_t, const std::uint64_t *, std::uint32_t, std::uint64_t, std::uint64_t, char *);
}

namespace {

std::uint64_t driver_calls = 0;
volatile unsigned char seen;
const KernelEntry *kernels = nullptr;  // of the archive that is open
std::uint32_t num_kernels = 0;
const char *bytes = nullptr;

void look(const void *data, std::size_t size) {
    for (std::size_t at = 0; at < size; at++) seen = static_cast<const unsigned char *>(data)[at];
}

template <class Handle>
Handle handle(std::uintptr_t number) {
    return reinterpret_cast<Handle>(number);
}

int load_module(CUmodule *module, const void *image) {
    driver_calls++;
    auto *start = static_cast<const char *>(image);
    ElfHeader header;
    std::memcpy(&header, start, sizeof header);
    for (std::uint32_t number = 0; number < header.num_sections; number++) {
        Section section;
        std::memcpy(&section, start + header.sections + number * sizeof section, sizeof section);
        if (section.type && section.type != NO_BITS) look(start + section.offset, section.bytes);
    }
    *module = handle<CUmodule>(1);
    return 0;
}

int find_function(CUfunction *function, CUmodule, const char *name) {
    driver_calls++;
    look(name, std::strlen(name) + 1);
    std::uint32_t found = num_kernels;
    for (std::uint32_t number = 0; number < num_kernels; number++)
        if (!std::strcmp(bytes + kernels[number].name, name)) found = found == num_kernels ? number : num_kernels + 1;
    // Of two with one name nobody knows whose parameters are given.
    *function = handle<CUfunction>(1 + found);
    return 0;
}

void look_at_params(CUfunction function, void **places, void **extra) {
    std::uintptr_t number = reinterpret_cast<std::uintptr_t>(function) - 1;
    if (extra) {
        look(extra[1], *static_cast<std::size_t *>(extra[3]));
    } else if (number < num_kernels) {
        std::vector<std::uint32_t> layout(2 * kernels[number].num_params);
        if (!layout.empty()) std::memcpy(layout.data(), bytes + kernels[number].params, layout.size() * 4);
        for (std::size_t param = 0; param < layout.size(); param += 2) look(places[param / 2], layout[param + 1]);
    }
}

int add_kernel(CUgraphNode *node, CUgraph, const CUgraphNode *before, std::size_t count, const CUkernelNodeParams *given) {
    driver_calls++;
    look(before, count * sizeof *before);
    look_at_params(given->func, given->kernelParams, given->extra);
    *node = handle<CUgraphNode>(1);
    return 0;
}

int add_any(CUgraphNode *node, CUgraph graph, const CUgraphNode *before, const CUgraphEdgeData *data, std::size_t count, CUgraphNodeParams *given) {
    look(data, count * sizeof *data);
    return add_kernel(node, graph, before, count, &given->kernel);
}

int get_param(CUfunction function, std::size_t param, std::size_t *offset, std::size_t *size) {
    driver_calls++;
    std::uintptr_t number = reinterpret_cast<std::uintptr_t>(function) - 1;
    if (number >= num_kernels || param >= kernels[number].num_params) return 1;
    std::uint32_t pair[2];
    std::memcpy(pair, bytes + kernels[number].params + param * sizeof pair, sizeof pair);
    *offset = pair[0], *size = pair[1];
    return 0;
}

void install_launches() {
    LaunchDriver &api = launch_driver();
    api.kernel = [](const LaunchConfig *config, CUfunction function, void **places, void **extra) {
        driver_calls++;
        look(config->attributes, config->numAttributes * sizeof *config->attributes);
        look_at_params(function, places, extra);
        return 0;
    };
    api.copy = [](const CUmemcpy3D *copy, CUstream) { driver_calls++; look(copy, sizeof *copy); return 0; };
    api.set8 = [](CUdeviceptr, unsigned char, std::size_t, CUstream) { driver_calls++; return 0; };
    api.set16 = [](CUdeviceptr, unsigned short, std::size_t, CUstream) { driver_calls++; return 0; };
    api.set32 = [](CUdeviceptr, unsigned, std::size_t, CUstream) { driver_calls++; return 0; };
    api.rows8 = [](CUdeviceptr, std::size_t, unsigned char, std::size_t, std::size_t, CUstream) { driver_calls++; return 0; };
    api.rows16 = [](CUdeviceptr, std::size_t, unsigned short, std::size_t, std::size_t, CUstream) { driver_calls++; return 0; };
    api.rows32 = [](CUdeviceptr, std::size_t, unsigned, std::size_t, std::size_t, CUstream) { driver_calls++; return 0; };
    api.found = true;
}

void install_fake() {
    driver().ctx_set_current = [](CUcontext) { return 0; };
    GraphDriver &api = graph_driver();
    api.graph_create = [](CUgraph *graph, unsigned) { driver_calls++; *graph = handle<CUgraph>(1); return 0; };
    api.graph_destroy = [](CUgraph) { return 0; };
    api.instantiate = [](CUgraphExec *exec, CUgraph, std::uint64_t) { driver_calls++; *exec = handle<CUgraphExec>(1); return 0; };
    api.upload = [](CUgraphExec, CUstream) { driver_calls++; return 0; };
    api.launch = [](CUgraphExec, CUstream) { driver_calls++; return 0; };
    api.exec_destroy = [](CUgraphExec) { return 0; };
    api.module_load = load_module;
    api.module_unload = [](CUmodule) { return 0; };
    api.module_get_function = find_function;
    api.func_get_param = get_param;
    api.func_get_attribute = [](int *value, int, CUfunction) { driver_calls++; *value = 32; return 0; };
    api.func_set_attribute = [](CUfunction, int, int) { driver_calls++; return 0; };
    api.func_load = [](CUfunction) { driver_calls++; return 0; };
    api.kernel_node_set_attribute = [](CUgraphNode, int, const CUattributeValue *value) { driver_calls++; look(value, sizeof *value); return 0; };
    api.add_kernel = add_kernel;
    api.add_node = add_any;
    api.add_memcpy = [](CUgraphNode *node, CUgraph, const CUgraphNode *before, std::size_t count, const CUmemcpy3D *copy, CUcontext) {
        driver_calls++;
        look(before, count * sizeof *before);
        look(copy, sizeof *copy);
        *node = handle<CUgraphNode>(1);
        return 0;
    };
    api.add_memset = [](CUgraphNode *node, CUgraph, const CUgraphNode *before, std::size_t count, const CUmemsetNodeParams *set, CUcontext) {
        driver_calls++;
        look(before, count * sizeof *before);
        look(set, sizeof *set);
        *node = handle<CUgraphNode>(1);
        return 0;
    };
    api.add_empty = [](CUgraphNode *node, CUgraph, const CUgraphNode *before, std::size_t count) {
        driver_calls++;
        look(before, count * sizeof *before);
        *node = handle<CUgraphNode>(1);
        return 0;
    };
    api.found = true;
    install_launches();
}

constexpr std::uint64_t ELSEWHERE = 0x500000000000, ELSEWHERE_BYTES = std::uint64_t(1) << 40;

// The archive with its addresses written anew, in memory of just its length; null where that is refused, which asks the driver nothing.
std::unique_ptr<char[]> moved(const std::string &made) {
    Header header{};
    std::memcpy(&header, made.data(), std::min(made.size(), sizeof header));
    PointersHeader table{};
    std::uint64_t start = header.pointers * std::uint64_t(16);
    if (start && start <= made.size() && made.size() - start >= sizeof table) std::memcpy(&table, made.data() + start, sizeof table);
    std::vector<std::uint64_t> bases(std::min<std::uint32_t>(table.num_allocations, 64), ELSEWHERE + 4096);
    std::unique_ptr<char[]> exact(new char[made.size()]), out(new char[made.size()]);
    std::memcpy(exact.get(), made.data(), made.size());
    int failed = pilotlight_pointers_move(exact.get(), made.size(), bases.data(), bases.size(), ELSEWHERE, ELSEWHERE_BYTES, out.get());
    return failed ? nullptr : std::move(out);
}

class Mutator {
  public:
    explicit Mutator(std::uint64_t seed) : random_(seed) {}

    std::string mutated(const std::string &whole) {
        std::string made = whole;
        for (std::uint64_t left = 1 + below(3); left--;) mutate(&made);
        return made;
    }

    std::uint64_t below(std::uint64_t limit) { return limit ? random_() % limit : 0; }

  private:
    void mutate(std::string *made) {
        std::uint64_t size = made->size();
        if (!size) return;
        switch (below(8)) {
            case 0: return write<std::uint8_t>(made, random_());
            case 1: (*made)[below(size)] ^= char(1 << below(8)); return;
            case 2: return write<std::uint32_t>(made, interesting(size));
            case 3: return write<std::uint64_t>(made, interesting(size));
            // The tables' words: counts and places.
            case 4: return place<std::uint32_t>(made, 4 * below(20), interesting(size));
            case 5: return place<std::uint64_t>(made, size - 8 * (1 + below(size / 8)), interesting(size));
            case 6: {  // a piece over another one
                std::uint64_t length = 1 + below(64), from = below(size), to = below(size);
                std::string piece = made->substr(from, length);
                made->replace(to, std::min<std::uint64_t>(piece.size(), size - to), piece.substr(0, size - to));
                return;
            }
            default:
                if (below(2)) made->resize(below(size));
                else made->append(1 + below(64), char(below(256)));
                // Half of them say that this is their length.
                if (below(2)) place<std::uint64_t>(made, 48, made->size());
        }
    }

    std::uint64_t interesting(std::uint64_t size) {
        const std::uint64_t values[] = {0, 1, 7, 0x7f, 0xff, 0xffff, 0x7fffffff, 0x80000000, 0xffffffff, size, size - 1, size / 2, ~std::uint64_t(0),
                                        std::uint64_t(1) << 63, std::uint64_t(1) << 32, below(size), below(size) & ~std::uint64_t(15), below(16)};
        return values[below(std::size(values))];
    }

    template <class Word>
    void write(std::string *made, std::uint64_t value) { place<Word>(made, below(made->size()) & ~(sizeof(Word) - 1), value); }

    template <class Word>
    void place(std::string *made, std::uint64_t at, std::uint64_t value) {
        Word word = static_cast<Word>(value);
        if (at <= made->size() && made->size() - at >= sizeof word) std::memcpy(&(*made)[at], &word, sizeof word);
    }

    std::mt19937_64 random_;
};

}  // namespace

int main(int count, char **arguments) {
    if (count < 4) return 2;
    std::vector<std::string> wholes;
    for (int number = 3; number < count; number++) {
        std::ifstream file(arguments[number], std::ios::binary);
        wholes.emplace_back(std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>());
    }
    install_fake();
    Mutator mutator(std::strtoull(arguments[1], nullptr, 10));
    std::uint64_t mutations = std::strtoull(arguments[2], nullptr, 10), refused = 0, taken = 0, all_calls = 0, all_moved = 0;
    for (std::uint64_t number = 0; number < mutations; number++) {
        const std::string &whole = wholes[mutator.below(wholes.size())];
        std::string made = mutator.mutated(whole);
        if (!whole.compare(1, 3, "ELF")) {
            std::string pruned;
            (prune_image(made, {"first"}, &pruned) ? refused : taken)++;
            continue;
        }
        driver_calls = 0;
        // Every other one as it is for an arena that lies elsewhere.
        bool elsewhere_too = mutator.below(2);
        auto exact = elsewhere_too ? moved(made) : nullptr;
        if (driver_calls) {
            std::fprintf(stderr, "mutation %llu: its pointers had reached the driver\n", static_cast<unsigned long long>(number));
            return 1;
        }
        if (exact) {
            made.assign(exact.get(), made.size());
            all_moved++;
        } else {
            // In memory of just that length: one byte too far is seen.
            exact.reset(new char[made.size()]);
            std::memcpy(exact.get(), made.data(), made.size());
        }
        Header header{};
        std::memcpy(&header, made.data(), std::min(made.size(), sizeof header));
        Archive *archive = nullptr;
        std::uint64_t num_graphs = 0;
        if (pilotlight_archive_open(nullptr, exact.get(), made.size(), header.arena_address, &archive, &num_graphs)) {
            if (driver_calls) {
                std::fprintf(stderr, "mutation %llu was refused, and had reached the driver\n", static_cast<unsigned long long>(number));
                return 1;
            }
            refused++;
            continue;
        }
        bytes = exact.get();
        kernels = reinterpret_cast<const KernelEntry *>(bytes + header.kernels);
        num_kernels = header.num_kernels;
        // The words of parameters are anything: half of the arena is known.
        std::uint64_t half = header.arena_address + header.arena_bytes / 2, known[] = {header.arena_address, half}, elsewhere = 0;
        pilotlight_archive_check_addresses(archive, 0, header.num_graphs, known, 1, known[0], half + header.arena_bytes / 4, &elsewhere);
        if (driver_calls) {
            std::fprintf(stderr, "mutation %llu: its addresses had reached the driver\n", static_cast<unsigned long long>(number));
            return 1;
        }
        for (std::uint32_t graph = 0; graph < num_graphs; graph++) {
            pilotlight_archive_tag(archive, graph);
            if (!pilotlight_archive_build(archive, graph, nullptr)) pilotlight_archive_launch(archive, graph, nullptr);
            pilotlight_archive_launch_list(archive, graph, nullptr);
        }
        pilotlight_archive_close(archive);
        taken++;
        all_calls += driver_calls;
    }
    std::printf("{\"mutations\": %llu, \"refused\": %llu, \"taken\": %llu, \"moved\": %llu, \"driver_calls\": %llu}\n", static_cast<unsigned long long>(mutations),
                static_cast<unsigned long long>(refused), static_cast<unsigned long long>(taken), static_cast<unsigned long long>(all_moved),
                static_cast<unsigned long long>(all_calls));
    return 0;
}
