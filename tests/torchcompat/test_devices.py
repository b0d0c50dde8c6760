"""Devices: generators, near cores and compilation for them."""

import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.numa import binding as numa

from dure.errors import EnvironmentLacks
from dure.torchcompat.devices import _GeneratorOfModule, bind_to_numa_node, default_generator, has_inductor_for


def test_default_generator_when_on_cpu_then_torch_rand_draws_from_it() -> None:
    generator = default_generator(torch.device("cpu"))
    before = generator.get_state()
    drawn = torch.rand(3)
    generator.set_state(before)
    assert torch.equal(drawn, torch.rand(3))


@pytest.mark.gpu
def test_default_generator_when_on_cuda_then_it_is_the_devices() -> None:
    device = torch.device("cuda", 0)
    generator = default_generator(device)
    generator.manual_seed(3)
    drawn = torch.rand(3, device=device)
    generator.manual_seed(3)
    assert torch.equal(drawn, torch.rand(3, device=device))


def test_binding_when_a_device_is_near_a_node_then_threads_run_on_its_cores(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cores = os.sched_getaffinity(0)
    # torch asks for the command numactl, which it needs for other programs only
    monkeypatch.setattr(numa.shutil, "which", lambda name: f"/usr/bin/{name}")
    monkeypatch.setattr(numa, "_get_logical_cpus_to_bind_to", lambda **_: {max(cores)})
    try:
        bind_to_numa_node(0, "node")
        bound = [os.sched_getaffinity(int(thread.name)) for thread in Path("/proc/self/task").iterdir()]
    finally:
        for thread in Path("/proc/self/task").iterdir():
            os.sched_setaffinity(int(thread.name), cores)
    assert bound == [{max(cores)}] * len(bound)


def test_binding_when_no_core_is_known_then_one_sentence_says_so(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(numa, "_get_logical_cpus_to_bind_to", lambda **_: set())
    with pytest.raises(EnvironmentLacks, match=r"numa_binding is node, and the cores near device 1 .*: leave it out"):
        bind_to_numa_node(1, "node")
    assert capfd.readouterr().err == ""


@pytest.mark.slow
def test_inductor_has_code_for_the_cpu_and_none_for_meta():
    assert has_inductor_for("cpu")
    assert not has_inductor_for("meta")


def test_generator_of_a_module_without_generators_has_the_states():
    states = {0: torch.zeros(5)}
    module = SimpleNamespace(
        get_rng_state=lambda device: states[device.index],
        set_rng_state=lambda state, device: states.update({device.index: state}),
    )
    generator = _GeneratorOfModule(module, torch.device("cuda", 0))
    generator.set_state(torch.ones(5))
    assert generator.get_state().tolist() == [1.0] * 5
