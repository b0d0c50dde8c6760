"""Picture of a run for the README: the real output of `make demo` in a terminal of 100 columns, as an SVG.

    python docs/images/run.py            run the command in tmux, write docs/images/run.svg

The lines of the epochs in the middle are left out; nothing else is changed. The SVG has its own dark background, so it
is readable on light and on dark pages, and loads no font.
"""

import re
import shlex
import subprocess
import sys
import tempfile
import time
from decimal import Decimal
from io import StringIO
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import MONOKAI
from rich.text import Text

ROOT = Path(__file__).parents[2]
COMMAND = "dure train examples/digits.py:Digits --strategy ddp --nproc 2"
COLUMNS, ROWS = 100, 60
SHOWN_COLUMNS = 90
"""Columns of the picture: no line of the output is longer, and a narrower picture has larger letters."""
MOST_LINES = 5
"""Lines of epochs in a row that are shown whole; of more, the first three and the last."""
LIMIT_SECONDS = 120.0
BLANK = "&#160;"
FORMAT = """<svg class="rich-terminal" viewBox="0 0 {width} {height}" xmlns="http://www.w3.org/2000/svg">
<style>
.{unique_id}-matrix {{
  font-family: ui-monospace, SFMono-Regular, Menlo, Consolas, "DejaVu Sans Mono", monospace;
  font-size: {char_height}px; line-height: {line_height}px; font-variant-east-asian: full-width;
}}
.{unique_id}-title {{ font-size: 18px; font-weight: bold; font-family: Arial, "DejaVu Sans", sans-serif; }}
{styles}
</style>
<defs>
<clipPath id="{unique_id}-clip-terminal">
<rect x="0" y="0" width="{terminal_width}" height="{terminal_height}" />
</clipPath>
{lines}
</defs>
{chrome}
<g transform="translate({terminal_x}, {terminal_y})" clip-path="url(#{unique_id}-clip-terminal)">
{backgrounds}
<g class="{unique_id}-matrix">
{matrix}
</g>
</g>
</svg>
"""
"""rich's own format without its web font, which a picture in a page may not load."""


def main() -> None:
    """Write the picture."""
    lines = shortened(output())
    console = Console(record=True, width=SHOWN_COLUMNS, file=StringIO(), force_terminal=True)
    console.print(Text.from_ansi(f"\x1b[1m$ {COMMAND}\x1b[0m\n" + "\n".join(lines)), highlight=False, soft_wrap=False)
    svg = console.export_svg(title="dure", theme=MONOKAI, code_format=FORMAT, unique_id="run")
    text = "\n".join(line.rstrip() for line in without_indents(svg).splitlines()) + "\n"
    (ROOT / "docs/images/run.svg").write_text(text, encoding="utf-8")


def without_indents(svg: str) -> str:
    """Return the SVG with each text placed where its first letter is: some renderers drop leading blanks."""
    cell = Decimal("12.2")

    def placed(match: re.Match[str]) -> str:
        blanks = len(match["blanks"]) // len(BLANK)
        x, length = Decimal(match["x"]) + blanks * cell, Decimal(match["length"]) - blanks * cell
        return f'x="{x}" y="{match["y"]}" textLength="{length}" {match["clip"]}>'

    number = r'"(?P<{}>[\d.]+)"'
    return re.sub(
        f"x={number.format('x')} y={number.format('y')} textLength={number.format('length')} "
        rf'(?P<clip>clip-path="[^"]*")>(?P<blanks>(?:{BLANK})+)(?=[^<&\n])',
        placed,
        svg,
    )


def output() -> list[str]:
    """Return the lines that the command leaves in the terminal, with their colours."""
    with tempfile.TemporaryDirectory() as name:
        server, done = ["tmux", "-S", f"{name}/tmux"], Path(name) / "done"
        python = shlex.join([sys.executable, "-m", *COMMAND.split()])
        script = f"cd {shlex.quote(str(ROOT))}; {python} && : > {shlex.quote(str(done))}; sleep {LIMIT_SECONDS:.0f}"
        size = ["-x", str(COLUMNS), "-y", str(ROWS)]
        subprocess.run([*server, "-f", "/dev/null", "new-session", "-d", *size, script], check=True)
        try:
            deadline = time.monotonic() + LIMIT_SECONDS
            while not done.exists():
                if time.monotonic() > deadline:
                    raise SystemExit("the run did not complete")
                time.sleep(0.2)
            shown = subprocess.run([*server, "capture-pane", "-p", "-e"], check=True, capture_output=True, text=True)
        finally:
            subprocess.run([*server, "kill-server"], check=True)
    return shown.stdout.rstrip().splitlines()


def shortened(lines: list[str]) -> list[str]:
    """Return the lines without those of the epochs in the middle."""
    kept: list[str] = []
    epochs: list[str] = []
    for line in [*lines, ""]:
        if re.match(r"(epoch)?\s+\d+\s", Text.from_ansi(line).plain):
            epochs.append(line)
            continue
        if len(epochs) > MOST_LINES:
            epochs[3:-1] = [f"\x1b[2m  … {len(epochs) - 4} epochs left out of this picture …\x1b[0m"]
        kept += [*epochs, line]
        epochs = []
    return kept[:-1]


if __name__ == "__main__":
    main()
