"""Checks of a host's GPUs and of the links between them."""

from collections import Counter
from collections.abc import Iterator

from dure.host.device_kinds import device_kind
from dure.host.gpu_health import RECOVERIES
from dure.host.nvml import Gpu, GpuFacts
from dure.preflight.findings import Finding, failure, ok, skipped, warning
from dure.preflight.host_facts import HostFacts
from dure.units import format_bytes

_LEAST_FREE_BYTES = 2**30
_LEAST_FREE_FRACTION = 0.9
_NVSWITCH = "NVSwitch"


def gpu_checks(facts: HostFacts, *, share_devices: bool) -> list[Finding]:
    """Judge the GPUs of one host."""
    kind = device_kind(facts.device)
    needed = 1 if share_devices else facts.num_devices
    if kind.has_several and facts.visible_devices < needed:
        return [_too_few(facts, needed)]
    if kind.has_several and not kind.has_nvml:
        seen = f"torch sees {facts.visible_devices} {kind.title} device(s)"
        return [ok("GPUs", seen), skipped("GPU health", f"only NVIDIA's are known, and these are {kind.title} devices")]
    if not kind.has_nvml:
        return [skipped("GPUs", _why_skipped(facts))]
    if facts.gpus.is_lost:
        return [_lost(facts.gpus)]
    if not facts.gpus.gpus:
        why = facts.gpus.why_none or "NVML sees no whole GPU among those of CUDA_VISIBLE_DEVICES"
        return [ok("GPUs", f"torch sees {facts.visible_devices}"), skipped("GPU links", why)]
    used = facts.gpus.gpus[: facts.num_devices]
    return [
        *(list(_usable(used, share_devices=share_devices)) or [ok("GPUs", _named(facts.gpus, used))]),
        *(list(_room(used)) or [ok("GPU memory", f"{format_bytes(min(gpu.free_bytes for gpu in used))} free on each")]),
        *(list(_health(used)) or [ok("GPU health", "no memory errors, nothing slows them down")]),
        *_peers(facts.gpus, used),
        *(list(_links(used)) or [ok("GPU links", _links_text(used))]),
    ]


def _why_skipped(facts: HostFacts) -> str:
    if facts.gpus.why_none is not None:
        return facts.gpus.why_none
    return f"the run is on the {facts.device.upper()}" + (
        f"; {len(facts.gpus.gpus)} x {facts.gpus.gpus[0].name} would be there" if facts.gpus.gpus else ""
    )


def _too_few(facts: HostFacts, needed: int) -> Finding:
    kind = device_kind(facts.device)
    seen = f"torch sees {facts.visible_devices} {kind.title} device(s)"
    if not kind.has_nvml:
        chosen = f"look at {kind.visible}" if kind.visible else "look which its driver shows"
        cure = f"use a smaller --nproc, {chosen}, or use --device cpu"
        return failure("GPUs", seen, f"the run needs {needed}", cure)
    if facts.gpus.is_broken or (facts.gpus.why_none and not facts.visible_devices):
        return failure(
            "GPUs",
            f"{seen}; {facts.gpus.why_none}",
            f"the run needs {needed}",
            "install the driver, or reboot so that its module and its library are of one version (`nvidia-smi` says "
            "whether it works), or use --device cpu",
        )
    if not facts.versions.get("CUDA") and not facts.versions.get("ROCm"):
        return failure(
            "GPUs",
            f"this torch ({facts.versions['torch']}) is built without CUDA",
            f"the run needs {needed} CUDA device(s)",
            "install a CUDA build of torch, or use --device cpu",
        )
    return failure(
        "GPUs",
        seen,
        f"the run needs {needed}",
        "use a smaller --nproc, look at CUDA_VISIBLE_DEVICES, or let ranks share one with --share-devices",
    )


def _lost(facts: GpuFacts) -> Finding:
    return failure(
        "GPUs",
        f"{facts.why_none}",
        "ranks compute on it",
        "reboot the host, or leave this GPU out with CUDA_VISIBLE_DEVICES; if it is lost again, have it replaced",
    )


