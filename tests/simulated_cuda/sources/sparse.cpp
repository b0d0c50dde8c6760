// Sparse tensors (COO) of devices: indices and values are a device's, every kernel is the CPU's.
#include "devices.h"

#include <ATen/SparseTensorImpl.h>
#include <ATen/ops/_coalesced_native.h>
#include <ATen/ops/_indices_native.h>
#include <ATen/ops/_nnz_native.h>
#include <ATen/ops/_sparse_coo_tensor_unsafe.h>
#include <ATen/ops/_sparse_coo_tensor_with_dims_and_tensors_native.h>
#include <ATen/ops/_sparse_coo_tensor_with_dims_native.h>
#include <ATen/ops/_values_native.h>
#include <ATen/ops/dense_dim_native.h>
#include <ATen/ops/indices_native.h>
#include <ATen/ops/is_coalesced_native.h>
#include <ATen/ops/sparse_dim_native.h>
#include <ATen/ops/values_native.h>

#include <set>
#include <string>

namespace simulated {
namespace {
at::SparseTensorImpl* impl_of(const at::Tensor& tensor) {
  return static_cast<at::SparseTensorImpl*>(tensor.unsafeGetTensorImpl());
}

at::Tensor made_of(const at::Tensor& indices, const at::Tensor& values, const at::Tensor& like) {
  return at::_sparse_coo_tensor_unsafe(
      indices, values, like.sizes(), values.options().layout(at::kSparse), like.is_coalesced());
}

// A sparse tensor is on the current device when it is made.
at::Tensor empty(
    int64_t sparse_dim, int64_t dense_dim, at::IntArrayRef size, std::optional<at::ScalarType> dtype,
    std::optional<at::Layout> layout, std::optional<at::Device> device, std::optional<bool> is_pinned) {
  c10::OptionalDeviceGuard guard(device);
  return at::native::new_with_dims_sparse(sparse_dim, dense_dim, size, dtype, layout, device, is_pinned);
}

at::Tensor with_parts(
    int64_t sparse_dim, int64_t dense_dim, c10::SymIntArrayRef size, const at::Tensor& indices,
    const at::Tensor& values, std::optional<at::ScalarType> dtype, std::optional<at::Layout> layout,
    std::optional<at::Device> device, std::optional<bool> is_pinned, std::optional<bool> is_coalesced) {
  c10::DeviceGuard guard(values.device());
  return at::native::new_with_dims_and_tensor_sparse_symint(
      sparse_dim, dense_dim, size, indices, values, dtype, layout, device, is_pinned, is_coalesced);
}

void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  run_on_host(op, stack, c10::DispatchKey::SparseCPU);
}
}  // namespace

std::array<at::Tensor, 2> parts_of(const at::Tensor& sparse) {
  return {impl_of(sparse)->indices(), impl_of(sparse)->values()};
}

at::Tensor sparse_on_host(const at::Tensor& tensor) {
  const auto [indices, values] = parts_of(tensor);
  return made_of(on_host(indices), on_host(values), tensor);
}

at::Tensor sparse_on_device(const at::Tensor& host, c10::Device device) {
  const auto [indices, values] = parts_of(host);
  return made_of(on_device(indices, device), on_device(values, device), host);
}

void replace_sparse(const at::Tensor& tensor, const at::Tensor& host) {
  const auto [indices, values] = parts_of(host);
  auto* impl = impl_of(tensor);
  impl->resize_(host.sparse_dim(), host.dense_dim(), host.sizes());
  impl->set_indices_and_values_unsafe(on_device(indices, tensor.device()), on_device(values, tensor.device()));
  impl->set_coalesced(host.is_coalesced());
}

TORCH_LIBRARY_IMPL(_, SparseCUDA, library) { library.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }

TORCH_LIBRARY_IMPL(aten, SparseCUDA, library) {
  using namespace at::native;
  std::set<std::string> own;
  const auto add = [&](const char* name, auto kernel) {
    library.impl(name, kernel);
    own.insert(std::string("aten::") + name);
  };
  add("_sparse_coo_tensor_with_dims_and_tensors", with_parts);
  add("_sparse_coo_tensor_with_dims", empty);
  add("_indices", _indices_sparse);
  add("_values", _values_sparse);
  add("indices", indices_sparse);
  add("values", values_sparse);
  add("_nnz", _nnz_sparse);
  add("sparse_dim", sparse_dim_sparse);
  add("dense_dim", dense_dim_sparse);
  add("is_coalesced", is_coalesced_sparse);
  add("_coalesced_", _coalesced_sparse_);
  // those that have a kernel for dense tensors of all types, which would be taken before the fallback
  auto& dispatcher = c10::Dispatcher::singleton();
  for (const auto& name : dispatcher.getAllOpNames()) {
    if (name.name.rfind("aten::", 0) != 0 || own.count(name.name)) continue;
    const auto op = dispatcher.findSchema(name);
    if (!op || !op->hasKernelForDispatchKey(c10::DispatchKey::SparseCPU)) continue;
    const auto full = name.name.substr(6) + (name.overload_name.empty() ? "" : "." + name.overload_name);
    library.impl(full.c_str(), torch::CppFunction::makeFromBoxedFunction<&fallback>());
  }
}

}  // namespace simulated
