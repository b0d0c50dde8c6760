"""Findings on GPUs: whether they compute all the time, and as fast as they can."""

from collections.abc import Iterator

from dure.doctor.speed import Speed, finding_of
from dure.records.finding import Finding
from dure.records.usage import GpuRecord

_FEWEST_SAMPLES = 3
_IDLE = 0.6
"""Fraction of the time below which a GPU counts as idle."""
_OFTEN_SLOWED = 0.1
"""Fraction of the samples from which a GPU counts as slowed down."""
_MOST_NAMED = 8


def _gpus(speed: Speed) -> Iterator[tuple[str, list[GpuRecord]]]:
    """Yield the samples of each GPU of each rank that has enough of them, with its name."""
    for rank, records in speed.usage.items():
        for device in sorted({gpu.device for record in records for gpu in record.gpus}):
            samples = [gpu for record in records for gpu in record.gpus if gpu.device == device]
            if len(samples) >= _FEWEST_SAMPLES:
                yield f"rank {rank}, GPU {device}", samples


def throttled(speed: Speed) -> Iterator[Finding]:
    """Yield a finding if the hardware often slowed GPUs down."""
    found = []
    for name, samples in _gpus(speed):
        slow = [gpu for gpu in samples if gpu.slowed_by]
        if len(slow) < _OFTEN_SLOWED * len(samples):
            continue
        clocks = [
            gpu.megahertz / gpu.most_megahertz
            for gpu in slow
            if gpu.megahertz and gpu.most_megahertz and 0 < gpu.megahertz <= gpu.most_megahertz
        ]
        share = len(slow) / len(samples)
        lost = share * (1 - sum(clocks) / len(clocks)) if clocks else 0.0
        reasons = ", ".join(sorted({reason for gpu in slow for reason in gpu.slowed_by})[:_MOST_NAMED])
        clock = f", its clock at {sum(clocks) / len(clocks):.0%} of the most" if clocks else ""
        found.append((lost, f"{name}: in {share:.0%} of {len(samples)} samples ({reasons}){clock}"))
    if found:
        gain = max(lost for lost, _ in found)
        yield finding_of(
            speed,
            "throttled",
            gain * speed.computing * speed.step_fraction,
            "the hardware slows GPUs down",
            [text for _, text in found[:_MOST_NAMED]],
            "heat or power: all ranks wait for the slowest GPU",
            "look at cooling and power (`nvidia-smi -q -d PERFORMANCE`), or leave this GPU out (CUDA_VISIBLE_DEVICES)",
        )


def device_idle(speed: Speed) -> Iterator[Finding]:
    """Yield a finding if a GPU computes nothing for much of the time."""
    means = {}
    for name, samples in _gpus(speed):
        known = [gpu.busy for gpu in samples if gpu.busy is not None and 0 <= gpu.busy <= 1]
        if len(known) >= _FEWEST_SAMPLES:
            means[name] = sum(known) / len(known)
    if not means or (most := max(means.values())) >= _IDLE:
        return
    yield finding_of(
        speed,
        "device_idle",
        (1 - most) / 2,
        f"no GPU computes for more than {most:.0%} of the time",
        [f"{name}: busy for {mean:.0%} of the time" for name, mean in [*means.items()][:_MOST_NAMED]],
        "it waits for the host: for data, for Python between small operations, or for a value that each step reads",
        "make one device busy before more are added: larger microbatches, --num-workers, --compile default; "
        "--trace 10 shows what it waits for",
    )