def _named(facts: GpuFacts, used: tuple[Gpu, ...]) -> str:
    kinds = Counter(gpu.name for gpu in used)
    models = ", ".join(f"{count} x {name}" for name, count in kinds.items())
    return f"{models}, driver {facts.driver} (up to CUDA {facts.cuda_of_driver or '?'})"


def _usable(used: tuple[Gpu, ...], *, share_devices: bool) -> Iterator[Finding]:
    for gpu in used:
        name, mode = f"GPU {gpu.index}", f"nvidia-smi -i {gpu.bus_id} -c DEFAULT"
        if gpu.compute_mode == "prohibited":
            yield failure("GPUs", f"{name} is in compute mode prohibited", "ranks compute on it", f"`{mode}`")
        if gpu.compute_mode == "exclusive" and share_devices:
            yield failure("GPUs", f"{name} lets in one process only", "ranks are to share it", f"`{mode}`")
        if gpu.has_instances:
            yield warning(
                "GPUs",
                f"{name} is divided (MIG)",
                "parts of a GPU cannot reach each other's memory",
                f"`nvidia-smi -i {gpu.bus_id} -mig 0`, unless each rank is to have a part",
            )
    kinds = {gpu.name for gpu in used}
    if len(kinds) > 1:
        yield warning(
            "GPUs",
            f"they are of {len(kinds)} kinds: {', '.join(sorted(kinds))}",
            "all ranks wait for the slowest, and CUDA may count them in another order than NVML",
            "choose one kind with CUDA_VISIBLE_DEVICES, and set CUDA_DEVICE_ORDER=PCI_BUS_ID",
        )


def _room(used: tuple[Gpu, ...]) -> Iterator[Finding]:
    for gpu in used:
        who = "" if gpu.num_processes is None else f", {gpu.num_processes} process(es) compute there"
        seen = f"GPU {gpu.index} has {format_bytes(gpu.free_bytes)} of {format_bytes(gpu.total_bytes)} free{who}"
        cure = f"see who it is with `nvidia-smi -i {gpu.bus_id}`, or leave this GPU out with CUDA_VISIBLE_DEVICES"
        if gpu.free_bytes < min(_LEAST_FREE_BYTES, gpu.total_bytes / 2):
            yield failure("GPU memory", seen, f"a rank needs {format_bytes(_LEAST_FREE_BYTES)} to begin with", cure)
        elif gpu.free_bytes < _LEAST_FREE_FRACTION * gpu.total_bytes or gpu.num_processes:
            yield warning("GPU memory", seen, "a run wants its GPUs for itself", cure)


def _health(used: tuple[Gpu, ...]) -> Iterator[Finding]:
    for gpu in used:
        name = f"GPU {gpu.index}"
        if gpu.num_uncorrected:
            yield failure(
                "GPU health",
                f"{name} had {gpu.num_uncorrected} memory error(s) that ECC could not mend",
                "what it computes must be right",
                f"reset it (`nvidia-smi -i {gpu.bus_id} -r`) or leave it out; if they come again, have it replaced",
            )
        if gpu.recovery_action in RECOVERIES:
            wanted, is_lost = RECOVERIES[gpu.recovery_action]
            yield (failure if is_lost else warning)(
                "GPU health",
                f"{name} {wanted}",
                "nothing computes there before" if is_lost else "it had errors that only this mends",
                f"`nvidia-smi -i {gpu.bus_id} -r` or a reboot, or leave it out with CUDA_VISIBLE_DEVICES",
            )
        if gpu.is_repair_pending:
            yield warning(
                "GPU health",
                f"{name} has rows of memory that wait to be replaced",
                "that happens at a reset only",
                f"`nvidia-smi -i {gpu.bus_id} -r` when nobody uses it",
            )
        if gpu.slowed_by:
            yield warning(
                "GPU health",
                f"{name} is slowed down: {', '.join(gpu.slowed_by)}",
                "all ranks wait for the slowest",
                "look at its cooling and power supply (`nvidia-smi -q -d PERFORMANCE,TEMPERATURE,POWER`)",
            )
    sleepy = [str(gpu.index) for gpu in used if gpu.is_persistent is False]
    if sleepy:
        yield warning(
            "GPU health",
            f"GPU {', '.join(sleepy)}: persistence mode is off",
            "the driver goes away when nobody uses it, and then each start takes seconds longer",
            "run nvidia-persistenced, or `nvidia-smi -pm 1`",
        )


