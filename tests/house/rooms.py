"""Drawing of the rooms in docs/architecture.md, made from the floors in pyproject.toml.

python -m tests.house.rooms    writes it into the page
"""

import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/architecture.md"
BEGIN, END = "<!-- rooms: python -m tests.house.rooms -->\n", "<!-- rooms end -->\n"


def floors() -> dict[str, list[list[str]]]:
    """Return the rooms of each floor, from the top down, by package."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    contracts = settings["tool"]["importlinter"]["contracts"]
    return {
        contract["containers"][0]: [
            [room.strip().strip("()") for room in floor.split(":")] for floor in contract["layers"]
        ]
        for contract in contracts
        if contract["type"] == "layers"
    }


def drawing() -> str:
    """Return a Mermaid flowchart: a row for each floor of the package, and one box for those of each large room."""
    lines = ["```mermaid", "flowchart TB"]
    package, *large = floors().items()
    inside = {name.removeprefix("dure."): rows for name, rows in large}
    rows = package[1]
    for number, row in enumerate(rows):
        lines += [f'    subgraph floor{number}[" "]', "        direction TB"]
        lines += [f'        {room}["{_label(room, inside)}"]' for room in row]
        lines.append("    end")
    lines += [f"    floor{number} --> floor{number + 1}" for number in range(len(rows) - 1)]
    return "\n".join([*lines, "```", ""])


def _label(room: str, inside: dict[str, list[list[str]]]) -> str:
    rows = (", ".join(sorted(row)) for row in inside.get(room, []))
    return "<br/>".join([f"<b>{room}</b>", *rows])


def page_with_drawing() -> str:
    """Return the page with the drawing as it is to be."""
    text = PAGE.read_text(encoding="utf-8")
    before, _, rest = text.partition(BEGIN)
    return f"{before}{BEGIN}{drawing()}{END}{rest.partition(END)[2]}"


if __name__ == "__main__":
    PAGE.write_text(page_with_drawing(), encoding="utf-8")
