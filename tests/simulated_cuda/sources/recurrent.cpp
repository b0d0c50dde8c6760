// The fused cells of LSTM and GRU, which torch calls on CUDA in place of single operations.
#include "devices.h"


namespace simulated {
namespace {
using Bias = std::optional<at::Tensor>;

at::Tensor with_bias(const at::Tensor& gates, const Bias& bias) {
  const auto host = on_host(gates);
  return bias && bias->defined() ? host + on_host(*bias) : host;
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> lstm_cell(
    const at::Tensor& input_gates, const at::Tensor& hidden_gates, const at::Tensor& state, const Bias& input_bias,
    const Bias& hidden_bias) {
  Launch launch({input_gates.device()});
  const auto gates = (with_bias(input_gates, input_bias) + with_bias(hidden_gates, hidden_bias)).chunk(4, 1);
  const auto in = gates[0].sigmoid(), forget = gates[1].sigmoid(), cell = gates[2].tanh(), out = gates[3].sigmoid();
  const auto next = forget * on_host(state) + in * cell;
  const auto device = input_gates.device();
  return {
      launch.made(out * next.tanh(), device), launch.made(next, device),
      launch.made(at::cat({in, forget, cell, out}, 1), device)};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> lstm_cell_backward(
    const Bias& of_hidden, const Bias& of_next, const at::Tensor& state, const at::Tensor& next_state,
    const at::Tensor& workspace, bool has_bias) {
  const auto device = workspace.device();
  Launch launch({device});
  const auto gates = on_host(workspace).chunk(4, 1);
  const auto in = gates[0], forget = gates[1], cell = gates[2], out = gates[3];
  const auto next = on_host(next_state).tanh();
  const auto hidden = of_hidden && of_hidden->defined() ? on_host(*of_hidden) : at::zeros_like(next);
  auto of_cell = hidden * out * (1 - next * next);
  if (of_next && of_next->defined()) of_cell = of_cell + on_host(*of_next);
  const auto of_gates = at::cat(
      {of_cell * cell * in * (1 - in), of_cell * on_host(state) * forget * (1 - forget),
       of_cell * in * (1 - cell * cell), hidden * next * out * (1 - out)},
      1);
  return {
      launch.made(of_gates, device), launch.made(of_cell * forget, device),
      has_bias ? launch.made(of_gates.sum(0), device) : at::Tensor()};
}

std::tuple<at::Tensor, at::Tensor> gru_cell(
    const at::Tensor& input_gates, const at::Tensor& hidden_gates, const at::Tensor& hidden, const Bias& input_bias,
    const Bias& hidden_bias) {
  const auto device = input_gates.device();
  Launch launch({device});
  const auto input = with_bias(input_gates, input_bias).chunk(3, 1);
  const auto recurrent = with_bias(hidden_gates, hidden_bias).chunk(3, 1);
  const auto before = on_host(hidden);
  const auto reset = (input[0] + recurrent[0]).sigmoid(), update = (input[1] + recurrent[1]).sigmoid();
  const auto fresh = (input[2] + reset * recurrent[2]).tanh();
  return {
      launch.made(fresh + update * (before - fresh), device),
      launch.made(at::cat({reset, update, fresh, before, recurrent[2]}, 1), device)};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor> gru_cell_backward(
    const at::Tensor& gradient, const at::Tensor& workspace, bool has_bias) {
  const auto device = workspace.device();
  Launch launch({device});
  const auto parts = on_host(workspace).chunk(5, 1);
  const auto reset = parts[0], update = parts[1], fresh = parts[2], before = parts[3], recurrent = parts[4];
  const auto of_output = on_host(gradient);
  const auto of_update = of_output * (before - fresh) * update * (1 - update);
  const auto of_fresh = of_output * (1 - update) * (1 - fresh * fresh);
  const auto of_reset = of_fresh * recurrent * reset * (1 - reset);
  const auto of_input = at::cat({of_reset, of_update, of_fresh}, 1);
  const auto of_recurrent = at::cat({of_reset, of_update, of_fresh * reset}, 1);
  return {
      launch.made(of_input, device), launch.made(of_recurrent, device), launch.made(of_output * update, device),
      has_bias ? launch.made(of_input.sum(0), device) : at::Tensor(),
      has_bias ? launch.made(of_recurrent.sum(0), device) : at::Tensor()};
}
}  // namespace

SIMULATED_KERNELS("aten", fused_cells) {
  library.impl("_thnn_fused_lstm_cell", lstm_cell);
  library.impl("_thnn_fused_lstm_cell_backward_impl", lstm_cell_backward);
  library.impl("_thnn_fused_gru_cell", gru_cell);
  library.impl("_thnn_fused_gru_cell_backward", gru_cell_backward);
}

}  // namespace simulated
