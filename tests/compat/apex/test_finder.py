"""Scripts that import Apex, and its launcher."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from dure.compat.apex import optimizers
from dure.compat.apex.amp import half_function, initialize, promote_function, register_float_function
from dure.compat.apex.amp.casts import choose_types
from dure.compat.apex.optimizers import FusedAdagrad, FusedAdam, FusedSGD
from dure.compat.apex.parallel.multiproc import command_of

SCRIPT = """
import argparse
import torch
import torch.distributed as dist
import apex
from apex import amp
from apex.normalization import FusedLayerNorm, MixedFusedRMSNorm
from apex.normalization.fused_layer_norm import FusedLayerNorm as SameLayerNorm
from apex.optimizers import FusedAdam
from apex.parallel.LARC import LARC
import apex.parallel.LARC
from apex.parallel import LARC as SameLARC
from apex.parallel import DistributedDataParallel as DDP, convert_syncbn_model

assert SameLayerNorm is FusedLayerNorm and SameLARC is LARC and isinstance(LARC, type)
parser = argparse.ArgumentParser()
parser.add_argument("--opt-level", default="O1")
parser.add_argument("--world-size", type=int, default=None)
parser.add_argument("--rank", type=int, default=None)
args = parser.parse_args()
dist.init_process_group("gloo", init_method="env://")
assert args.rank in (None, dist.get_rank()) and args.world_size in (None, dist.get_world_size())
torch.manual_seed(0)
net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), FusedLayerNorm(8), torch.nn.Linear(8, 2))
model = convert_syncbn_model(net)
optimizer = FusedAdam(model.parameters(), lr=1e-2, weight_decay=0.1)
model, optimizer = amp.initialize(model, optimizer, opt_level=args.opt_level)
model = DDP(model)
for step in range(3):
    x = torch.randn(6, 4, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
    optimizer.zero_grad()
    with amp.scale_loss(model(x).float().square().mean(), optimizer) as scaled:
        scaled.backward()
    optimizer.step()
weights = torch.cat([p.detach().float().flatten() for p in model.parameters()])
both = [torch.empty_like(weights) for _ in range(dist.get_world_size())]
dist.all_gather(both, weights)
assert all(torch.equal(both[0], other) for other in both)
try:
    import apex.contrib.multihead_attn
except ModuleNotFoundError as error:
    assert "use torch.nn" in str(error), error
else:
    raise AssertionError
try:
    import apex.nothing
except ModuleNotFoundError as error:
    assert "No module named 'apex.nothing'" in str(error), error
else:
    raise AssertionError
print("rank", dist.get_rank(), args.rank, "ends")
dist.destroy_process_group()
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "main.py"
    path.write_text(SCRIPT)
    return path


def run(script: Path, *command: str) -> list[str]:
    """Return the lines of a command, which succeeds."""
    done = subprocess.run(
        [sys.executable, "-m", *command], cwd=script.parent, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return [line[line.rfind("rank ") :] for line in done.stdout.splitlines()]


@pytest.mark.slow
def test_script_when_run_as_apex_then_imports_it(script: Path) -> None:
    lines = run(script, "dure", "run", "--as", "apex", "--nproc", "2", script.name, "--opt-level", "O1")
    assert {"rank 0 None ends", "rank 1 None ends"} <= set(lines)


def test_launcher_when_given_a_number_of_ranks_then_the_script_gets_size_and_rank(script: Path) -> None:
    launcher = "dure.compat.apex.parallel.multiproc"
    lines = run(script, launcher, "--world-size", "2", script.name, "--opt-level", "O2")
    assert {"rank 0 0 ends", "rank 1 1 ends"} <= set(lines)


@pytest.mark.parametrize(
    ("arguments", "message"), [([], "no script is given"), (["a.py", "--world-size"], "the number")]
)
def test_launcher_when_misused_then_says_how(arguments: list[str], message: str) -> None:
    with pytest.raises(SystemExit, match=message):
        command_of(arguments)


def test_launcher_when_given_no_number_then_starts_a_rank_for_each_accelerator() -> None:
    assert command_of(["main.py", "--lr", "1"])[-5:] == ["--nproc", "auto", "main.py", "--lr", "1"]


# --- functions that ask for a type


def types_of(*tensors: torch.Tensor) -> list[torch.dtype]:
    return [tensor.dtype for tensor in tensors]


def test_function_when_o1_is_in_use_then_gets_the_type_that_it_asks_for() -> None:
    class Module:
        given = staticmethod(types_of)

    register_float_function(Module, "given")
    one, two = torch.ones(1), torch.ones(1, dtype=torch.float16)
    asking = half_function(types_of), promote_function(types_of), Module.given
    assert [ask(one, two) for ask in asking] == [[torch.float32, torch.float16]] * 3
    initialize(torch.nn.Linear(1, 1), opt_level="O1")
    try:
        assert [ask(one, two) for ask in asking] == [[torch.float16] * 2, [torch.float32] * 2, [torch.float32] * 2]
    finally:
        choose_types(enabled=False)
    with pytest.raises(ValueError, match="No function named nothing"):
        register_float_function(Module, "nothing")


# --- optimisers


@pytest.mark.parametrize(
    ("apex", "own"),
    [
        (lambda p: FusedAdam(p, weight_decay=0.1), lambda p: torch.optim.AdamW(p, weight_decay=0.1)),
        (
            lambda p: FusedAdam(p, adam_w_mode=False, weight_decay=0.1),
            lambda p: torch.optim.Adam(p, weight_decay=0.1),
        ),
        (lambda p: FusedSGD(p, 0.1, momentum=0.9), lambda p: torch.optim.SGD(p, 0.1, momentum=0.9)),
        (lambda p: FusedAdagrad(p, lr=0.1), lambda p: torch.optim.Adagrad(p, lr=0.1)),
    ],
)
def test_optimizer_when_stepped_then_equals_torchs(apex, own) -> None:
    found = []
    for build in (apex, own):
        parameter = torch.nn.Parameter(torch.linspace(-1, 1, 5, dtype=torch.float64))
        optimizer = build([parameter])
        for _ in range(3):
            optimizer.zero_grad()
            (parameter**3).sum().backward()
            optimizer.step()
        found.append(parameter.detach())
    torch.testing.assert_close(found[0], found[1], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    "build",
    [
        lambda p: FusedAdam(p, amsgrad=True),
        lambda p: FusedAdam(p, bias_correction=False),
        lambda p: FusedSGD(p, 0.1, wd_after_momentum=True),
        lambda p: FusedAdagrad(p, adagrad_w_mode=True),
    ],
)
def test_optimizer_when_torch_lacks_an_option_then_is_refused(build) -> None:
    with pytest.raises(RuntimeError, match="does not support"):
        build([torch.nn.Parameter(torch.ones(1))])


@pytest.mark.parametrize("name", ["FusedLAMB", "FusedMixedPrecisionLamb", "FusedNovoGrad"])
def test_optimizer_when_it_is_not_here_then_it_is_imported_and_refused(name: str) -> None:
    with pytest.raises(RuntimeError, match=f"{name} is not part of dure's Apex"):
        getattr(optimizers, name)([torch.nn.Parameter(torch.ones(1))], lr=0.1)
