// Kernels: the CPU's, on the same memory, after the rules of CUDA have been checked.
#include "devices.h"

#include <ATen/EmptyTensor.h>
#include <ATen/native/Copy.h>
#include <ATen/native/DispatchStub.h>
#include <ATen/native/Resize.h>
#include <ATen/native/TensorIterator.h>
#include <ATen/native/transformers/sdp_utils_cpp.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>

#include <cstring>
#include <mutex>
#include <set>

namespace simulated {

at::Tensor on_host(const at::Tensor& tensor) {
  if (!tensor.defined() || tensor.device().type() != kType) return tensor;
  if (tensor.is_sparse()) return sparse_on_host(tensor);
  const auto options = tensor.options().device(at::kCPU).requires_grad(false);
  if (tensor.numel() == 0) return at::empty_strided(tensor.sizes(), tensor.strides(), options);
  auto* kept = new at::Tensor(tensor);
  c10::DataPtr data(tensor.data_ptr(), kept, [](void* one) { delete static_cast<at::Tensor*>(one); }, at::kCPU);
  const auto num_bytes = at::detail::computeStorageNbytes(tensor.sizes(), tensor.strides(), tensor.element_size());
  at::Storage storage(c10::make_intrusive<c10::StorageImpl>(
      c10::StorageImpl::use_byte_size_t(), num_bytes, std::move(data), c10::GetCPUAllocator(), true));
  return at::empty({0}, options).set_(storage, 0, tensor.sizes(), tensor.strides());
}

std::optional<at::Tensor> on_host(const std::optional<at::Tensor>& tensor) {
  return tensor ? std::optional<at::Tensor>(on_host(*tensor)) : std::nullopt;
}

namespace {
at::Tensor empty(
    c10::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
    std::optional<at::Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_generic(
      size, device_allocator(), c10::DispatchKeySet(kKey), c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(
    c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
    std::optional<at::Device> device, std::optional<bool>) {
  c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_strided_generic(
      size, stride, device_allocator(), c10::DispatchKeySet(kKey), c10::dtype_or_default(dtype));
}

std::vector<c10::Device> devices_of(const at::Tensor& one, const at::Tensor& other) {
  std::vector<c10::Device> found;
  for (const auto& tensor : {one, other})
    if (tensor.device().type() == kType) found.push_back(tensor.device());
  return found;
}

constexpr const char* kChangedTooEarly =
    "CUDA may read pinned memory until somebody has waited, and here it was changed before: a batch or buffer was "
    "filled again too early";

// Read a device's memory when the stream comes to it: whoever changes it before is seen, and so is who frees it.
void enqueue_late_read(const c10::Stream& stream, const at::Tensor& from, const at::Tensor& to) {
  const bool is_race = !is_seen(stream, from);
  // memory that is freed is given to the next who asks on the stream that it was allocated on
  const auto kept = stream.id() == stream_of_memory(from) ? from.storage() : at::Storage();
  const c10::weak_intrusive_ptr<c10::StorageImpl> memory(from.storage().getWeakStorageImpl());
  const auto sizes = from.sizes().vec(), strides = from.strides().vec();
  const auto value = at::empty_like(on_host(from), at::MemoryFormat::Contiguous);
  enqueue(stream, [=, offset = from.storage_offset(), dtype = from.dtype()] {
    auto storage = memory.lock();
    if (is_race || !storage) {
      std::memset(value.data_ptr(), kPoison, value.nbytes());
      return;
    }
    const auto tensor = at::detail::make_tensor<c10::TensorImpl>(
        at::Storage(std::move(storage)), c10::DispatchKeySet(kKey), dtype);
    tensor.unsafeGetTensorImpl()->set_sizes_and_strides(sizes, strides, offset);
    value.copy_(on_host(tensor));
    (void)kept;
  });
  enqueue_for_host(stream, [to = alias_of(to), value] { to.copy_(value); });
}

void copy_memory(const at::Tensor& to, const at::Tensor& from, bool non_blocking) {
  if (in_kernel()) {
    on_host(to).copy_(on_host(from));
    return;
  }
  const bool is_to_device = to.device().type() == kType;
  const bool crosses = from.device().type() != to.device().type();
  if (!crosses) {
    Launch launch(devices_of(to, from));
    on_host(to).copy_(on_host(from));
    launch.wrote(to);
    return;
  }
  ++(is_to_device ? counts.to_device : counts.to_host);
  const auto device = is_to_device ? to.device() : from.device();
  const auto stream = current_stream(device.index());
  const bool is_late = non_blocking && is_pinned((is_to_device ? from : to).const_data_ptr());
  start();
  check_health(device.index());
  if (!is_to_device) {
    if (is_late && stream.id() != 0) {
      enqueue_late_read(stream, from, to);
      return;
    }
    at::Tensor value;
    {
      Launch launch({device});
      value = on_host(from).clone();
    }
    // what the device holds now reaches the host when somebody waits; until then the host sees what was there
    enqueue_for_host(stream, [to = alias_of(to), value] { to.copy_(value); });
    if (is_late) return;
    ++counts.waits;
    host_wait(stream);
    return;
  }
  if (is_late) {  // read when the stream comes to it: whoever writes into the host's memory before is seen
    const auto target = alias_of(to), source = alias_of(from);
    enqueue(
        stream,
        [=] {
          on_host(target).copy_(source);
          enqueue_for_host(stream, [source, read = source.clone(at::MemoryFormat::Contiguous)] {
            const auto now = source.contiguous();
            TORCH_CHECK(std::memcmp(read.data_ptr(), now.data_ptr(), read.nbytes()) == 0, kChangedTooEarly);
          });
        },
        target);
    return;
  }
  {
    Launch launch({device});
    on_host(to).copy_(from);
    launch.wrote(to);
  }
  if (non_blocking) return;  // what is not pinned has been read at once
  ++counts.waits;
  host_wait(stream);
}

at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  copy_memory(to, from, non_blocking);
  return to;
}

at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to) {
  to.resize_(from.sizes());
  return copy_from(from, to, false);
}

at::Scalar read_scalar(const at::Tensor& tensor) {
  if (in_kernel()) return on_host(tensor).item();
  ++counts.reads;
  ++counts.waits;
  host_wait(current_stream(tensor.device().index()));
  return on_host(tensor).item();
}

at::Tensor view(const at::Tensor& tensor, c10::SymIntArrayRef size) {
  return at::native::view(tensor, C10_AS_INTARRAYREF_SLOW(size));
}

at::Tensor as_strided(
    const at::Tensor& tensor, c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<c10::SymInt> offset) {
  return at::native::as_strided_tensorimpl(
      tensor, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride),
      offset ? std::optional<int64_t>(offset->expect_int()) : std::nullopt);
}

const at::Tensor& resize(const at::Tensor& tensor, c10::SymIntArrayRef size, std::optional<at::MemoryFormat> format) {
  c10::DeviceGuard guard(tensor.device());
  return at::native::resize_(tensor, C10_AS_INTARRAYREF_SLOW(size), format);
}

at::Tensor& set_storage(
    at::Tensor& tensor, at::Storage storage, c10::SymInt offset, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  return at::native::set_storage_cpu_(
      tensor, storage, offset.expect_int(), C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
}

at::Tensor& set_source(at::Tensor& tensor, at::Storage storage) {
  const auto count = static_cast<int64_t>(storage.nbytes() / tensor.element_size());
  return at::native::set_storage_cpu_(tensor, storage, 0, {count}, {});
}

at::Tensor& set_tensor(at::Tensor& tensor, const at::Tensor& source) {
  return at::native::set_storage_cpu_(
      tensor, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}

at::Tensor convolution(
    const at::Tensor& input, const at::Tensor& weight, const std::optional<at::Tensor>& bias, c10::SymIntArrayRef stride,
    c10::SymIntArrayRef padding, c10::SymIntArrayRef dilation, bool is_transposed, c10::SymIntArrayRef output_padding,
    c10::SymInt groups) {
  Launch launch({input.device()});
  auto found = at::convolution_symint(
      on_host(input), on_host(weight), on_host(bias), stride, padding, dilation, is_transposed, output_padding, groups);
  return launch.made(found, input.device());
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> convolution_backward(
    const at::Tensor& gradient, const at::Tensor& input, const at::Tensor& weight, c10::SymIntArrayRef stride,
    c10::SymIntArrayRef padding, c10::SymIntArrayRef dilation, bool is_transposed, c10::SymIntArrayRef output_padding,
    c10::SymInt groups, std::array<bool, 3> mask) {
  Launch launch({input.device()});
  const std::vector<c10::SymInt> bias{weight.sym_size(is_transposed ? 1 : 0) * (is_transposed ? groups : c10::SymInt(1))};
  auto [of_input, of_weight, of_bias] = at::convolution_backward_symint(
      on_host(gradient), on_host(input), on_host(weight), c10::SymIntArrayRef(bias), stride, padding, dilation,
      is_transposed, output_padding, groups, mask);
  const auto device = input.device();
  return {launch.made(of_input, device), launch.made(of_weight, device), launch.made(of_bias, device)};
}

int64_t attention_by_math(
    const at::Tensor&, const at::Tensor&, const at::Tensor&, const std::optional<at::Tensor>&, double, bool,
    std::optional<double>, bool) {
  return static_cast<int64_t>(sdp::SDPBackend::math);
}

// -- every other kernel

// They take indices of the host, or copy from there.
const std::set<std::string> kMayMix = {"aten::index",          "aten::index_put", "aten::index_put_",
                                       "aten::_index_put_impl_", "aten::copy_",     "aten::_to_copy",
                                       "aten::set_"};
// Like those that are pointwise, they take a tensor of the host that has no dimensions.
const std::set<std::string> kTakeScalars = {"aten::fill_",        "aten::masked_fill", "aten::masked_fill_",
                                            "aten::index_fill",   "aten::index_fill_", "aten::where",
                                            "aten::_fused_adam_", "aten::_fused_adamw_", "aten::_fused_sgd_",
                                            "aten::_fused_adagrad_"};

template <typename Seen>
void for_each_tensor(const c10::IValue& value, Seen seen) {
  if (value.isTensor()) {
    seen(value.toTensor());
  } else if (value.isTensorList()) {
    for (const at::Tensor& one : value.toTensorVector()) seen(one);
  } else if (value.isOptionalTensorList()) {
    for (const auto& one : value.toOptionalTensorVector())
      if (one) seen(*one);
  }
}

bool is_written(const c10::Argument& argument) {
  const auto* alias = argument.alias_info();
  if (alias == nullptr) return false;
  const auto& of_elements = alias->containedTypes();  // those of a list
  return alias->isWrite() ||
      std::any_of(of_elements.begin(), of_elements.end(), [](const auto& one) { return one.isWrite(); });
}

bool takes_scalars(const c10::OperatorHandle& op) {
  const auto& name = op.schema().name();
  return op.hasTag(at::Tag::pointwise) || kTakeScalars.count(name) > 0 || name.rfind("aten::_foreach_", 0) == 0;
}

// The device of a kernel's tensors.
std::optional<c10::Device> device_of(
    const c10::OperatorHandle& op, const std::vector<c10::IValue>& given, const std::string& name) {
  const bool may_mix = kMayMix.count(op.schema().name()) > 0;
  std::optional<c10::Device> device;
  std::optional<c10::Device> other;
  for (size_t i = 0; i < given.size(); ++i)
    for_each_tensor(given[i], [&](const at::Tensor& tensor) {
      if (!tensor.defined()) return;
      const bool is_number = tensor.dim() == 0 &&
          (tensor.unsafeGetTensorImpl()->is_wrapped_number() || takes_scalars(op)) &&
          !is_written(op.schema().arguments()[i]);
      if (tensor.device().type() != kType) {
        if (!is_number) other = tensor.device();
      } else if (device && *device != tensor.device()) {
        other = tensor.device();
      } else {
        device = tensor.device();
      }
    });
  TORCH_CHECK(
      may_mix || !device || !other, "Expected all tensors to be on the same device, but found ", *device, " and ",
      *other, " (", name, ")");
  return device;
}

// Whether the host needs a kernel's result, such as a number of rows, before it can go on. Indices call `nonzero` for a
// mask, and copy those of the host.
bool makes_host_wait(const c10::OperatorHandle& op) {
  return kMayMix.count(op.schema().name()) == 0 &&
      (op.hasTag(at::Tag::dynamic_output_shape) || op.hasTag(at::Tag::data_dependent_output));
}

c10::IValue as_on_host(const c10::IValue& value) {
  if (value.isTensor()) return on_host(value.toTensor());
  if (value.isTensorList()) {
    auto all = value.toTensorVector();
    for (auto& one : all) one = on_host(one);
    return all;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> all;
    for (const auto& one : value.toOptionalTensorVector()) all.push_back(on_host(one));
    return all;
  }
  if (value.isDevice()) return c10::Device(at::kCPU);
  return value;
}

// The CPU's default generator, seeded as the device's for as long as this lives: for kernels that take no generator.
class LentGenerator {
 public:
  explicit LentGenerator(const at::Generator& of_device) : own_(at::detail::getDefaultCPUGenerator()) {
    kept_ = own_.unsafeGetGeneratorImpl()->get_state();
    own_.unsafeGetGeneratorImpl()->set_state(*next_draw(of_device).unsafeGetGeneratorImpl()->get_state());
  }
  ~LentGenerator() { own_.unsafeGetGeneratorImpl()->set_state(*kept_); }
  LentGenerator(const LentGenerator&) = delete;
  LentGenerator& operator=(const LentGenerator&) = delete;

 private:
  at::Generator own_;
  c10::intrusive_ptr<c10::TensorImpl> kept_;
};

// Give back what a kernel changed or resized: the argument itself, with the values that are elsewhere now.
c10::IValue as_given(const c10::IValue& given, const c10::IValue& returned) {
  if (!given.isTensor() || !returned.isTensor()) return given;
  auto tensor = given.toTensor();
  const auto& value = returned.toTensor();
  if (tensor.is_sparse() && tensor.device().type() == kType) {
    replace_sparse(tensor, value);
    return given;
  }
  if (tensor.is_sparse()) return given;
  if (tensor.sizes() != value.sizes()) tensor.resize_(value.sizes());
  if (value.numel() > 0 && tensor.data_ptr() != value.data_ptr()) on_host(tensor).copy_(value);
  return given;
}

void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  run_on_host(op, stack, c10::DispatchKey::CPU);
}

// what `copy_` calls for CUDA tensors, without the dispatcher
void copy_of_iterator(at::TensorIterator& iterator, bool non_blocking) {
  copy_memory(iterator.tensor(0), iterator.tensor(1), non_blocking);
}
}  // namespace

void run_on_host(const c10::OperatorHandle& op, torch::jit::Stack* stack, c10::DispatchKey key) {
  const auto& schema = op.schema();
  const auto num_arguments = schema.arguments().size();
  const auto begin = stack->size() - num_arguments;
  const std::vector<c10::IValue> given(stack->begin() + begin, stack->end());
  const auto name = schema.name() + (schema.overload_name().empty() ? "" : "." + schema.overload_name());
  auto device = device_of(op, given, name);
  for (const auto& argument : given)
    if (!device && argument.isDevice()) device = argument.toDevice();
  if (!device || device->index() < 0) device = c10::Device(kType, current_device());

  static std::recursive_mutex drawing;  // the numbers of a draw are one device's
  std::unique_lock<std::recursive_mutex> held(drawing, std::defer_lock);
  bool takes_generator = false;
  for (size_t i = 0; i < num_arguments; ++i) {
    auto& value = (*stack)[begin + i];
    if (schema.arguments()[i].type()->str().find("Generator") == std::string::npos) {
      continue;
    }
    takes_generator = true;
    const auto generator = value.isNone() ? default_generator(device->index()) : value.toGenerator();
    TORCH_CHECK(
        generator.device().type() == kType, "Expected a '", c10::DeviceTypeName(kType, true), "' device type for generator but found ",
        generator.device(), " (", name, ")");
    if (!held.owns_lock()) held.lock();
    value = next_draw(generator);
  }
  std::optional<LentGenerator> lent;
  if (!takes_generator && op.hasTag(at::Tag::nondeterministic_seeded)) {
    held.lock();
    lent.emplace(default_generator(device->index()));
  }

  if (!in_kernel() && makes_host_wait(op)) {
    ++counts.waits;
    host_wait(current_stream(device->index()));
  }
  Launch launch({*device});
  for (size_t i = 0; i < num_arguments; ++i)
    if (!(*stack)[begin + i].isGenerator()) (*stack)[begin + i] = as_on_host(given[i]);
  try {
    op.redispatchBoxed(c10::DispatchKeySet(key), stack);
  } catch (const c10::Error& error) {
    const std::string message = error.what_without_backtrace();
    const auto says = [&](const char* words) { return message.find(words) != std::string::npos; };
    if (!says("out of bounds") && !says("out of range in self")) throw;
    break_device(device->index(), "device-side assert triggered");  // the kernel finds it, and ends for good
    check_health(device->index());
  }

  const auto first = stack->size() - schema.returns().size();
  for (size_t i = 0; i < schema.returns().size(); ++i) {
    auto& value = (*stack)[first + i];
    const auto* alias = schema.returns()[i].alias_info();
    if (alias == nullptr) {
      if (value.isTensor()) {
        value = on_device(value.toTensor(), *device);
      } else if (value.isTensorList()) {
        auto all = value.toTensorVector();
        for (auto& one : all) one = on_device(one, *device);
        value = all;
      }
      for_each_tensor(value, [&](const at::Tensor& tensor) { launch.wrote(tensor); });
      continue;
    }
    TORCH_CHECK(alias->isWrite(), "the simulation has no kernel for the view ", name);
    for (size_t j = 0; j < num_arguments; ++j) {
      const auto* of_argument = schema.arguments()[j].alias_info();
      if (of_argument == nullptr || of_argument->beforeSets() != alias->beforeSets()) continue;
      value = as_given(given[j], value);
      break;
    }
  }
  for (size_t j = 0; j < num_arguments; ++j)
    if (is_written(schema.arguments()[j]))
      for_each_tensor(given[j], [&](const at::Tensor& tensor) { launch.wrote(tensor); });
}

at::Tensor on_device(const at::Tensor& host, c10::Device device) {
  if (!host.defined()) return host;
  if (host.is_sparse()) return sparse_on_device(host, device);
  Launch launch({device});  // within another kernel in all cases but that of a collective
  const auto options = host.options().device(device);
  auto result = host.is_non_overlapping_and_dense() ? at::empty_strided(host.sizes(), host.strides(), options)
                                                    : at::empty(host.sizes(), options);  // it may be expanded
  if (host.numel() > 0) on_host(result).copy_(host);
  launch.wrote(result);
  return result;
}

at::Tensor alias_of(const at::Tensor& tensor) {
  return at::Tensor(tensor.unsafeGetTensorImpl()->shallow_copy_and_detach(
      /*version_counter=*/0, /*allow_tensor_metadata_change=*/false));
}

void resize_storage(const at::Tensor& tensor, int64_t num_bytes) {
  c10::DeviceGuard guard(tensor.device());
  at::native::resize_bytes_cpu(tensor.storage().unsafeGetStorageImpl(), num_bytes);
}

void register_copies() {
  if (kIsCuda) at::native::copy_stub.set_cuda_dispatch_ptr(&copy_of_iterator);  // others have `_copy_from`
}

SIMULATED_KERNELS("_", every_other) { library.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }

SIMULATED_KERNELS("aten", own_kernels) {
  library.impl("empty.memory_format", empty);
  library.impl("empty_strided", empty_strided);
  library.impl("_copy_from", copy_from);
  library.impl("_copy_from_and_resize", copy_from_and_resize);
  library.impl("_local_scalar_dense", read_scalar);
  library.impl("view", view);
  library.impl("as_strided", as_strided);
  library.impl("resize_", resize);
  library.impl("set_.source_Storage_storage_offset", set_storage);
  library.impl("set_.source_Storage", set_source);
  library.impl("set_.source_Tensor", set_tensor);
  library.impl("convolution_overrideable", convolution);
  library.impl("convolution_backward_overrideable", convolution_backward);
  library.impl("_fused_sdp_choice", attention_by_math);
  library.impl("record_stream", [](at::Tensor& tensor, c10::Stream stream) { record_use(tensor, stream); });
  library.impl("is_pinned", [](const at::Tensor&, std::optional<at::Device>) { return false; });
  library.impl("view_as_complex", [](const at::Tensor& tensor) { return at::native::view_as_complex(tensor); });
  library.impl("view_as_real", [](const at::Tensor& tensor) { return at::native::view_as_real(tensor); });
  library.impl("unfold", [](const at::Tensor& tensor, int64_t dimension, int64_t size, int64_t step) {
    return at::native::unfold(tensor, dimension, size, step);
  });
  library.impl("_reshape_alias", [](const at::Tensor& tensor, c10::IntArrayRef size, c10::IntArrayRef stride) {
    return at::native::_reshape_alias(tensor, size, stride);
  });
}

}  // namespace simulated
