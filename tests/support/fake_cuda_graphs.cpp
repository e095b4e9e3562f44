// The fake libcuda's modules, kernels and graphs. A kernel's form is read from its image, as the driver reads it, and so are the rules by which
// a node is refused. A launch writes to the address in a kernel's first parameter what its code, its shape and its other parameters make: so
// another image, other parameters or another order give other bytes. An address without memory ends the context, as on a device.
#include "fake_cuda_graphs.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <set>
#include <tuple>

namespace {

constexpr int INVALID_VALUE = 1, INVALID_IMAGE = 200, INVALID_HANDLE = 400, NOT_FOUND = 500;
constexpr int MAX_SHARED_BYTES = 232448, DEFAULT_SHARED_BYTES = 49152;
constexpr int CLUSTER_DIMENSION = 4, PORTABLE_CLUSTER = 8, NON_PORTABLE_CLUSTER = 14, MAX_DYNAMIC_SHARED = 8;

// Whether images that were pruned are refused: only where modules are loaded whole, which other processes than the recording one do.
bool refuses_pruned() {
    const char *way = std::getenv("CUDA_MODULE_LOADING");
    return way && std::string(way) == "EAGER" && std::getenv("FAKE_CUDA_REFUSES_PRUNED");
}

std::map<Module *, std::unique_ptr<Module>> modules;
std::set<Function *> functions;
int silence = 0;  // of which modules no kernel's parameters are told: of none, of all (1), of those that were pruned (2)
std::map<Graph *, std::unique_ptr<Graph>> graphs;

template <class Value>
Value at(const std::string &bytes, std::size_t place) {
    Value value{};
    if (place + sizeof value <= bytes.size()) std::memcpy(&value, &bytes[place], sizeof value);
    return value;
}

// Notes of a kernel (.nv.info.NAME): how its parameters lie, and with how many threads it must be launched.
void read_notes(const std::string &notes, Function *function) {
    for (std::size_t place = 0; place + 4 <= notes.size();) {
        unsigned char form = notes[place], kind = notes[place + 1];
        std::size_t length = form == 4 ? at<std::uint16_t>(notes, place + 2) : 0;
        if (kind == 0x17) {
            std::size_t ordinal = at<std::uint16_t>(notes, place + 8), offset = at<std::uint16_t>(notes, place + 10);
            std::size_t bytes = at<std::uint32_t>(notes, place + 12) >> 18;
            if (function->params.size() <= ordinal) function->params.resize(ordinal + 1);
            function->params[ordinal] = {offset, bytes};
            function->param_bytes = std::max(function->param_bytes, offset + bytes);
        }
        if (kind == 0x10) {
            function->threads_required = true;
            function->threads = 1;
            for (int axis = 0; axis < 3; axis++) function->threads *= at<std::uint32_t>(notes, place + 4 + 4 * axis);
        }
        place += 4 + length;
    }
}

bool read_image(const char *image, Module *module) {
    if (std::memcmp(image, "\x7f""ELF", 4)) return false;
    std::uint64_t table;
    std::uint16_t count, names;
    std::memcpy(&table, image + 40, 8);
    std::memcpy(&count, image + 60, 2);
    std::memcpy(&names, image + 62, 2);
    auto head = [&](std::uint32_t number, std::size_t place) {
        std::uint64_t value;
        std::memcpy(&value, image + table + 64 * number + place, 8);
        return value;
    };
    auto body = [&](std::uint32_t number) { return std::string(image + head(number, 24), head(number, 32)); };
    auto word = [&](std::uint32_t number, std::size_t place) { return static_cast<std::uint32_t>(head(number, place)); };
    std::map<std::string, std::string> sections;
    std::map<std::string, std::string> of_code;  // the code that a kernel's notes and constants say they belong to
    std::string strings, symbols, symbol_names, all = body(names);
    for (std::uint32_t number = 1; number < count; number++) {
        std::string called = all.c_str() + word(number, 0);
        sections[called] = body(number);
        if (std::uint32_t code = word(number, 44); code < count) of_code[called] = all.c_str() + word(code, 0);
        if (word(number, 4) == 2) symbols = body(number), symbol_names = body(word(number, 40));
    }
    module->is_pruned = sections[".debug_frame"].empty();
    std::vector<std::string> named;
    for (std::size_t place = 0; place + 24 <= symbols.size(); place += 24) {
        std::string name = symbol_names.c_str() + at<std::uint32_t>(symbols, place);
        named.push_back(name);
        if ((symbols[place + 4] & 15) != 2 || !(symbols[place + 5] & 0x10)) continue;
        auto function = std::make_unique<Function>();
        function->module = module;
        function->name = name;
        function->code = sections[".text." + name];
        function->attributes[MAX_DYNAMIC_SHARED] = DEFAULT_SHARED_BYTES;
        auto belongs = [&](const char *prefix) { return of_code[prefix + name] == ".text." + name; };
        if (belongs(".nv.info.") && belongs(".nv.constant0.")) read_notes(sections[".nv.info." + name], function.get());
        function->is_silent = silence == 1 || (silence == 2 && module->is_pruned);
        functions.insert(function.get());
        module->functions[name] = std::move(function);
    }
    const std::string &of_all = sections[".nv.info"];
    for (std::size_t place = 0; place + 12 <= of_all.size(); place += 12) {
        std::uint32_t symbol = at<std::uint32_t>(of_all, place + 4);
        if (of_all[place + 1] != 0x2f || symbol >= named.size() || !module->functions.count(named[symbol])) continue;
        module->functions[named[symbol]]->registers = at<std::uint32_t>(of_all, place + 8);
    }
    return true;
}

int add(Graph *graph, Node *const *before, const EdgeData *data, std::size_t count, std::unique_ptr<Node> node, Node **made) {
    if (!graphs.count(graph)) return INVALID_HANDLE;
    std::set<Node *> seen;
    for (std::size_t number = 0; number < count; number++) {
        bool there = false;
        for (auto &one : graph->nodes) there = there || one.get() == before[number];
        if (!there || !seen.insert(before[number]).second) return INVALID_VALUE;
    }
    for (std::size_t number = 0; number < count; number++)
        graph->edges.push_back({before[number], node.get(), data ? data[number] : EdgeData{}});
    *made = node.get();
    graph->nodes.push_back(std::move(node));
    return 0;
}

}  // namespace

