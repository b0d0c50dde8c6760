"""GPUs and links, over a stand-in that has pynvml's own names, constants and errors."""

import pynvml
import pytest

from dure.host.gpu_health import visible_positions
from dure.host.nvml import GpuFacts, gpu_facts
from dure.preflight.findings import Finding
from dure.preflight.gpu_checks import gpu_checks
from tests.preflight.facts import host, of_name
from tests.preflight.nvml import Card, Nvml, installed

HGX = [Card(bus, links=["switch"] * 18) for bus in (0x1B, 0x43, 0x52, 0x61)]
BRIDGED = [Card(0x10, links=[0x11] * 4), Card(0x11, links=[0x10] * 4)]
PLAIN = [Card(0x10, name="NVIDIA L40S", pcie=(1, 4, 16, 16)), Card(0x90, name="NVIDIA L40S", pcie=(1, 4, 16, 16))]


def facts_of(*cards: Card) -> GpuFacts:
    nvml = Nvml(*cards)
    with installed(nvml, ",".join(map(str, range(len(cards))))):
        found = gpu_facts()
    assert not nvml.is_open
    return found


def checked(*cards: Card, share_devices: bool = False) -> list[Finding]:
    count = len(cards)
    facts = host(device="cuda", num_devices=count, visible_devices=count, gpus=facts_of(*cards))
    return gpu_checks(facts, share_devices=share_devices)


def statuses(findings: list[Finding]) -> dict[str, str]:
    return {finding.name: finding.status for finding in findings}


ALL_WELL = dict.fromkeys(["GPUs", "GPU memory", "GPU health", "GPU peer access", "GPU links"], "ok")


@pytest.mark.parametrize(
    ("cards", "links"),
    [
        (HGX, "each NVLink 4.0 x 18 to NVSwitch, PCIe 5 x 16 lanes"),
        (
            BRIDGED,
            "GPU 0 NVLink 4.0 x 4 to GPU 1, PCIe 5 x 16 lanes; GPU 1 NVLink 4.0 x 4 to GPU 0, PCIe 5 x 16 lanes",
        ),
        (PLAIN, "each PCIe 4 x 16 lanes, 1 while idle"),
    ],
    ids=["nvswitch", "bridge", "pcie"],
)
def test_gpus_when_all_is_well_then_their_links_are_told(cards, links):
    found = checked(*cards)
    assert statuses(found) == ALL_WELL
    assert of_name(found, "GPU links").seen == links


def test_gpus_when_all_is_well_then_kind_and_driver_are_told():
    assert of_name(checked(*HGX), "GPUs").seen == "4 x NVIDIA H100 80GB HBM3, driver 570.86.15 (up to CUDA 12.8)"


def test_pair_when_there_is_no_peer_access_then_it_is_named_with_its_path():
    cards = [Card(0x10, peers=pynvml.NVML_P2P_STATUS_IOH_TOPOLOGY_NOT_SUPPORTED), Card(0x90)]
    found = of_name(checked(*cards), "GPU peer access")
    assert (found.status, found.pair) == ("warning", ("GPU 0", "GPU 1"))
    assert found.seen == (
        "GPU 0 and GPU 1 (between CPU sockets) do not reach each other's memory: no PCIe path between them supports it"
    )
    assert "switch ACS and the IOMMU off" in found.cure


def test_pair_when_the_switch_between_is_not_ready_then_it_fails_and_the_fabric_manager_is_the_cure():
    cards = [Card(bus, links=["switch"] * 18, peers=pynvml.NVML_P2P_STATUS_UNKNOWN) for bus in (1, 2)]
    found = of_name(checked(*cards), "GPU peer access")
    assert found.status == "failure"
    assert "an NVSwitch joins them: start nvidia-fabricmanager" in found.text


