// Kernels as the driver knows them: what tells two of one name apart, and which image one was loaded from.
//
// A name alone does not: a compiler that makes a kernel anew for other constants gives it the same name each time, in an image of its own.
#pragma once

#include <map>
#include <set>
#include <string>
#include <vector>

#include "archive.h"
#include "graph_api.h"

namespace pilotlight {

// What the driver says of a kernel, and does not change while it is loaded.
struct KernelForm {
    std::vector<std::uint32_t> params;  // pairs of (offset, bytes)
    std::uint32_t param_bytes = 0;
    int max_threads = 0, registers = 0, static_shared = 0;
};

KernelForm form_of(CUfunction function);

// A module's kernel, loaded whole: modules may be loaded lazily, and of a kernel that is not there yet the driver need not say its form.
int load_kernel(CUmodule module, const char *name, CUfunction *function);

// Whether the driver says nothing of parameters that there are: it then copies none from places, and takes them in one buffer alone.
bool is_silent(const KernelForm &wanted, const KernelForm &found);

// Allows a loaded kernel what the recorded one was allowed. MISUSED: it takes other parameters; `layout` has the recorded ones.
int adopt_kernel(CUfunction loaded, const char *name, const KernelEntry &recorded, const std::uint32_t *layout, bool *silent);

// "0+8 8+8 16+4": offsets and bytes.
std::string layout_text(const std::uint32_t *params, std::size_t count);

// What a node of an archive at `bytes` asks of the driver for its kernel, and what the driver has loaded.
std::string launch_text(const char *bytes, const KernelEntry &kernel, const NodeEntry &node, const AttributeEntry *attributes, CUfunction loaded);

// What a kernel has otherwise than another; empty where they are alike.
std::string difference(const KernelForm &wanted, const KernelForm &found);

// Finds the recorded image of loaded kernels. Lives no longer than one dump.
class ImageFinder {
  public:
    // Needs the graph driver.
    ImageFinder();
    // MISUSED: there is none, or there are several and nothing says which one was loaded.
    int find(CUfunction function, const std::string &name, std::uint32_t *number);

  private:
    int names_in(CUmodule module, const std::string &name, std::set<std::string> **names);

    std::map<CUmodule, std::uint32_t> known_;  // by whoever loaded them
    std::map<CUmodule, std::set<std::string>> modules_;
};

}  // namespace pilotlight
