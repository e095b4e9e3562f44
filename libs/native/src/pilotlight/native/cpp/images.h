// Kernel images: which were loaded, which kernels they hold, and smaller ones with those alone that are used.
#pragma once

#include <cstdint>
#include <map>
#include <set>
#include <string>
#include <vector>

namespace pilotlight {

struct Image {
    std::string data;
    std::set<std::string> kernels;
};

// Every image that was loaded since recording began, in order.
std::vector<Image> &recorded_images();

// Which of them a kernel was loaded from, by the driver's handle of its function: of those whose loader said so.
std::map<std::uint64_t, std::uint32_t> &images_of_functions();

// While it lives, what this thread loads is not recorded.
class NotRecorded {
  public:
    NotRecorded();
    ~NotRecorded();
    NotRecorded(const NotRecorded &) = delete;
    NotRecorded &operator=(const NotRecorded &) = delete;
};

// Names of the kernels that an image defines; empty for what is no image.
std::set<std::string> kernels_of(const std::string &image);

// Names that each end with a zero.
std::set<std::string> names_in(const char *names, std::uint64_t bytes);

// The image without the code of all kernels but `keep`. MISUSED where its form is not understood.
int prune_image(const std::string &image, const std::set<std::string> &keep, std::string *pruned);

}  // namespace pilotlight
