"""Name `apex` for the scripts that `dure run --as apex` starts."""

from pathlib import Path

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
_RENAMED = {
    "apex.amp.amp": "dure.compat.apex.amp.casts",
    "apex.amp.frontend": "dure.compat.apex.amp",
    "apex.normalization.fused_layer_norm": "dure.compat.apex.normalization",
    "apex.optimizers.fused_adagrad": "dure.compat.apex.optimizers",
    "apex.optimizers.fused_adam": "dure.compat.apex.optimizers",
    "apex.optimizers.fused_sgd": "dure.compat.apex.optimizers",
    "apex.parallel.LARC": "dure.compat.apex.parallel.larc",
    "apex.parallel.optimized_sync_batchnorm": "dure.compat.apex.parallel.sync_batchnorm",
}


def install() -> None:
    """Let `import apex` find this package in this process."""
    Alias(
        "apex", "dure.compat.apex", renamed=_RENAMED, refused=_REFUSED, spawned=Path(__file__).parent / "spawned"
    ).install()
