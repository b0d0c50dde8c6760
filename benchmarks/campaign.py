"""A campaign of random faults over all strategies, and whether what is promised of a disturbed run comes true.

    python benchmarks/campaign.py --cases 300 --seed 1            about 25 minutes; writes results/campaign.md
    python benchmarks/campaign.py --seed 1 --case 17              that case again; its folder is kept with --keep

A case is drawn from the seed and its number: strategy and settings, and one fault (signal or another kind, receiver,
moment). What is promised is in `campaign_promises.py`: exit code and message, samples, steps, weights, status, files,
nothing left behind, a bounded time. A run that ends early is resumed, some of them another way. Cases on two hosts, on
a small disk and with `/dev/shm` of their own need root; without it they are not drawn. Ctrl-C ends it after the cases
that are done. Exits 1 if a promise was broken.
"""

import argparse
import os
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter, defaultdict
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
# before torch is imported: a process that has computed with several threads cannot be forked into ranks
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("DURE_TRUST_TASK", "true")

from campaign_case import Case, draw_case
from campaign_promises import Weights, broken_promises, check_control
from campaign_run import Places, carry_out, is_complete, places, words
from paired import HERE, describe_surroundings, surroundings, write_results
from safetensors.torch import load_file

import dure


class Campaign:
    """Cases that were carried out, and the undisturbed runs that they are compared with."""

    def __init__(self, places: Places, seed: int) -> None:
        self.places, self.seed = places, seed
        self.counts: Counter[str] = Counter()
        self.kept: dict[str, Counter[str]] = defaultdict(Counter)
        """Cases in which no promise was broken, by fault and strategy."""
        self.drawn: dict[str, Counter[str]] = defaultdict(Counter)
        """Cases that were run, by fault and strategy."""
        self.broken: list[tuple[Case, str]] = []
        self._controls: dict[tuple[object, ...], Weights] = {}

    def run(self, case: Case) -> None:
        """Carry a case out, judge it, and print what came of it."""
        folder, begun = self.places.folder / f"case-{case.number}", time.monotonic()
        found = [text.replace(f"{HERE.parent}/", "") for text in self.judge(case, folder)]
        self.places.take_from_disk(folder)
        self.broken += [(case, text) for text in found]
        print(f"{time.monotonic() - begun:5.1f} s  case {case.number}: {case}", file=sys.stderr)
        for text in found:
            print(f"BROKEN: {text}\n  {repeat_command(case, self.seed)}", flush=True)
        self.drawn[str(case.fault)][case.strategy] += 1
        self.kept[str(case.fault)][case.strategy] += not found
        self.counts["cases"] += 1
        self.counts["broken promises"] += len(found)
        if not found:
            shutil.rmtree(folder)

    def judge(self, case: Case, folder: Path) -> list[str]:
        """Carry a case out and return the promises that were broken."""
        before = self.places.named_shared_memory()
        try:
            seen = carry_out(case, self.places, folder)
        except AssertionError as error:
            return [f"it did not end, or left processes: {error}"]
        self.counts["faults that came in time"] += seen.happened
        self.counts["on two hosts"] += case.is_on_hosts
        self.counts["restarts"] += len(seen.run.events("restart"))
        self.counts["resumed"] += seen.resumed is not None
        self.counts["resumed another way"] += seen.resumed is not None and case.resumed_as is not None
        # who is killed between the two leaves no summary
        is_at_its_end = is_complete(seen.run) and (seen.run.path / "summary.json").exists()
        weights = weights_of(seen.run.path, folder) if is_at_its_end else None
        control, found = self.control(case)
        found += broken_promises(case, seen, folder, control, weights)
        found += [f"{name} is left in /dev/shm" for name in self.places.named_shared_memory() - before]
        return found

    def control(self, case: Case) -> tuple[Weights, list[str]]:
        """Return the weights of the undisturbed run, and what is wrong with them the first time that they are made."""
        key = (case.strategy, case.options, case.nproc, case.microbatch_size, case.adam, case.dropout)
        if key in self._controls:
            return self._controls[key], []
        folder = Path(tempfile.mkdtemp(prefix="control-", dir=self.places.folder))
        command = self.places.server.run(folder, *words(case, folder))
        assert command.code == 0, command.err
        weights = self._controls[key] = weights_of(folder / "run", folder)
        shutil.rmtree(folder)
        if case.strategy == "single":
            return weights, []
        single, found = self.control(replace(case, strategy="single", options=(), nproc=1, microbatch_size=None))
        return weights, [*found, *check_control(case, weights, single)]


