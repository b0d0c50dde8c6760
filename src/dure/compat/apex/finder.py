"""Name `apex` for the scripts that `dure run --as apex` starts."""

from dure.compat.alias import Alias

_REFUSED = {
    "contrib": "use torch.nn and torch.nn.functional, which have fused attention, losses and convolutions",
    "fp16_utils": "use apex.amp, which takes its place, or torch.amp",
    "fused_dense": "use torch.nn.Linear, which torch.compile fuses",
    "mlp": "use torch.nn.Sequential, which torch.compile fuses",
    "multi_tensor_apply": "use torch's optimizers with foreach=True or fused=True",
    "reparameterization": "use torch.nn.utils.parametrizations",
    "RNN": "use torch.nn.LSTM, GRU or RNN",
    "transformer": "use torch.distributed.tensor.parallel",
}


def install() -> None:
    """Let `import apex` find this package in this process."""
    Alias("apex", "dure.compat.apex", refused=_REFUSED).install()
