"""Rules of CUDA that the simulated devices claim to keep, each shown to be kept."""

import copy
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional

from tests.simulated_cuda import build
from tests.simulated_cuda.devices import on_devices

pytestmark = pytest.mark.simulated

TO_ROUNDING = 1e-12


def refused(words: str, call) -> None:
    """Check that a call is refused with these words."""
    with pytest.raises(RuntimeError, match=words):
        call()


def run_in_fork(call) -> str:
    """Return what a forked child's call came to: its result, or its error."""
    read, write = os.pipe()
    if os.fork() == 0:
        try:
            text = str(call())
        except BaseException as error:
            text = f"{type(error).__name__}: {error}"
        os.write(write, text.encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as told:
        text = told.read()
    os.wait()
    return text


def test_torch_without_the_switch_is_as_it_was(simulated_devices, request, tmp_path):
    site = build.site_folder(request.config.cache.mkdir("simulated_cuda"))
    program = "import torch; print(torch.cuda.is_available(), torch.version.cuda, torch.accelerator.device_count())"
    environment = {name: value for name, value in os.environ.items() if name != "SIMULATED_GPUS"}
    done = subprocess.run(
        [sys.executable, "-c", program], env={**environment, "PYTHONPATH": str(site)}, capture_output=True, text=True
    )
    assert (done.stdout, done.stderr) == ("False None 0\n", "")


# --- which devices there are


@on_devices(3)
def test_devices_are_shown(folder: Path) -> None:
    assert torch.cuda.is_available()
    assert torch.cuda.device_count() == torch.accelerator.device_count() == 3
    assert str(torch.accelerator.current_accelerator()) == "cuda"
    assert torch.cuda.get_device_name() == "Simulated GPU"
    assert torch.ones(1, device="cuda:2").device == torch.device("cuda", 2)
    with torch.device("cuda:1"):
        assert torch.zeros(1).device.index == 1
    refused("invalid device ordinal", lambda: torch.ones(1, device="cuda:3"))


@on_devices(4, CUDA_VISIBLE_DEVICES="2,0")
def test_visible_devices_by_number(folder: Path) -> None:
    uuids = [str(torch.cuda.get_device_properties(index).uuid) for index in range(torch.cuda.device_count())]
    assert [uuid[-1] for uuid in uuids] == ["2", "0"]


@on_devices(2, CUDA_VISIBLE_DEVICES="1")
def test_process_that_uses_devices_reads_its_variables_no_more(folder: Path) -> None:
    torch.ones(1, device="cuda")
    os.environ["CUDA_VISIBLE_DEVICES"] = "0,1"
    assert torch.cuda.simulated.visible_devices() == [1]
    os.environ["CUDA_VISIBLE_DEVICES"] = "0,0"
    assert run_in_fork(torch.cuda.simulated.visible_devices) == "[]"  # none if one is named twice


@on_devices(4, CUDA_VISIBLE_DEVICES="GPU-5157a7ed-0000-0000-0000-000000000003,9,1")
def test_visible_devices_by_uuid_as_far_as_they_are_known(folder: Path) -> None:
    assert torch.cuda.simulated.visible_devices() == [3]


@on_devices(2, CUDA_VISIBLE_DEVICES="")
def test_no_visible_device(folder: Path) -> None:
    assert not torch.cuda.is_available()
    assert torch.accelerator.device_count() == 0


# --- where tensors are


@on_devices(2)
def test_tensors_of_two_devices_do_not_mix(folder: Path) -> None:
    here, there, on_host = torch.ones(3, device="cuda:0"), torch.ones(3, device="cuda:1"), torch.ones(3)
    for one, other in ((here, on_host), (here, there)):
        refused("Expected all tensors to be on the same device", lambda one=one, other=other: one + other)
    refused("Expected all tensors to be on the same device", lambda: torch.cat([here, there]))
    assert (here + torch.tensor(2.0)).tolist() == [3.0] * 3  # without dimensions it may be the host's
    assert here[torch.tensor([0, 2])].tolist() == [1.0, 1.0]
    number = torch.tensor(0.0)
    for call in (lambda: number.add_(here.sum()), lambda: torch.stack([here[0], number])):
        refused("Expected all tensors to be on the same device", call)


@on_devices(2)
def test_training_gives_the_weights_of_the_cpu(folder: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(288, 10)
    ).double()
    x, y = torch.randn(4, 3, 8, 8, dtype=torch.float64), torch.randint(10, (4,))
    trained = []
    for device in ("cpu", "cuda:1"):
        one = copy.deepcopy(model).to(device)
        optimizer = torch.optim.SGD(one.parameters(), lr=0.1, momentum=0.9)
        for _ in range(3):
            optimizer.zero_grad()
            functional.cross_entropy(one(x.to(device)), y.to(device)).backward()
            optimizer.step()
        trained.append({name: value.cpu() for name, value in one.state_dict().items()})
    assert max(float((trained[0][name] - trained[1][name]).abs().max()) for name in trained[0]) < TO_ROUNDING


@on_devices(1)
def test_results_of_a_kernel_that_moves_its_memory_arrive(folder: Path) -> None:
    out = torch.empty(0, dtype=torch.int64, device="cuda")
    torch.nonzero(torch.tensor([0, 1, 0, 1], device="cuda"), out=out)
    assert out.tolist() == [[1], [3]]
    values, places = torch.empty(4, device="cuda"), torch.empty(4, dtype=torch.int64, device="cuda")
    torch.sort(torch.tensor([3.0, 1.0, 2.0, 0.0], device="cuda"), out=(values, places))
    assert (values.tolist(), places.tolist()) == ([0.0, 1.0, 2.0, 3.0], [3, 1, 2, 0])


@on_devices(1)
def test_recurrent_cells_and_attention_give_the_values_of_the_cpu(folder: Path) -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    for module in (nn.LSTM(8, 6, 2), nn.GRU(8, 6, bias=False), nn.LSTMCell(8, 6), layer):
        module.double()
        x = torch.randn(5, 8) if isinstance(module, nn.LSTMCell) else torch.randn(3, 5, 8)
        found = []
        for device in ("cpu", "cuda"):
            one = copy.deepcopy(module).to(device)
            given = x.double().to(device).requires_grad_()
            output = one(given)
            (output if torch.is_tensor(output) else output[0]).square().sum().backward()
            found.append([given.grad.cpu(), *(parameter.grad.cpu() for parameter in one.parameters())])
        for on_cpu, on_cuda in zip(*found, strict=True):
            assert float((on_cpu - on_cuda).abs().max()) < TO_ROUNDING, type(module).__name__


@on_devices(2)
def test_sparse_gradients_give_the_weights_of_the_cpu(folder: Path) -> None:
    optimizers = (torch.optim.SGD, torch.optim.SparseAdam, torch.optim.Adagrad)
    for kind in optimizers:
        trained = []
        for device in ("cpu", "cuda:1"):
            torch.manual_seed(1)
            table = nn.Embedding(12, 4, sparse=True).double().to(device)
            optimizer = kind(list(table.parameters()), lr=0.1)
            for _ in range(2):
                optimizer.zero_grad()
                for _ in range(2):
                    table(torch.tensor([[1, 2, 2], [5, 1, 0]]).to(device)).square().sum().backward()
                gradient = table.weight.grad
                assert (gradient.is_sparse, gradient.device) == (True, torch.device(device))
                gradient.mul_(0.5)
                assert torch.equal(gradient.cpu().to_dense(), gradient.coalesce().to_dense().cpu())
                optimizer.step()
            trained.append(table.weight.detach().cpu())
        assert float((trained[0] - trained[1]).abs().max()) < TO_ROUNDING, kind.__name__


@on_devices(2)
def test_data_parallel_of_torch_gives_the_gradients_of_one_device(folder: Path) -> None:
    torch.manual_seed(0)
    model = nn.Linear(3, 2).double().cuda()
    x = torch.randn(5, 3, dtype=torch.float64, device="cuda")
    whole = torch.autograd.grad(model(x).square().sum(), list(model.parameters()))
    divided = torch.autograd.grad(nn.DataParallel(model)(x).square().sum(), list(model.parameters()))
    assert max(float((one - other).abs().max()) for one, other in zip(whole, divided, strict=True)) < TO_ROUNDING


@on_devices(2)
def test_modules_are_copied_saved_and_loaded(folder: Path) -> None:
    model = nn.Linear(2, 2).to("cuda:1")
    copied = copy.deepcopy({"weight": model.weight.detach().untyped_storage(), "model": model})
    assert copied["weight"].device == copied["model"].weight.device == torch.device("cuda:1")
    torch.save(model.state_dict(), folder / "weights.pt")
    for place in ("cpu", "cuda:0", None):
        loaded = torch.load(folder / "weights.pt", map_location=place)
        assert loaded["weight"].device == torch.device(place or "cuda:1")
        assert torch.equal(loaded["weight"].cpu(), model.weight.cpu())


@on_devices(1)
def test_autocast_computes_in_halves(folder: Path) -> None:
    with torch.autocast("cuda", dtype=torch.bfloat16):
        assert nn.Linear(3, 3).cuda()(torch.randn(2, 3, device="cuda")).dtype is torch.bfloat16


# --- random numbers


@on_devices(2)
def test_each_device_has_a_generator_of_its_own(folder: Path) -> None:
    torch.manual_seed(1)
    on_host = torch.get_rng_state()
    first = [torch.rand(4, device=f"cuda:{index}") for index in range(2)]
    assert torch.equal(torch.get_rng_state(), on_host)
    assert torch.cuda.get_rng_state(0).numel() == 16
    state = torch.cuda.get_rng_state(0)
    second = torch.rand(4, device="cuda:0")
    assert not torch.equal(first[0], second)
    torch.cuda.set_rng_state(state, 0)
    assert torch.equal(torch.rand(4, device="cuda:0"), second)
    torch.manual_seed(1)  # of all devices
    assert torch.equal(torch.rand(4, device="cuda:1"), first[1])
    refused("Expected a 'cuda' device type", lambda: torch.rand(2, device="cuda", generator=torch.Generator()))


@on_devices(1)
def test_dropout_draws_from_the_device(folder: Path) -> None:
    on_host, before = torch.get_rng_state(), torch.cuda.get_rng_state()
    functional.dropout(torch.ones(100, device="cuda"), 0.5)
    assert torch.equal(torch.get_rng_state(), on_host)
    assert not torch.equal(torch.cuda.get_rng_state(), before)


# --- what has not been waited for


@on_devices(1)
def test_copy_to_pinned_memory_arrives_when_somebody_waits(folder: Path) -> None:
    def wait_for_event() -> None:
        event = torch.Event("cuda")
        event.record()
        event.synchronize()

    source = torch.arange(3.0, device="cuda")
    waits = (torch.cuda.synchronize, wait_for_event, lambda: torch.cuda.current_stream().synchronize(), source[0].item)
    for wait in waits:
        target = torch.full((3,), -1.0).pin_memory()
        assert target.is_pinned()
        target.copy_(source, non_blocking=True)
        source.add_(0.0)
        assert target.tolist() == [-1.0] * 3
        wait()
        assert target.tolist() == [0.0, 1.0, 2.0]
    pageable = torch.full((3,), -1.0)
    pageable.copy_(source, non_blocking=True)  # not pinned: CUDA waits
    assert pageable.tolist() == [0.0, 1.0, 2.0]


@on_devices(1)
def test_copy_from_pinned_memory_reads_it_when_the_stream_comes_to_it(folder: Path) -> None:
    source = torch.ones(3).pin_memory()
    target = torch.zeros(3, device="cuda")
    target.copy_(source, non_blocking=True)
    source.fill_(5.0)  # too early
    assert target.tolist() == [5.0] * 3
    target.copy_(source, non_blocking=True)
    torch.cuda.synchronize()
    source.fill_(7.0)
    assert target.tolist() == [5.0] * 3
    target.copy_(source, non_blocking=True)
    target.add_(0.0)  # the device may not have come to the copy yet
    source.fill_(8.0)
    refused("CUDA may read pinned memory until somebody has waited", torch.cuda.synchronize)


@on_devices(1)
def test_results_of_another_stream_are_seen_by_those_who_waited(folder: Path) -> None:
    x = torch.arange(3.0, device="cuda")
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        assert all(map(math.isnan, (x * 2).tolist()))  # it has not waited for the default stream
    assert x.tolist() == [0.0, 1.0, 2.0]  # the host has waited now, and so everybody sees it
    with torch.cuda.stream(side):
        y = x * 2
        assert y.sum().item() == 6.0
        y += 1
        inner = y * 1
    assert math.isnan(float((x + y).sum()))  # nobody has waited
    torch.cuda.current_stream().wait_stream(side)
    assert y.tolist() == [1.0, 3.0, 5.0]
    assert inner.tolist() == [1.0, 3.0, 5.0]
    with torch.cuda.stream(side):
        first = x + 1
        event = torch.cuda.Event()
        event.record()
        second = x + 2
    torch.cuda.current_stream().wait_event(event)
    assert first.tolist() == [1.0, 2.0, 3.0]
    assert all(map(math.isnan, second.tolist()))
    side.synchronize()
    assert second.tolist() == [2.0, 3.0, 4.0]


@on_devices(1)
def test_memory_changed_on_another_stream_is_seen_by_those_who_waited(folder: Path) -> None:
    x, side = torch.arange(4.0, device="cuda"), torch.cuda.Stream()
    changes = (lambda y: y.copy_(x), lambda y: y.add_(x), lambda y: torch._foreach_copy_(y.split(2), x.split(2)))
    for change in changes:
        whole = torch.zeros(6, device="cuda")
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            change(whole.narrow(0, 1, 4))
        assert [math.isnan(value) for value in whole.tolist()] == [False, True, True, True, True, False]
        torch.cuda.current_stream().wait_stream(side)
        assert whole.tolist() == [0.0, 0.0, 1.0, 2.0, 3.0, 0.0]


@on_devices(1)
def test_copies_on_another_stream_are_seen_by_those_who_waited(folder: Path) -> None:
    source = torch.ones(3).pin_memory()
    side = torch.Stream("cuda")
    with side:
        there = source.to("cuda", non_blocking=True)
    assert all(map(math.isnan, there.tolist()))
    torch.accelerator.current_stream().wait_stream(side)
    assert there.tolist() == [1.0] * 3
    back = torch.full((3,), -1.0).pin_memory()
    with side:
        back.copy_(there, non_blocking=True)
    torch.accelerator.current_stream().wait_stream(side)
    assert back.tolist() == [-1.0] * 3  # the device waits for it, the host does not
    torch.accelerator.current_stream().synchronize()
    assert back.tolist() == [1.0] * 3


@on_devices(2)
def test_other_streams_see_what_the_default_stream_has_done_when_they_waited(folder: Path) -> None:
    sides = torch.cuda.Stream(), torch.cuda.Stream()
    x = torch.arange(3.0, device="cuda")
    sides[0].wait_stream(torch.cuda.current_stream())
    sides[1].wait_stream(sides[0])
    x.add_(1)  # after they have waited
    y = x.clone()
    for side in sides:
        with torch.cuda.stream(side):
            assert all(map(math.isnan, (x + 0).tolist()))
    for side in sides:
        with torch.cuda.stream(side):
            side.wait_stream(torch.cuda.default_stream())
            assert (x + y).tolist() == [2.0, 4.0, 6.0]
    z = torch.ones(3, device="cuda:1")
    x.add_(z.to("cuda:0"))  # both devices' streams are in order
    assert x.tolist() == [2.0, 3.0, 4.0]


@on_devices(1)
def test_copy_on_another_stream_reads_what_is_there_when_somebody_waits(folder: Path) -> None:
    side = torch.cuda.Stream()

    def copied(change, is_recorded: bool = False) -> list[float]:
        held = {"x": torch.arange(3.0, device="cuda")}
        target = torch.full((3,), -1.0).pin_memory()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            target.copy_(held["x"], non_blocking=True)
        if is_recorded:
            held["x"].record_stream(side)
        change(held)
        side.synchronize()
        return target.tolist()

    assert copied(lambda held: None) == [0.0, 1.0, 2.0]
    assert copied(lambda held: held["x"].add_(5)) == [5.0, 6.0, 7.0]  # nobody has waited for the copy
    assert copied(lambda held: (torch.cuda.current_stream().wait_stream(side), held["x"].add_(5))) == [0.0, 1.0, 2.0]
    assert all(map(math.isnan, copied(dict.clear)))  # its memory was given to others
    assert copied(dict.clear, is_recorded=True) == [0.0, 1.0, 2.0]


@on_devices(1)
def test_event_has_not_happened_while_nobody_has_waited(folder: Path) -> None:
    first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    first.record()
    torch.ones(3, device="cuda").add_(1)
    last.record()
    refused("must be completed", lambda: first.elapsed_time(last))
    last.synchronize()
    assert first.elapsed_time(last) >= 0
    again = torch.cuda.Event()
    torch.ones(3, device="cuda")
    again.record()
    assert [again.query() for _ in range(3)] == [False, True, True]


@on_devices(1)
def test_memory_that_nobody_has_written_holds_no_number(folder: Path) -> None:
    assert all(map(math.isnan, torch.empty(3, device="cuda").tolist()))


@on_devices(1)
def test_waits_and_copies_are_counted(folder: Path) -> None:
    x = torch.ones(3, device="cuda")
    torch.cuda.simulated.reset_counts()
    x.sum().item()
    assert torch.cuda.simulated.counts() == {"kernels": 1, "reads": 1, "to_device": 0, "to_host": 0, "waits": 1}
    x.cpu()
    torch.ones(3).to("cuda")
    torch.cuda.synchronize()
    counted = torch.cuda.simulated.counts()
    assert (counted["to_host"], counted["to_device"], counted["waits"], counted["reads"]) == (1, 1, 4, 1)


@on_devices(1)
def test_host_waits_where_it_needs_the_result(folder: Path) -> None:
    x = torch.arange(3.0, device="cuda")
    pinned, mask, places = torch.ones(3).pin_memory(), x > 1, torch.tensor([0, 2], device="cuda")
    waits = {
        "a number of the host": lambda: torch.tensor([1.0], device="cuda"),
        "a copy that blocks": lambda: pinned.to("cuda"),
        "rows that are counted": lambda: x.nonzero(),
        "a mask": lambda: x[mask],
        "indices of the host": lambda: x[torch.tensor([0, 2])],
        "a comparison": lambda: torch.equal(x, x),
    }
    none = {
        "a number": lambda: torch.full((3,), 1.0, device="cuda"),
        "a copy that does not block": lambda: pinned.to("cuda", non_blocking=True),
        "indices": lambda: x[places],
        "a choice": lambda: torch.where(mask, x, 0.0),
        "a number of the host that is added": lambda: x + torch.tensor(2.0),
    }
    for expected, calls in ((1, waits), (0, none)):
        for name, call in calls.items():
            torch.cuda.simulated.reset_counts()
            call()
            assert torch.cuda.simulated.counts()["waits"] == expected, name


# --- memory, and devices that fail


@on_devices(2, SIMULATED_GPU_BYTES=str(2**20))
def test_each_device_has_so_much_memory(folder: Path) -> None:
    held = torch.zeros(2**17, device="cuda:1")  # half of it
    assert torch.cuda.memory_allocated(1) == 2**19
    assert torch.cuda.memory_allocated(0) == 0
    with pytest.raises(torch.OutOfMemoryError, match=r"Tried to allocate 1\.00 MiB\. GPU 1 .* 0\.50 MiB is free"):
        torch.zeros(2**18, device="cuda:1")
    torch.zeros(2**17, device="cuda:0")
    assert torch.cuda.mem_get_info(1) == (2**19, 2**20)
    del held
    torch.zeros(2**18, device="cuda:1")
    assert (torch.cuda.memory_allocated(1), torch.cuda.max_memory_allocated(1)) == (0, 2**20)
    torch.cuda.reset_peak_memory_stats(1)
    assert torch.cuda.max_memory_allocated(1) == 0


@on_devices(2)
def test_device_that_failed_fails_from_then_on(folder: Path) -> None:
    here, there = torch.ones(2, device="cuda:0"), torch.ones(2, device="cuda:1")
    torch.cuda.simulated.break_device(0, "an illegal memory access was encountered")
    for call in (lambda: here + 1, here.cpu, lambda: torch.ones(1, device="cuda:0"), torch.cuda.synchronize):
        with pytest.raises(torch.AcceleratorError, match="CUDA error: an illegal memory access was encountered"):
            call()
    assert there.tolist() == [1.0, 1.0]


@on_devices(2)
def test_index_that_is_out_of_bounds_breaks_the_device(folder: Path) -> None:
    table, x = torch.ones(3, 2, device="cuda:1"), torch.ones(3, device="cuda:1")
    with pytest.raises(IndexError, match="out of range"):
        x.select(0, 5)  # the host finds this one
    assert x.sum().item() == 3.0
    for call in (lambda: functional.embedding(torch.tensor([5], device="cuda:1"), table), lambda: x + 1):
        with pytest.raises(torch.AcceleratorError, match="device-side assert triggered"):
            call()
    assert torch.ones(1, device="cuda:0").item() == 1.0


# --- processes


@on_devices(1)
def test_child_forked_before_devices_are_used_has_them(folder: Path) -> None:
    assert run_in_fork(lambda: torch.ones(2, device="cuda").sum().item()) == "2.0"
    assert torch.ones(1, device="cuda").item() == 1.0


@on_devices(1)
def test_child_forked_afterwards_has_none(folder: Path) -> None:
    torch.ones(1, device="cuda")
    assert "Cannot re-initialize CUDA in forked subprocess" in run_in_fork(lambda: torch.ones(1, device="cuda"))


@on_devices(1)
def test_question_for_devices_counts_as_use_unless_nvml_is_asked(folder: Path) -> None:
    assert torch.cuda.is_available()
    assert "Cannot re-initialize CUDA" in run_in_fork(lambda: torch.ones(1, device="cuda"))


def test_calls_of_the_driver_count_as_use(simulated_devices, tmp_path):
    calls = ("set_device", "count without NVML", "pinned memory", "stream", "event", "backward", "properties")
    for call in calls:
        environment = {"SIMULATED_NVML": "0"} if call == "count without NVML" else {}
        simulated_devices.call(check_use, tmp_path, environment=environment, call=call)


def check_use(folder: Path, call: str) -> None:
    """Check that a child that is forked after a call has no devices."""
    calls = {
        "set_device": lambda: torch.cuda.set_device(0),
        "count without NVML": torch.cuda.device_count,
        "pinned memory": lambda: torch.ones(3).pin_memory(),
        "stream": torch.cuda.Stream,
        "event": lambda: torch.cuda.Event().record(),
        "backward": lambda: torch.ones(1, requires_grad=True).sum().backward(),  # its threads are one for each device
        "properties": lambda: torch.cuda.get_device_properties(0),
    }
    torch.accelerator.device_count()
    torch.manual_seed(1)
    if call != "count without NVML":
        assert run_in_fork(lambda: torch.ones(1, device="cuda").item()) == "1.0"
    calls[call]()
    assert "Cannot re-initialize CUDA" in run_in_fork(lambda: torch.ones(1, device="cuda")), call


@on_devices(1, PYTORCH_NVML_BASED_CUDA_CHECK="1")
def test_question_to_nvml_is_no_use(folder: Path) -> None:
    assert torch.cuda.is_available()
    assert run_in_fork(lambda: torch.ones(1, device="cuda").item()) == "1.0"
