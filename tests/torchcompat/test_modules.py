"""Modules: their contents and places."""

import torch
from torch import nn
from torch.distributed import fsdp

from dure.torchcompat.modules import BatchNorm, Dropout, move_module, reduce_unused_too


def test_module_bases_when_asked_then_they_take_in_every_kind() -> None:
    assert all(isinstance(kind(2), BatchNorm) for kind in (nn.BatchNorm1d, nn.BatchNorm3d, nn.SyncBatchNorm))
    assert all(isinstance(kind(0.5), Dropout) for kind in (nn.Dropout, nn.Dropout2d, nn.AlphaDropout))


def test_reduce_unused_too_when_torch_has_it_then_every_inner_module_is_told() -> None:
    class Old:
        pass

    class New:
        def set_reduce_scatter_unused_params(self, is_wanted: bool) -> None:
            self.is_wanted = is_wanted

    assert not reduce_unused_too(Old())
    new = New()
    assert reduce_unused_too(new)
    assert new.is_wanted
    has_it = hasattr(fsdp.FSDPModule, "set_reduce_scatter_unused_params")
    assert has_it == (tuple(map(int, torch.__version__.split("+")[0].split(".")[:2])) > (2, 11))


def test_move_module_when_parameters_are_tied_then_they_stay_tied_and_the_same():
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.BatchNorm1d(2))
    module[1].weight = module[0].weight
    module[0].weight.grad = torch.ones(2, 2)
    before = [*module.parameters()]
    assert move_module(module, "meta") is module
    assert all(one is other for one, other in zip(module.parameters(), before, strict=True))
    assert {tensor.device.type for tensor in module.state_dict().values()} == {"meta"}
    assert (module[1].weight is module[0].weight, module[0].weight.grad.device.type) == (True, "meta")
