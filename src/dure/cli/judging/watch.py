"""`dure watch`: a run that goes on, in a browser and in the terminal."""

import asyncio
import tempfile
import webbrowser
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from dure.cli.runs import default_folder
from dure.errors import Misuse, RunInvalid
from dure.terminal import one_line, print_at_once, print_status

if TYPE_CHECKING:
    from dure.records.finding import Finding
    from dure.records.run_dir import RunDir
    from dure.report.live.examination import Examination
    from dure.report.live.live_run import LiveRun


def read(tokens: list[str]) -> tuple[list[str], Callable[..., None]]:
    """Return the tokens and the verb."""
    return tokens, watch


def watch(
    run: Annotated[
        Path | None, Parameter(help="the run's folder; by default the newest run that goes on, or the newest run")
    ] = None,
    /,
    *,
    terminal: Annotated[bool, Parameter(help="show it in the terminal, until it ends", negative="")] = False,
    port: Annotated[int, Parameter(help="port of the page on 127.0.0.1; 0 for a free one")] = 0,
    open: Annotated[bool, Parameter(help="open the page in the browser", negative="")] = False,
    runs_dir: Annotated[
        Path | None,
        Parameter(help="folder of the runs, of which one is chosen", show_default=lambda _: str(default_folder())),
    ] = None,
) -> None:
    """Watch a run: its page, live in a browser of this host, metrics for Prometheus, or a view in the terminal."""
    from dure.records.run_dir import RunDir
    from dure.report.live.examination import Examination
    from dure.report.live.live_run import LiveRun

    if terminal and (port or open):
        raise Misuse("--port and --open are of the page in the browser: leave them out, or --terminal")
    if not 0 <= port < 2**16:
        raise Misuse(f"--port is {port} but must be a number from 0 to 65535")
    if not terminal:
        from dure.report.page import check_library

        check_library()
    chosen = RunDir.open(run, or_script=True) if run is not None else _newest(runs_dir or default_folder())
    with Examination(chosen, _findings) as examination:
        if terminal:
            from dure.report.live.screen import show

            show(LiveRun(chosen), examination)
        else:
            _serve(LiveRun(chosen), examination, port, opens_browser=open)


def _findings(run: "RunDir") -> "Sequence[Finding]":
    from dure.doctor.findings import diagnose

    return diagnose(run).findings


def _newest(runs_dir: Path) -> "RunDir":
    """Return the newest run that goes on, or else the newest one."""
    from dure.records.run_dir import RunDir
    from dure.records.run_list import list_runs, start_time

    found = list_runs(runs_dir)
    if not found:
        raise RunInvalid(f"no runs in {runs_dir}: start one with `dure train`, or point --runs-dir at your runs")
    newest = max(found, key=lambda seen: (seen.status == "running", start_time(RunDir(Path(seen.path))), seen.name))
    return RunDir.open(Path(newest.path), or_script=True)


def _serve(live: "LiveRun", examination: "Examination", port: int, *, opens_browser: bool) -> None:
    from dure.report.live.server import WatchServer

    server = WatchServer(live, examination, port=port)

    def started() -> None:
        print_at_once(server.address)
        print_status(f"watching {one_line(live.run.path)}; Ctrl-C ends this, not the run")
        if opens_browser:
            webbrowser.open(forwarding.as_uri())

    with _forwarding_page(server.address) if opens_browser else nullcontext(Path()) as forwarding:
        asyncio.run(server.run(started))


@contextmanager
def _forwarding_page(address: str) -> Iterator[Path]:
    """Yield a file of this user alone that leads to an address: others may see the arguments of a browser."""
    with tempfile.TemporaryDirectory(prefix="dure-watch-") as folder:
        path = Path(folder) / "watch.html"
        path.write_text(f'<!DOCTYPE html><meta http-equiv="refresh" content="0; url={address}"><title>dure</title>\n')
        yield path
