"""Checkpoints whose sums are right and whose contents lie, and processes that read them: `python malice.py FOLDERS`."""

import json
import os
import resource
import sys
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

from dure.errors import CheckpointDamaged
from dure.training.checkpoints.manifest import MANIFEST_NAME, _closing, unseal
from dure.training.checkpoints.reader import Checkpoint

HUGE = 2**36
"""Bytes: more than the machine has."""


def rewritten(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change a manifest, and seal it as its writer would."""
    file = path / MANIFEST_NAME
    data = unseal(file.read_bytes()).model_dump(mode="json")
    change(data)
    reseal(file, json.dumps(data))


def reseal(file: Path, text: str) -> None:
    body = (text.rstrip().removesuffix("}") + ",\n").encode()
    file.write_bytes(body + _closing(body))


def replaced(path: Path, name: str, data: bytes) -> None:
    """Put other bytes into a file, and their sum into the manifest."""
    (path / name).write_bytes(data)
    entry = {"num_bytes": len(data), "sha256": sha256(data).hexdigest()}
    rewritten(path, lambda manifest: manifest["files"].__setitem__(name, entry))


def longer_than_it_is(path: Path) -> None:
    rewritten(path, lambda manifest: manifest["files"]["model.safetensors"].__setitem__("num_bytes", HUGE))


def larger_tensor(path: Path) -> None:
    def change(manifest: dict[str, Any]) -> None:
        entry = manifest["model"]["frozen"]
        entry["shape"] = entry["pieces"][0]["sizes"] = [HUGE]

    rewritten(path, change)


def one_piece_again_and_again(path: Path) -> None:
    def change(manifest: dict[str, Any]) -> None:
        entry = next(entry for entry in manifest["optimizer"].values() if len(entry["shape"]) == 1)
        piece, (size,) = entry["pieces"][0], entry["shape"]
        entry["shape"] = [size * 10_000]
        entry["pieces"] = [{**piece, "offsets": [size * number]} for number in range(10_000)]

    rewritten(path, change)


def header_beyond_the_file(path: Path) -> None:
    data = (path / "model.safetensors").read_bytes()
    replaced(path, "model.safetensors", (2**63).to_bytes(8, "little") + data[8:])


def header_with_a_larger_tensor(path: Path) -> None:
    header = json.dumps({"frozen": {"dtype": "F32", "shape": [HUGE], "data_offsets": [0, 4 * HUGE]}}).encode()
    replaced(path, "model.safetensors", len(header).to_bytes(8, "little") + header)


def deep_header(path: Path) -> None:
    header = b'{"frozen":' + b"[" * 100_000 + b"]" * 100_000 + b"}"
    replaced(path, "model.safetensors", len(header).to_bytes(8, "little") + header)


def deep_state(path: Path) -> None:
    replaced(path, "state.json", b"[" * 100_000 + b"]" * 100_000)


def no_json(path: Path) -> None:
    replaced(path, "state.json", b"\x80\x04cposix\nsystem\n")


def state_of_a_tensor_that_is_not_there(path: Path) -> None:
    state = json.loads((path / "state.json").read_text())
    state["optimizer"] = {"state": {"frozen": {"exp_avg": {"$tensor": "nowhere"}}}, "groups": [{"$tensor": "nowhere"}]}
    replaced(path, "state.json", json.dumps(state).encode())


def unknown_mark(path: Path) -> None:
    state = json.loads((path / "state.json").read_text())
    state["extra"] = {"$call": "os.system"}
    replaced(path, "state.json", json.dumps(state).encode())


def deep_manifest(path: Path) -> None:
    text = json.dumps(unseal((path / MANIFEST_NAME).read_bytes()).model_dump(mode="json"))
    nested = "[" * 100_000 + "]" * 100_000
    reseal(path / MANIFEST_NAME, text.replace('"metrics": null', f'"metrics": {nested}'))


def sparse_manifest(path: Path) -> None:
    with (path / MANIFEST_NAME).open("wb") as file:
        file.truncate(HUGE)


LIES: dict[str, Callable[[Path], None]] = {
    lie.__name__: lie
    for lie in (
        longer_than_it_is,
        larger_tensor,
        one_piece_again_and_again,
        header_beyond_the_file,
        header_with_a_larger_tensor,
        deep_header,
        deep_state,
        no_json,
        state_of_a_tensor_that_is_not_there,
        unknown_mark,
        deep_manifest,
        sparse_manifest,
    )
}


def main() -> None:
    """Read each checkpoint in a process of its own."""
    for path in sys.argv[1:]:
        child = os.fork()
        if child == 0:
            tell(Path(path))
            return
        if os.waitpid(child, 0)[1]:
            sys.exit(f"reading {path} killed its process")


def tell(path: Path) -> None:
    """Say how reading a checkpoint ended, and by how many bytes the process was larger meanwhile."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    try:
        found = Checkpoint.read(path)
        said = f"read: {len(found.optimizer)} and {len(found.weights())} tensors"
    except CheckpointDamaged as error:
        said = str(error)
    print(json.dumps([said, 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)]))


if __name__ == "__main__":
    main()
