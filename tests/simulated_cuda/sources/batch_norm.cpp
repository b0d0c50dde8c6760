// The kernels of SyncBatchNorm, which only CUDA has, over inputs `(N, C, *)`.
#include "devices.h"


namespace simulated {
namespace {
at::Tensor per_channel(const at::Tensor& value, const at::Tensor& like) {
  std::vector<int64_t> shape(like.dim(), 1);
  shape[1] = -1;
  return value.reshape(shape);
}

std::vector<int64_t> all_but_channels(const at::Tensor& input) {
  std::vector<int64_t> dimensions;
  for (int64_t i = 0; i < input.dim(); ++i)
    if (i != 1) dimensions.push_back(i);
  return dimensions;
}

// Sums are in float32 at least.
at::Tensor summable(const at::Tensor& tensor) {
  const auto host = on_host(tensor);
  return at::isReducedFloatingType(host.scalar_type()) ? host.to(at::kFloat) : host;
}

std::tuple<at::Tensor, at::Tensor> statistics(const at::Tensor& input, double epsilon) {
  Launch launch({input.device()});
  const auto host = summable(input);
  const auto dimensions = all_but_channels(host);
  return {
      launch.made(host.mean(dimensions), input.device()),
      launch.made((host.var(dimensions, false) + epsilon).rsqrt(), input.device())};
}

std::tuple<at::Tensor, at::Tensor> gathered_statistics(
    const at::Tensor& input, const at::Tensor& mean, const at::Tensor& inverse_deviation,
    const std::optional<at::Tensor>& running_mean, const std::optional<at::Tensor>& running_variance, double momentum,
    double epsilon, const at::Tensor& counts_of_ranks) {
  Launch launch({input.device()});
  const auto means = on_host(mean);
  const auto variances = on_host(inverse_deviation).pow(-2) - epsilon;
  const auto sizes = on_host(counts_of_ranks).to(means.dtype()).reshape({-1, 1});
  const auto size = sizes.sum();
  const auto mean_of_all = (means * sizes).sum(0) / size;
  const auto variance_of_all = ((variances + (means - mean_of_all).pow(2)) * sizes).sum(0) / size;
  for (const auto& [running, value] :
       {std::pair{running_mean, mean_of_all}, std::pair{running_variance, variance_of_all * size / (size - 1)}}) {
    if (!running || !running->defined()) continue;
    on_host(*running).mul_(1 - momentum).add_(value * momentum);
    launch.wrote(*running);
  }
  return {
      launch.made(mean_of_all, input.device()),
      launch.made((variance_of_all + epsilon).rsqrt(), input.device())};
}

at::Tensor normalised(
    const at::Tensor& input, const std::optional<at::Tensor>& weight, const std::optional<at::Tensor>& bias,
    const at::Tensor& mean, const at::Tensor& inverse_deviation, double) {
  Launch launch({input.device()});
  const auto host = summable(input);
  auto result = (host - per_channel(on_host(mean), host)) * per_channel(on_host(inverse_deviation), host);
  if (weight && weight->defined()) result = result * per_channel(on_host(*weight), host);
  if (bias && bias->defined()) result = result + per_channel(on_host(*bias), host);
  return launch.made(result.to(input.dtype()), input.device());
}

std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor> backward_sums(
    const at::Tensor& gradient, const at::Tensor& input, const at::Tensor& mean, const at::Tensor& inverse_deviation,
    const std::optional<at::Tensor>&, bool, bool, bool) {
  Launch launch({input.device()});
  const auto of_output = summable(gradient);
  const auto host = summable(input);
  const auto dimensions = all_but_channels(host);
  const auto sum = of_output.sum(dimensions);
  const auto with_input = (of_output * (host - per_channel(on_host(mean), host))).sum(dimensions);
  return {
      launch.made(sum, input.device()), launch.made(with_input, input.device()),
      launch.made(with_input * on_host(inverse_deviation), input.device()), launch.made(sum.clone(), input.device())};
}

at::Tensor backward(
    const at::Tensor& gradient, const at::Tensor& input, const at::Tensor& mean, const at::Tensor& inverse_deviation,
    const std::optional<at::Tensor>& weight, const at::Tensor& sum, const at::Tensor& with_input,
    const at::Tensor& counts_of_ranks) {
  Launch launch({input.device()});
  const auto host = summable(input);
  const auto size = on_host(counts_of_ranks).to(host.dtype()).sum();
  const auto scale = per_channel(on_host(inverse_deviation), host);
  const auto centred = host - per_channel(on_host(mean), host);
  auto result = (summable(gradient) - per_channel(on_host(sum), host) / size -
                 centred * scale.pow(2) * per_channel(on_host(with_input), host) / size) *
      scale;
  if (weight && weight->defined()) result = result * per_channel(on_host(*weight), host);
  return launch.made(result.to(input.dtype()), input.device());
}
}  // namespace

SIMULATED_KERNELS("aten", batch_norms) {
  if (!kIsCuda) return;
  library.impl("batch_norm_stats", statistics);
  library.impl("batch_norm_gather_stats_with_counts", gathered_statistics);
  library.impl("batch_norm_elemt", normalised);
  library.impl("batch_norm_backward_reduce", backward_sums);
  library.impl("batch_norm_backward_elemt", backward);
}

}  // namespace simulated
