#include "kernels.h"

#include <algorithm>
#include <cstring>

#include "images.h"

namespace pilotlight {

namespace {

constexpr std::size_t MAX_PARAMS = 4096;  // as `check_archive` takes

std::string number_text(const char *what, int wanted, int found) {
    return wanted == found ? "" : std::string(what) + " " + std::to_string(found) + ", not " + std::to_string(wanted) + "; ";
}

}  // namespace

KernelForm form_of(CUfunction function) {
    auto attribute = [function](int id) {
        int value = 0;
        return graph_driver().func_get_attribute(&value, id, function) == CUDA_SUCCESS ? value : -1;
    };
    KernelForm form;
    form.max_threads = attribute(FUNC_MAX_THREADS);
    form.registers = attribute(FUNC_REGISTERS);
    form.static_shared = attribute(FUNC_STATIC_SHARED_BYTES);
    std::size_t offset = 0, bytes = 0;
    for (std::size_t param = 0; param < MAX_PARAMS && graph_driver().func_get_param(function, param, &offset, &bytes) == CUDA_SUCCESS; param++) {
        form.params.push_back(offset);
        form.params.push_back(bytes);
        form.param_bytes = std::max<std::uint32_t>(form.param_bytes, offset + bytes);
    }
    return form;
}

int load_kernel(CUmodule module, const char *name, CUfunction *function) {
    PILOTLIGHT_TRY(graph_driver().module_get_function(function, module, name));
    PILOTLIGHT_TRY(graph_driver().func_load(*function));
    return OK;
}

bool is_silent(const KernelForm &wanted, const KernelForm &found) { return found.params.empty() && !wanted.params.empty(); }

std::string layout_text(const std::uint32_t *params, std::size_t count) {
    std::string text;
    for (std::size_t param = 0; param < count; param++)
        text += (param ? " " : "") + std::to_string(params[2 * param]) + "+" + std::to_string(params[2 * param + 1]);
    return text.empty() ? "none" : text;
}

int adopt_kernel(CUfunction loaded, const char *name, const KernelEntry &recorded, const std::uint32_t *layout, bool *silent) {
    // The driver reads as many parameters as the kernel has, from wherever it is told.
    KernelForm wanted, form = form_of(loaded);
    wanted.params.assign(layout, layout + 2 * recorded.num_params);
    *silent = is_silent(wanted, form);
    if (!*silent && form.params != wanted.params)
        return fail(MISUSED, std::string("the kernel ") + name + " takes parameters " + layout_text(form.params.data(), form.params.size() / 2) +
                                 " as loaded, and " + layout_text(layout, recorded.num_params) + " were recorded");
    const std::pair<int, std::int32_t> settings[] = {{FUNC_MAX_DYNAMIC_SHARED_BYTES, recorded.max_dynamic_shared},
                                                     {FUNC_CARVEOUT, recorded.carveout},
                                                     {FUNC_NON_PORTABLE_CLUSTER, recorded.non_portable_cluster},
                                                     {FUNC_CLUSTER_POLICY, recorded.cluster_policy}};
    for (auto [id, value] : settings)
        if (value > 0 || (id == FUNC_CARVEOUT && value == 0)) PILOTLIGHT_TRY(graph_driver().func_set_attribute(loaded, id, value));
    return OK;
}

std::string launch_text(const char *bytes, const KernelEntry &kernel, const NodeEntry &node, const AttributeEntry *attributes, CUfunction loaded) {
    auto triple = [](const std::uint32_t *values) {
        return std::to_string(values[0]) + "x" + std::to_string(values[1]) + "x" + std::to_string(values[2]);
    };
    auto *layout = reinterpret_cast<const std::uint32_t *>(bytes + kernel.params);
    std::string text = std::string("kernel ") + (bytes + kernel.name) + " of image " + std::to_string(kernel.image) + ", grid " + triple(node.grid) +
                       ", block " + triple(node.block) + ", " + std::to_string(node.shared_bytes) + " bytes of shared memory, " +
                       std::to_string(node.param_bytes) + " bytes of parameters " +
                       (node.packed ? "in one buffer" : layout_text(layout, kernel.num_params)) + ", attributes";
    for (std::uint32_t attribute = 0; attribute < node.num_attributes; attribute++) {
        std::uint32_t words[3];
        std::memcpy(words, attributes[attribute].value, sizeof words);
        text += " " + std::to_string(attributes[attribute].id) + "=" + triple(words);
    }
    text += "; recorded with at most " + std::to_string(kernel.max_dynamic_shared) + " bytes of dynamic shared memory";
    if (!loaded) return text + "; not loaded";
    KernelForm form = form_of(loaded);
    int most_shared = -1;
    graph_driver().func_get_attribute(&most_shared, FUNC_MAX_DYNAMIC_SHARED_BYTES, loaded);
    return text + "; loaded with " + std::to_string(most_shared) + ", " + std::to_string(form.static_shared) + " static, at most " +
           std::to_string(form.max_threads) + " threads, " + std::to_string(form.registers) + " registers, parameters " +
           layout_text(form.params.data(), form.params.size() / 2);
}

std::string difference(const KernelForm &wanted, const KernelForm &found) {
    std::string text = number_text("threads at most", wanted.max_threads, found.max_threads) +
                       number_text("registers", wanted.registers, found.registers) +
                       number_text("bytes of static shared memory", wanted.static_shared, found.static_shared);
    if (wanted.params != found.params)
        text += "parameters " + layout_text(found.params.data(), found.params.size() / 2) + ", not " +
                layout_text(wanted.params.data(), wanted.params.size() / 2) + "; ";
    return text.empty() ? text : text.substr(0, text.size() - 2);
}

ImageFinder::ImageFinder() {
    for (auto [function, image] : images_of_functions()) {
        CUmodule module = nullptr;
        if (graph_driver().func_get_module(&module, reinterpret_cast<CUfunction>(function)) == CUDA_SUCCESS) known_[module] = image;
    }
}

int ImageFinder::names_in(CUmodule module, const std::string &name, std::set<std::string> **names) {
    std::set<std::string> &found = modules_[module];
    *names = &found;
    if (!found.empty()) return OK;
    unsigned count = 0;
    PILOTLIGHT_TRY(graph_driver().module_count(&count, module));
    std::vector<CUfunction> functions(count);
    PILOTLIGHT_TRY(graph_driver().module_enumerate(functions.data(), count, module));
    for (CUfunction other : functions) {
        const char *other_name = nullptr;
        if (graph_driver().func_get_name(&other_name, other) == CUDA_SUCCESS) found.insert(other_name);
    }
    found.insert(name);
    return OK;
}

int ImageFinder::find(CUfunction function, const std::string &name, std::uint32_t *number) {
    CUmodule module = nullptr;
    PILOTLIGHT_TRY(graph_driver().func_get_module(&module, function));
    const auto &images = recorded_images();
    auto known = known_.find(module);
    if (known != known_.end() && images[known->second].kernels.count(name)) {
        *number = known->second;
        return OK;
    }
    std::set<std::string> *names = nullptr;
    if (int failed = names_in(module, name, &names)) return failed;
    // The smallest one with all of the module's kernels in it.
    std::size_t best = images.size();
    int as_good = 0;
    for (std::size_t image = 0; image < images.size(); image++) {
        const auto &there = images[image].kernels;
        if (!std::includes(there.begin(), there.end(), names->begin(), names->end())) continue;
        if (best == images.size() || there.size() < images[best].kernels.size()) {
            best = image;
            as_good = 1;
        } else if (there.size() == images[best].kernels.size()) {
            as_good++;
        }
    }
    if (best == images.size()) return fail(MISUSED, "no recorded image has the kernel " + name);
    if (as_good > 1)
        return fail(MISUSED, std::to_string(as_good) + " recorded images have the kernel " + name + ", and nothing says which one was loaded");
    *number = best;
    return OK;
}

}  // namespace pilotlight