int kernel_node(const KernelParams &given, Node *node) {
    Function *function = given.func;
    if (!functions.count(function)) return INVALID_HANDLE;
    function->is_loaded = true;
    if (given.context && given.context != fake_context()) return INVALID_VALUE;
    std::uint64_t threads = std::uint64_t(given.block[0]) * given.block[1] * given.block[2];
    for (unsigned size : given.grid)
        if (!size) return INVALID_VALUE;
    if (!threads || threads > std::uint64_t(function->threads) || (function->threads_required && threads != std::uint64_t(function->threads)))
        return INVALID_VALUE;
    if (given.shared > unsigned(function->attributes[MAX_DYNAMIC_SHARED])) return INVALID_VALUE;
    if (given.params && given.extra) return INVALID_VALUE;
    node->type = KERNEL;
    node->kernel = given;
    node->bytes.assign(function->param_bytes, '\0');
    if (given.extra) {
        std::size_t bytes = 0;
        const char *buffer = nullptr;
        for (void **item = given.extra; *item; item += 2) {
            if (*item == reinterpret_cast<void *>(1)) buffer = static_cast<char *>(item[1]);
            if (*item == reinterpret_cast<void *>(2)) bytes = *static_cast<std::size_t *>(item[1]);
        }
        if (!buffer || bytes != function->param_bytes) return INVALID_VALUE;
        node->bytes.assign(buffer, bytes);
        node->packed = true;
    } else if (function->param_bytes && !function->is_silent) {
        if (!given.params) return INVALID_VALUE;
        for (std::size_t param = 0; param < function->params.size(); param++) {
            if (!given.params[param]) return INVALID_VALUE;
            std::memcpy(&node->bytes[function->params[param].first], given.params[param], function->params[param].second);
        }
    }
    return 0;
}