@pytest.mark.parametrize(
    ("card", "name", "status", "text"),
    [
        (Card(1, pcie=(5, 5, 8, 16)), "GPU links", "warning", "has 8 PCIe lanes, but it could have 16: reseat"),
        (Card(1, links=["switch"] * 17 + [None]), "GPU links", "warning", "has 1 NVLink(s) down, but 17 are up"),
        (Card(1, uncorrected=3), "GPU health", "failure", "had 3 memory error(s) that ECC could not mend"),
        (Card(1, recovery=1), "GPU health", "failure", "GPU 0 must be reset, but nothing computes"),
        (Card(1, recovery=4), "GPU health", "warning", "GPU 0 should be reset when nobody uses it"),
        (Card(1, events=0x40), "GPU health", "warning", "slowed down: HW thermal slowdown"),
        (Card(1, events=0x01), "GPU health", "ok", "nothing slows them down"),
        (Card(1, persistent=False), "GPU health", "warning", "persistence mode is off"),
        (Card(1, free=0.5, processes=1), "GPU memory", "warning", "40.0 GiB of 80.0 GiB free, 1 process(es) compute"),
        (Card(1, free=0.01), "GPU memory", "failure", "819.2 MiB of 80.0 GiB free"),
        (Card(1, compute_mode=2), "GPUs", "failure", "compute mode prohibited"),
        (Card(1, mig=1), "GPUs", "warning", "is divided (MIG)"),
    ],
)
def test_gpu_when_something_is_wrong_with_it_then_it_is_named(card, name, status, text):
    found = of_name(checked(card), name)
    assert (found.status, text in found.text) == (status, True), found.text


def test_gpu_when_it_is_to_be_shared_but_lets_in_one_process_then_it_fails():
    cards = [Card(1, compute_mode=pynvml.NVML_COMPUTEMODE_EXCLUSIVE_PROCESS)]
    assert statuses(checked(*cards))["GPUs"] == "ok"
    assert "lets in one process only" in of_name(checked(*cards, share_devices=True), "GPUs").seen


def test_links_when_one_gpu_has_fewer_then_it_is_named():
    found = of_name(checked(Card(1, links=[2] * 4), Card(2, links=[1] * 4), Card(3)), "GPU links")
    assert found.seen == "GPU 2: fewer NVLinks than the others' 4"


@pytest.mark.parametrize(
    ("why_not", "said", "is_broken"),
    [
        (pynvml.NVML_ERROR_LIBRARY_NOT_FOUND, "no NVIDIA driver", False),
        (pynvml.NVML_ERROR_DRIVER_NOT_LOADED, "the NVIDIA driver does not work: Driver Not Loaded", True),
        (
            pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH,
            "the NVIDIA driver does not work: RM has detected an NVML/RM version mismatch.",
            True,
        ),
    ],
)
def test_driver_when_it_is_missing_or_broken_then_that_is_told(why_not, said, is_broken):
    with installed(Nvml(why_not=why_not)):
        facts = gpu_facts()
    assert (facts.why_none, facts.is_broken) == (said, is_broken)
    assert gpu_checks(host(gpus=facts), share_devices=False)[0].text == said
    wanted = gpu_checks(host(gpus=facts, device="cuda"), share_devices=False)[0]
    assert (wanted.status, said in wanted.seen) == ("failure", True)


def test_driver_when_a_gpu_has_fallen_off_the_bus_then_that_is_told():
    nvml = Nvml(Card(1))

    def lost(_card: Card) -> None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_GPU_IS_LOST)

    nvml.nvmlDeviceGetComputeMode = lost
    with installed(nvml, "0"):
        facts = gpu_facts()
    assert facts == GpuFacts(why_none="the NVIDIA driver does not answer: GPU is lost", is_broken=True)


def test_real_library_when_there_is_no_driver_then_nothing_is_raised():
    facts = gpu_facts()
    assert facts.gpus or facts.why_none


def test_gpus_when_there_are_too_few_then_the_cure_names_the_ways_out():
    facts = host(device="cuda", num_devices=4, visible_devices=2, gpus=facts_of(*BRIDGED))
    (found,) = gpu_checks(facts, share_devices=False)
    assert found.text.startswith("torch sees 2 CUDA device(s), but the run needs 4: use a smaller --nproc")


@pytest.mark.parametrize(
    ("visible", "positions"),
    [
        (None, [0, 1, 2]),
        ("2,0", [2, 0]),
        ("0,7,1", [0]),
        ("", []),
        ("GPU-000000b", [1]),
        ("gpu-000000", []),
        ("-1", []),
        ("MIG-1/2/3", []),
    ],
)
def test_visible_gpus_when_chosen_then_are_read_as_cuda_does(visible, positions):
    assert visible_positions(visible, ["GPU-000000a1", "GPU-000000b2", "GPU-000000c3"]) == positions
