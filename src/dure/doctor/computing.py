"""Findings on how a step is computed: on too many devices or threads, in too small operations or batches."""

from collections.abc import Iterator

from dure.doctor.speed import Speed, as_ms, finding_of
from dure.records.finding import Finding

_LEAST_COMPUTING = 0.4
"""Fraction of a step from which it matters how it is computed."""
_MOST_TIMES_LEAST = 6.0
"""Multiple of the time of the smallest operation up to which calling operations takes most of a step: forward and
backward of small models take 1 to 3 times as long per operation of the backward, those of larger ones more than 8."""
_MOST_LEAST_SECONDS = 1e-3
_MANY_OPERATIONS = 200
_MANY_MICROBATCHES = 8
_FEW_SAMPLES = 4


def too_small_to_distribute(speed: Speed) -> Iterator[Finding]:
    """Yield a finding if one device that did the work of all ranks, one after another, would be as fast."""
    times, num_ranks = speed.times, len(speed.times.ranks)
    if num_ranks == 1 or num_ranks != speed.setup.num_devices:
        return
    compute, data = float(speed.mean("forward_backward").sum()), float(speed.mean("data").sum())
    rest = float((speed.mean("optimizer") + speed.mean("other")).max())
    alone, wall = compute + data + rest, speed.wall
    is_idle = float(speed.mean("forward_backward").min()) == 0.0  # a rank that only serves the others
    if is_idle or alone > wall:
        return
    yield finding_of(
        speed,
        "too_small_to_distribute",
        (1 - alone / wall) * speed.step_fraction,
        f"one device would be as fast as {num_ranks}: {as_ms(alone)} for a step that takes {as_ms(wall)} now",
        [
            f"forward and backward of the {num_ranks} shares, one after another: {as_ms(compute)}",
            f"loading, the optimiser's step and the rest: {as_ms(data + rest)}",
            f"waiting for each other and for the network: {as_ms(float(times.seconds['sync'].mean()))} of each step",
        ],
        "a step computes too little for what the ranks spend on each other",
        f"{'--nnodes 1 ' if speed.setup.num_nodes > 1 else ''}--nproc 1; or a larger "
        + ("batch, if the model" if speed.setup.is_script else "--global-batch-size, if the task")
        + " learns as well with it",
    )


