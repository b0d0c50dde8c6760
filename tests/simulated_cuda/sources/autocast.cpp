// Autocast for kinds of devices from outside, which bring it with them: matrix products in halves, losses in float32.
#include "devices.h"

#include <ATen/autocast_mode.h>
#include <ATen/Operators.h>

namespace simulated {
TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, library) { library.fallback(torch::CppFunction::makeFallthrough()); }

TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
  using namespace at::autocast;
#define IN_HALVES(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, lower_precision_fp)
  AT_FORALL_LOWER_PRECISION_FP(IN_HALVES)
#undef IN_HALVES
#define IN_FLOAT32(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32)
  AT_FORALL_FP32(IN_FLOAT32)
#undef IN_FLOAT32
}
}  // namespace simulated
