// What Python sees: the module `core`.
#include "devices.h"

#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <torch/csrc/utils/pybind.h>

#include <cstring>
#include <map>

namespace simulated {
const at::CUDAHooksInterface& cuda_hooks();
at::PrivateUse1HooksInterface& hooks_from_outside();
void register_copies();

namespace {
// torch has asked for its hooks by now, and keeps them. The object has no fields, so it can be given our methods.
void replace_hooks() {
  if (!kIsCuda) {
    at::RegisterPrivateUse1HooksInterface(&hooks_from_outside());
    return;
  }
  auto& kept = const_cast<at::CUDAHooksInterface&>(at::detail::getCUDAHooks());
  std::memcpy(static_cast<void*>(&kept), static_cast<const void*>(&cuda_hooks()), sizeof(void*));
}

std::map<std::string, int64_t> read_counts() {
  return {
      {"reads", counts.reads},
      {"to_host", counts.to_host},
      {"to_device", counts.to_device},
      {"waits", counts.waits},
      {"kernels", counts.kernels}};
}

void reset_counts() { counts.reads = counts.to_host = counts.to_device = counts.waits = counts.kernels = 0; }
}  // namespace
}  // namespace simulated

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  using namespace simulated;
  register_copies();
  replace_hooks();
  module.attr("kind") = kIsCuda ? "cuda" : kNameFromOutside;
  // with Python's lock released: who waits here may wait for a thread that wants it
  const py::call_guard<py::gil_scoped_release> unlocked;
  module.def("claim", &claim);
  module.def("start", &start);
  module.def("is_started_here", &is_started_here);
  module.def("is_started_elsewhere", &is_started_elsewhere);
  module.def("num_devices", [] { return static_cast<int>(num_devices()); });
  module.def("count_by_driver", [] { return static_cast<int>(count_by_driver()); });
  module.def("visible_devices", &visible_devices);
  module.def("uuid_of", &uuid_of);
  module.def("current_device", [] { return static_cast<int>(current_device()); });
  module.def("set_device", &set_current_device);
  module.def("break_device", &break_device);
  module.def(
      "synchronize",
      [](int index) {
        start();
        ++counts.waits;
        host_wait_for_device(index);
      },
      unlocked);
  module.def("default_generator", [](int index) { return default_generator(index); });
  module.def("on_host", [](const at::Tensor& tensor) { return on_host(tensor); });
  module.def("wait_for_current_stream", [](int index) { host_wait(current_stream(index)); }, unlocked);
  module.def("resize_storage", &resize_storage);
  module.def("live_bytes", &live_bytes);
  module.def("peak_bytes", &peak_bytes);
  module.def("most_bytes", &most_bytes);
  module.def("reset_peak", &reset_peak);
  module.def("counts", &read_counts);
  module.def("reset_counts", &reset_counts);
}