def cpu_oversubscribed(speed: Speed) -> Iterator[Finding]:
    """Yield a finding if more threads compute on a host than it has cores: because of other work, or too many ranks."""
    nproc, cores, threads = speed.setup.nproc, speed.setup.cores, speed.setup.threads
    computing = float(speed.mean("forward_backward").max()) / speed.wall * speed.step_fraction
    if speed.slow_threads:
        slow = speed.slow_threads[-1]
        yield finding_of(
            speed,
            "cpu_oversubscribed",
            computing * (1 - 1 / slow.slowdown),
            f"the {slow.threads} threads of a rank wait for cores that other work uses",
            [f"at the start small operations took {slow.slowdown:,.0f} times as long as with one thread"],
            "an operation waits for the last of its threads, and one without a core comes late",
            "--threads 1, or end the other work",
        )
    elif speed.setup.device == "cpu" and cores and nproc > cores:
        yield finding_of(
            speed,
            "cpu_oversubscribed",
            0.0,  # they compute as much in turns as side by side
            f"{nproc} ranks share {cores} cores, and so take turns",
            [f"{nproc} ranks on a host with {cores} cores"],
            "there are more ranks than cores",
            f"--nproc {cores}, or hosts with more cores",
        )
    elif speed.setup.device == "cpu" and cores and threads and nproc > 1 and nproc * threads > cores:
        fewer = max(cores // nproc, 1)
        yield finding_of(
            speed,
            "cpu_oversubscribed",
            computing / 2,  # how much it is was not measured
            f"{nproc} ranks of {threads} threads each compete for {cores} cores",
            [f"{nproc} x {threads} threads on a host with {cores} cores"],
            "an operation waits for the last of its threads, and one without a core comes late",
            f"--threads {fewer}, or torch.set_num_threads({fewer}) in the script",
        )


def small_operations(speed: Speed) -> Iterator[Finding]:
    """Yield a finding if a step mostly calls operations, and each computes little."""
    counted = speed.operations
    if counted is None or not counted.operations or not 0 < counted.least_seconds < _MOST_LEAST_SECONDS:
        return
    # a backward calls about as many operations as its forward, and their times are those of both
    seconds = float(speed.mean("forward_backward").max()) / max(_num_backwards(speed), 1.0)
    times = seconds / counted.operations / counted.least_seconds
    if times >= _MOST_TIMES_LEAST or speed.computing <= _LEAST_COMPUTING:
        return
    are_many = counted.operations >= _MANY_OPERATIONS
    what, cause = "many small operations", "the model, the loss or the optimiser works on small tensors one by one"
    remedy = "--compile, or fewer and larger operations: loops over time, heads or parameters as one (torch.func.vmap, "
    remedy += "foreach, fused optimisers)"
    if speed.setup.is_script:
        remedy = remedy.replace("--compile", "torch.compile")
    if not are_many:
        what, cause = "small operations", "there are few samples for the device, or the model is small"
        remedy = "a larger batch, if the model learns as well with it: it would take hardly longer"
    yield finding_of(
        speed,
        "python_bound" if are_many else "batch_too_small",
        speed.computing / 2 * speed.step_fraction,
        f"a step consists of {what}, and mostly calls them",
        [
            f"{counted.operations:,} operations in a backward, and for each "
            f"{1e6 * seconds / counted.operations:.1f} us of forward and backward",
            f"calling one takes {1e6 * counted.least_seconds:.1f} us at least",
        ],
        cause,
        remedy,
    )


def _num_backwards(speed: Speed) -> float:
    """Return the number of backwards of a step on a rank; 0 if it is unknown."""
    spec, samples = speed.setup.spec, speed.setup.samples_per_rank
    if spec is None:
        return speed.times.mean_of("backwards") or 0.0
    return samples / min(spec.microbatch_size or samples, samples)


def small_samples_per_step(speed: Speed) -> Iterator[Finding]:
    """Yield a finding if a step is computed in many microbatches of few samples."""
    spec, samples = speed.setup.spec, speed.setup.samples_per_rank
    num = _num_backwards(speed)
    if num < _MANY_MICROBATCHES or not 0 < samples / num <= _FEW_SAMPLES:
        return
    if speed.computing <= _LEAST_COMPUTING:
        return
    more = int(min(8 * samples / num, samples))
    yield finding_of(
        speed,
        "small_samples_per_step",
        speed.computing / 3 * speed.step_fraction,
        f"a step is computed in {num:,.0f} microbatches of {samples / num:.3g} samples",
        [f"{samples:,.0f} samples of a rank in a step"],
        "a device takes hardly longer for some more samples at once",
        f"microbatches of {more} samples, if they fit into memory"
        if spec is None
        else f"--microbatch-size {more}, if that fits into memory: the result stays the same",
    )


def low_precision_unused(speed: Speed) -> Iterator[Finding]:
    """Yield a finding if an accelerator computes in full precision."""
    spec = speed.setup.spec
    if spec is None or speed.setup.device == "cpu" or spec.precision != "fp32" or speed.computing <= _LEAST_COMPUTING:
        return
    yield finding_of(
        speed,
        "low_precision_unused",
        speed.computing * 0.4 * speed.step_fraction,
        f"the {speed.setup.device} device computes in fp32",
        [f"forward, backward and the optimiser's step take {speed.computing:.0%} of a step"],
        "matrix units of today's devices are several times as fast in bf16, and with TF32 in fp32",
        "--precision bf16, or --precision tf32 where 10 bits of mantissa are enough",
    )