def _peers(facts: GpuFacts, used: tuple[Gpu, ...]) -> list[Finding]:
    if len(used) < 2:
        return [skipped("GPU peer access", "one GPU has no peers")]
    known = {gpu.index: gpu for gpu in used}
    pairs = [pair for pair in facts.pairs if pair.first in known and pair.second in known]
    bad = []
    for pair in pairs:
        if pair.refusal is None:
            continue
        ends = (f"GPU {pair.first}", f"GPU {pair.second}")
        seen = f"{ends[0]} and {ends[1]} ({pair.path}) do not reach each other's memory: {pair.refusal}"
        if all(_NVSWITCH in known[end].nvlinks for end in (pair.first, pair.second)):
            cure = "start nvidia-fabricmanager, of the driver's very version (`systemctl status nvidia-fabricmanager`)"
            bad.append(failure("GPU peer access", seen, "an NVSwitch joins them", cure, ends))
        else:
            rule = "without that NCCL copies through the host's memory, which is slower"
            cure = (
                "switch ACS and the IOMMU off, or pass the GPUs of one PCIe switch to a virtual machine together; some "
                "GPUs cannot do it at all"
            )
            bad.append(warning("GPU peer access", seen, rule, cure, ends))
    return bad or [ok("GPU peer access", f"all {len(pairs)} pair(s) reach each other's memory")]


def _links(used: tuple[Gpu, ...]) -> Iterator[Finding]:
    for gpu in used:
        name = f"GPU {gpu.index}"
        if gpu.pcie_width and gpu.most_pcie_width and gpu.pcie_width < gpu.most_pcie_width:
            yield warning(
                "GPU links",
                f"{name} ({gpu.bus_id}) has {gpu.pcie_width} PCIe lanes",
                f"it could have {gpu.most_pcie_width}",
                "reseat the card or its riser, or take another slot",
            )
        if gpu.num_inactive_nvlinks and gpu.nvlinks:
            yield warning(
                "GPU links",
                f"{name} ({gpu.bus_id}) has {gpu.num_inactive_nvlinks} NVLink(s) down",
                f"{sum(gpu.nvlinks.values())} are up",
                f"look at `nvidia-smi nvlink -s -i {gpu.bus_id}`: a bridge, a cable or a switch is bad",
            )
    counts = {gpu.index: sum(gpu.nvlinks.values()) for gpu in used}
    most = max(counts.values())
    fewer = [str(index) for index, count in counts.items() if 0 < count < most or (most and not count)]
    if fewer and not any(gpu.num_inactive_nvlinks for gpu in used):
        yield warning(
            "GPU links",
            f"GPU {', '.join(fewer)}: fewer NVLinks than the others' {most}",
            "the slowest way decides how fast all are",
            "choose GPUs that are joined alike with CUDA_VISIBLE_DEVICES (`nvidia-smi topo -m`)",
        )


def _links_text(used: tuple[Gpu, ...]) -> str:
    """Return the links between the GPUs as text, with equal ones merged."""
    counts = Counter(f"{_nvlinks_text(gpu)}{_pcie_text(gpu)}" for gpu in used)
    if len(counts) == 1 and len(used) > 1:
        return f"each {next(iter(counts))}"
    return "; ".join(f"GPU {gpu.index} {_nvlinks_text(gpu)}{_pcie_text(gpu)}" for gpu in used)


def _nvlinks_text(gpu: Gpu) -> str:
    if not gpu.nvlinks:
        return ""
    ends = " and ".join(f"{count} to {end}" for end, count in sorted(gpu.nvlinks.items()))
    return f"NVLink {gpu.nvlink_version} x {ends}, "


def _pcie_text(gpu: Gpu) -> str:
    if gpu.pcie_width is None or gpu.pcie_generation is None:
        return "PCIe not known"
    least = gpu.most_pcie_generation or gpu.pcie_generation
    idle = f", {gpu.pcie_generation} while idle" if gpu.pcie_generation < least else ""
    return f"PCIe {least} x {gpu.pcie_width} lanes{idle}"