int set_attribute(Node *node, int id, const Attribute &value) {
    if (id == CLUSTER_DIMENSION) {
        std::uint32_t sizes[3], product = 1;
        std::memcpy(sizes, &value, sizeof sizes);
        for (int axis = 0; axis < 3; axis++) {
            if (!sizes[axis] || node->kernel.grid[axis] % sizes[axis]) return INVALID_VALUE;
            product *= sizes[axis];
        }
        if (product > PORTABLE_CLUSTER && !node->kernel.func->attributes[NON_PORTABLE_CLUSTER]) return INVALID_VALUE;
    }
    node->attributes[id] = value;
    return 0;
}

extern "C" {

int cuModuleLoadData(Module **module, const void *image) {
    ENTER("cuModuleLoadData");
    auto made = std::make_unique<Module>();
    if (!read_image(static_cast<const char *>(image), made.get())) return INVALID_IMAGE;
    if (made->is_pruned && refuses_pruned()) return INVALID_IMAGE;
    *module = made.get();
    modules[made.get()] = std::move(made);
    return 0;
}
int cuModuleUnload(Module *module) {
    ENTER("cuModuleUnload");
    if (!modules.count(module)) return INVALID_HANDLE;
    for (auto &[name, function] : module->functions) functions.erase(function.get());
    modules.erase(module);
    return 0;
}
int cuModuleGetFunction(Function **function, Module *module, const char *name) {
    ENTER("cuModuleGetFunction");
    auto found = module->functions.find(name);
    if (found == module->functions.end()) return NOT_FOUND;
    *function = found->second.get();
    return 0;
}
int cuModuleGetFunctionCount(unsigned *count, Module *module) { return *count = module->functions.size(), 0; }
int cuModuleEnumerateFunctions(Function **found, unsigned count, Module *module) {
    for (auto &[name, function] : module->functions)
        if (count && count--) *found++ = function.get();
    return 0;
}
int cuFuncLoad(Function *function) {
    if (!functions.count(function)) return INVALID_HANDLE;
    function->is_loaded = true;
    return 0;
}
void fake_silence(int of) { silence = of; }
int cuFuncGetName(const char **name, Function *function) { return *name = function->name.c_str(), 0; }
int cuFuncGetModule(Module **module, Function *function) {
    if (!functions.count(function)) return INVALID_HANDLE;
    *module = function->module;
    return 0;
}
int cuFuncGetParamInfo(Function *function, std::size_t param, std::size_t *offset, std::size_t *bytes) {
    if (!function->is_loaded || function->is_silent || param >= function->params.size()) return INVALID_VALUE;
    std::tie(*offset, *bytes) = function->params[param];
    return 0;
}
int cuFuncGetAttribute(int *value, int id, Function *function) {
    *value = id == 0 ? function->threads : id == 4 ? function->registers : function->attributes[id];
    return 0;
}
int cuFuncSetAttribute(Function *function, int id, int value) {
    ENTER("cuFuncSetAttribute");
    if (id == MAX_DYNAMIC_SHARED && value > MAX_SHARED_BYTES) return INVALID_VALUE;
    function->attributes[id] = value;
    return 0;
}
int cuKernelGetFunction(Function **, void *) { return INVALID_HANDLE; }
int cuPointerGetAttribute(void *kind, int, std::uint64_t address) {
    if (!fake_backed(address, 1)) return INVALID_VALUE;
    *static_cast<unsigned *>(kind) = 2;
    return 0;
}

int cuGraphCreate(Graph **graph, unsigned) {
    ENTER("cuGraphCreate");
    auto made = std::make_unique<Graph>();
    *graph = made.get();
    graphs[made.get()] = std::move(made);
    return 0;
}
int cuGraphDestroy(Graph *graph) {
    ENTER("cuGraphDestroy");
    return graphs.erase(graph) ? 0 : INVALID_HANDLE;
}
int cuGraphGetNodes(Graph *graph, Node **nodes, std::size_t *count) {
    *count = graph->nodes.size();
    for (std::size_t number = 0; nodes && number < *count; number++) nodes[number] = graph->nodes[number].get();
    return 0;
}
int cuGraphGetEdges_v2(Graph *graph, Node **from, Node **to, EdgeData *data, std::size_t *count) {
    *count = graph->edges.size();
    for (std::size_t number = 0; from && number < *count; number++)
        from[number] = graph->edges[number].from, to[number] = graph->edges[number].to, data[number] = graph->edges[number].data;
    return 0;
}
int cuGraphNodeGetType(Node *node, int *type) { return *type = node->type, 0; }
int cuGraphKernelNodeGetParams_v2(Node *node, KernelParams *params) {
    Function *function = node->kernel.func;
    *params = node->kernel;
    params->params = params->extra = nullptr;
    if (node->packed) {
        node->extra_bytes = node->bytes.size();
        void *extra[] = {reinterpret_cast<void *>(1), &node->bytes[0], reinterpret_cast<void *>(2), &node->extra_bytes, nullptr};
        std::copy(extra, extra + 5, node->extra);
        params->extra = node->extra;
    } else if (function->param_bytes) {
        node->places.clear();
        for (auto &[offset, bytes] : function->params) node->places.push_back(&node->bytes[offset]);
        params->params = node->places.data();
    }
    return 0;
}
int cuGraphKernelNodeGetAttribute(Node *node, int id, Attribute *value) {
    auto set = node->attributes.find(id);
    *value = set == node->attributes.end() ? Attribute{} : set->second;
    return 0;
}
int cuGraphKernelNodeSetAttribute(Node *node, int id, const Attribute *value) {
    ENTER("cuGraphKernelNodeSetAttribute");
    return set_attribute(node, id, *value);
}
int cuGraphAddKernelNode_v2(Node **made, Graph *graph, Node *const *before, std::size_t count, const KernelParams *given) {
    ENTER("cuGraphAddKernelNode");
    auto node = std::make_unique<Node>();
    if (int refused = kernel_node(*given, node.get())) return refused;
    return add(graph, before, nullptr, count, std::move(node), made);
}
int cuGraphAddNode_v2(Node **made, Graph *graph, Node *const *before, const EdgeData *data, std::size_t count, AnyParams *given) {
    ENTER("cuGraphAddNode");
    auto node = std::make_unique<Node>();
    if (given->type != KERNEL) return INVALID_VALUE;
    if (int refused = kernel_node(given->kernel, node.get())) return refused;
    return add(graph, before, data, count, std::move(node), made);
}
int cuGraphAddEmptyNode(Node **made, Graph *graph, Node *const *before, std::size_t count) {
    return add(graph, before, nullptr, count, std::make_unique<Node>(), made);
}
int fake_add_plain(Node **made, Graph *graph, Node *const *before, std::size_t count, int type, const char *params, std::size_t bytes) {
    auto node = std::make_unique<Node>();
    node->type = type;
    node->bytes.assign(params, bytes);
    return add(graph, before, nullptr, count, std::move(node), made);
}
void fake_depend(Graph *graph, Node *from, Node *to) { graph->edges.push_back({from, to, EdgeData{}}); }
int cuGraphInstantiateWithFlags(Exec **exec, Graph *graph, std::uint64_t) {
    ENTER("cuGraphInstantiate");
    instantiating();
    *exec = new Exec;
    for (auto &node : graph->nodes) (*exec)->nodes.push_back(*node);
    return 0;
}
int cuGraphUpload(Exec *, void *) { return fake_entered("cuGraphUpload"); }
int cuGraphLaunch(Exec *exec, void *) {
    ENTER("cuGraphLaunch");
    for (const Node &node : exec->nodes) run(node);
    return 0;
}
int cuGraphExecDestroy(Exec *exec) {
    ENTER("cuGraphExecDestroy");
    return delete exec, 0;
}
}
