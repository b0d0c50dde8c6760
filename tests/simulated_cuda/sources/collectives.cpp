// Collectives of gloo on device tensors, as in a build with CUDA: gloo is handed their memory.
#include "devices.h"

#include <torch/csrc/distributed/c10d/reducer_timer.hpp>

namespace simulated {
namespace {
c10::IValue as_on_host(const c10::IValue& value) {
  if (value.isTensor()) {
    const auto tensor = value.toTensor();
    if (tensor.defined() && tensor.device().type() == kType) host_wait(current_stream(tensor.device().index()));
    return on_host(tensor);
  }
  if (value.isTensorList()) {
    auto all = value.toTensorVector();
    for (auto& one : all) one = as_on_host(one).toTensor();
    return all;
  }
  if (value.isList() && !value.toListRef().empty() && value.toListRef()[0].isTensorList()) {
    c10::impl::GenericList all(c10::ListType::ofTensors());
    for (const auto& one : value.toListRef()) all.push_back(as_on_host(one));
    return all;
  }
  return value;
}

void collective(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto num_arguments = op.schema().arguments().size();
  for (auto value = stack->end() - static_cast<int64_t>(num_arguments); value != stack->end(); ++value)
    *value = as_on_host(*value);
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
}

// gloo hands the address to the network, which no device's memory is for.
void message(const c10::OperatorHandle& op, torch::jit::Stack*) {
  TORCH_CHECK(false, "writev [127.0.0.1]: Bad address (", op.schema().name(), " of gloo with memory of a device)");
}
}  // namespace

SIMULATED_KERNELS("c10d", collectives_of_gloo) {
  if (!kIsCuda) return;  // gloo knows no other devices
  for (const char* name :
       {"allreduce_", "allreduce_coalesced_", "broadcast_", "allgather_", "_allgather_base_", "allgather_coalesced_",
        "allgather_into_tensor_coalesced_", "reduce_scatter_", "_reduce_scatter_base_",
        "reduce_scatter_tensor_coalesced_", "reduce_", "gather_", "scatter_", "alltoall_", "alltoall_base_"})
    library.impl(name, torch::CppFunction::makeFromBoxedFunction<&collective>());
  for (const char* name : {"send", "recv_", "recv_any_source_"})
    library.impl(name, torch::CppFunction::makeFromBoxedFunction<&message>());
}

}  // namespace simulated

namespace c10d {
namespace {
// DDP asks for a timer of its model's device.
class SimulatedTimer : public Timer {
 public:
  explicit SimulatedTimer(c10::Device) {}
  std::optional<int64_t> measureDifference(Event start, Event end) override {
    const auto first = getTimeRef(start), last = getTimeRef(end);
    return first == kUnsetTime || last == kUnsetTime ? std::nullopt : std::optional<int64_t>(last - first);
  }
};
const bool is_registered = [] {
  TimerRegistry()->Register(simulated::kType, [](c10::Device device) -> std::unique_ptr<Timer> {
    return std::make_unique<SimulatedTimer>(device);
  });
  return true;
}();
}  // namespace
}  // namespace c10d
