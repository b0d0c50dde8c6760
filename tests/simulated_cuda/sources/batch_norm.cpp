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

at::Tensor sent(const at::Tensor& host, c10::Device device, Launch& launch) {
  auto result = on_device(host, device);
  launch.wrote(result);
  return result;
}

std::tuple<at::Tensor, at::Tensor> statistics(const at::Tensor& input, double epsilon) {
  Launch launch({input.device()});
  const auto host = on_host(input);
  const auto dimensions = all_but_channels(host);
  return {
      sent(host.mean(dimensions), input.device(), launch),
      sent((host.var(dimensions, false) + epsilon).rsqrt(), input.device(), launch)};
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
  if (running_mean && running_mean->defined())
    on_host(*running_mean).mul_(1 - momentum).add_(mean_of_all * momentum);
  if (running_variance && running_variance->defined())
    on_host(*running_variance).mul_(1 - momentum).add_(variance_of_all * size / (size - 1) * momentum);
  return {
      sent(mean_of_all, input.device(), launch),
      sent((variance_of_all + epsilon).rsqrt(), input.device(), launch)};
}

at::Tensor normalised(
    const at::Tensor& input, const std::optional<at::Tensor>& weight, const std::optional<at::Tensor>& bias,
    const at::Tensor& mean, const at::Tensor& inverse_deviation, double) {
  Launch launch({input.device()});
  const auto host = on_host(input);
  auto result = (host - per_channel(on_host(mean), host)) * per_channel(on_host(inverse_deviation), host);
  if (weight && weight->defined()) result = result * per_channel(on_host(*weight), host);
  if (bias && bias->defined()) result = result + per_channel(on_host(*bias), host);
  return sent(result.to(host.dtype()), input.device(), launch);
}

std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor> backward_sums(
    const at::Tensor& gradient, const at::Tensor& input, const at::Tensor& mean, const at::Tensor& inverse_deviation,
    const std::optional<at::Tensor>&, bool, bool, bool) {
  Launch launch({input.device()});
  const auto of_output = on_host(gradient);
  const auto host = on_host(input);
  const auto dimensions = all_but_channels(host);
  const auto sum = of_output.sum(dimensions);
  const auto with_input = (of_output * (host - per_channel(on_host(mean), host))).sum(dimensions);
  return {
      sent(sum, input.device(), launch), sent(with_input, input.device(), launch),
      sent(with_input * on_host(inverse_deviation), input.device(), launch), sent(sum.clone(), input.device(), launch)};
}

at::Tensor backward(
    const at::Tensor& gradient, const at::Tensor& input, const at::Tensor& mean, const at::Tensor& inverse_deviation,
    const std::optional<at::Tensor>& weight, const at::Tensor& sum, const at::Tensor& with_input,
    const at::Tensor& counts_of_ranks) {
  Launch launch({input.device()});
  const auto host = on_host(input);
  const auto size = on_host(counts_of_ranks).to(host.dtype()).sum();
  const auto scale = per_channel(on_host(inverse_deviation), host);
  const auto centred = host - per_channel(on_host(mean), host);
  auto result = (on_host(gradient) - per_channel(on_host(sum), host) / size -
                 centred * scale.pow(2) * per_channel(on_host(with_input), host) / size) *
      scale;
  if (weight && weight->defined()) result = result * per_channel(on_host(*weight), host);
  return sent(result.to(host.dtype()), input.device(), launch);
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