def weights_of(run: Path, folder: Path) -> Weights:
    """Return the weights of a run's last checkpoint."""
    path = folder / f"weights-{time.time_ns()}.safetensors"
    dure.export(run, path)
    return load_file(path)


def repeat_command(case: Case, seed: int) -> str:
    """Return the command that carries out one case again."""
    return f"python benchmarks/campaign.py --seed {seed} --case {case.number}"


def table_of(campaign: Campaign) -> list[str]:
    """Return the lines of the table: faults by strategies, how many cases kept all promises."""
    strategies = sorted({name for row in campaign.drawn.values() for name in row})
    lines = [f"| | {' | '.join(strategies)} |", f"|---|{'---|' * len(strategies)}"]
    for fault, row in sorted(campaign.drawn.items()):
        cells = [cell_of(campaign.kept[fault][name], row[name]) for name in strategies]
        lines.append(f"| {fault} | {' | '.join(cells)} |")
    return lines


def cell_of(kept: int, drawn: int) -> str:
    """Return one cell of the table."""
    if not drawn:
        return ""
    return str(drawn) if kept == drawn else f"**{kept} of {drawn}**"


def page_of(campaign: Campaign, record: dict[str, Any]) -> str:
    """Return the page of results."""
    lines = [
        f"# {record['counts']['cases']} runs with a random fault each\n",
        f"{describe_surroundings(record)} {record['seconds'] / 60:.0f} minutes.\n",
        "\n".join(f"- {name}: {count}" for name, count in record["counts"].items()),
        "\nCases by fault and strategy; where a promise was broken, how many kept all:\n",
        *table_of(campaign),
        "",
    ]
    if campaign.broken:
        lines += ["Broken promises:\n"]
        lines += [f"- `{repeat_command(case, campaign.seed)}` {case}: {text}" for case, text in campaign.broken]
        lines += [""]
    return "\n".join(lines)


def main() -> None:
    """Draw cases, carry them out, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=300)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--case", type=int, nargs="*", help="these alone; no page is written")
    parser.add_argument("--keep", type=Path, help="a folder, made anew, for the runs of broken promises")
    parser.add_argument("--results", type=Path, default=HERE / "results")
    options = parser.parse_args()
    record: dict[str, Any] = surroundings()
    is_root = os.geteuid() == 0 and sys.platform == "linux"
    begun = time.monotonic()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # hosts and the small disk are taken away then, too
    with tempfile.TemporaryDirectory(prefix="dure-campaign-") as name:
        folder = Path(name) if options.keep is None else options.keep.absolute()
        folder.mkdir(exist_ok=True)
        numbers = options.case or range(options.cases)
        cases = [draw_case(options.seed, number, can_have_hosts=is_root, can_mount=is_root) for number in numbers]
        with places(folder, with_hosts=any(case.is_on_hosts for case in cases), can_mount=is_root) as where:
            campaign = Campaign(where, options.seed)
            with suppress(KeyboardInterrupt):  # what was done so far is written down
                for case in cases:
                    campaign.run(case)
    record |= {"seed": options.seed, "seconds": time.monotonic() - begun, "counts": dict(campaign.counts)}
    record["broken"] = [{"case": case.number, "what": str(case), "promise": text} for case, text in campaign.broken]
    if not options.case:
        write_results(options.results, "campaign", record, page_of(campaign, record))
    if campaign.broken:
        raise SystemExit(f"campaign: {len(campaign.broken)} promises were broken")


if __name__ == "__main__":
    main()
