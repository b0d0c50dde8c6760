import hashlib
import importlib.util
import io
import pickle
import tarfile
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest
import torch

from dure.data import cifar10, digits, known
from dure.errors import DataInvalid, EnvironmentLacks
from dure.torchcompat.imports import import_torchvision


def test_digits_split_is_fixed_stratified_and_complete():
    train, test = digits(train=True), digits(train=False)
    shares = torch.bincount(test.tensors[1]) / torch.bincount(train.tensors[1])
    assert (len(train), len(test)) == (1442, 355)
    assert shares.sub(0.25).abs().max() < 0.01
    assert torch.equal(digits(train=True).tensors[0], train.tensors[0])


def test_digits_are_scikit_learns_own():
    sklearn = pytest.importorskip("sklearn.datasets")
    images, labels = sklearn.load_digits(return_X_y=True)
    ours = torch.cat([digits(train=True).tensors[0], digits(train=False).tensors[0]]).flatten(1) * 16
    assert sorted(map(tuple, ours.tolist())) == sorted(map(tuple, images.tolist()))
    assert labels.tolist() == known._all_digits()[1].tolist()


def test_digits_are_float_images_between_zero_and_one():
    images, labels = digits(train=True).__getitems__([0, 1])
    assert images.shape == (2, 1, 8, 8)
    assert images.dtype == torch.float32
    assert labels.dtype == torch.int64
    assert digits(train=True).tensors[0].amin() == 0
    assert digits(train=True).tensors[0].amax() == 1


def test_digits_without_the_table_file_come_from_scikit_learns_function(monkeypatch, tmp_path):
    table = known._digits_table()
    spec = importlib.util.find_spec("sklearn")
    moved = type("Spec", (), {"submodule_search_locations": [str(tmp_path)]})()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: moved if name == "sklearn" else spec)
    assert np.array_equal(known._digits_table(), table)


def test_digits_without_scikit_learn_says_the_pip_command(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    known._all_digits.cache_clear()
    with pytest.raises(EnvironmentLacks, match="pip install scikit-learn"):
        digits(train=True)


@pytest.fixture
def served_cifar10(tmp_path, monkeypatch):
    """A small archive in CIFAR-10's format on a local server, with torchvision's class pointed at it."""
    source = import_torchvision().datasets.CIFAR10
    served = tmp_path / "served"
    served.mkdir()
    sums, draw = {}, np.random.default_rng(0)
    with tarfile.open(served / source.filename, "w:gz") as archive:
        names = [name for name, _ in source.train_list + source.test_list]
        contents = {
            name: {"data": draw.integers(0, 256, (4, 3072), dtype=np.uint8), "labels": [3, 1, 4, 1]} for name in names
        }
        contents[source.meta["filename"]] = {source.meta["key"]: ["a", "b", "c", "d", "e"]}
        for name, content in contents.items():
            data = pickle.dumps(content)
            sums[name] = hashlib.md5(data).hexdigest()
            member = tarfile.TarInfo(f"{source.base_folder}/{name}")
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    monkeypatch.setattr(source, "tgz_md5", hashlib.md5((served / source.filename).read_bytes()).hexdigest())
    monkeypatch.setattr(source, "train_list", [[name, sums[name]] for name, _ in source.train_list])
    monkeypatch.setattr(source, "test_list", [[name, sums[name]] for name, _ in source.test_list])
    monkeypatch.setattr(source, "meta", source.meta | {"md5": sums[source.meta["filename"]]})

    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, *args):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=served))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    monkeypatch.setattr(source, "url", f"http://127.0.0.1:{server.server_port}/{source.filename}")
    yield contents
    server.shutdown()
    thread.join()
    server.server_close()


def test_cifar10_downloaded_is_unpacked_and_read(served_cifar10, tmp_path):
    train = cifar10(tmp_path / "data", train=True, download=True)
    test = cifar10(tmp_path / "data", train=False)
    assert train.tensors[0].shape == (20, 3, 32, 32)
    assert torch.equal(test.tensors[0].flatten(1), torch.from_numpy(served_cifar10["test_batch"]["data"]))
    assert test.tensors[1].tolist() == [3, 1, 4, 1]


def test_cifar10_altered_after_the_download_is_refused(served_cifar10, tmp_path):
    cifar10(tmp_path, train=True, download=True)
    batch = tmp_path / "cifar-10-batches-py" / "data_batch_2"
    batch.write_bytes(batch.read_bytes() + b"!")
    with pytest.raises(DataInvalid, match=r"is not in .*, or is damaged there"):
        cifar10(tmp_path, train=True)


def test_cifar10_that_is_not_there_says_the_command_that_gets_it(tmp_path):
    with pytest.raises(DataInvalid, match=r"get it with python -c .*cifar10\(.*, train=True, download=True\)"):
        cifar10(tmp_path, train=True)


def test_cifar10_that_cannot_be_downloaded_says_where_from_and_how_else(tmp_path, monkeypatch):
    # the discard port of this machine: refused at once, no network needed
    monkeypatch.setattr(import_torchvision().datasets.CIFAR10, "url", "http://127.0.0.1:9/cifar-10-python.tar.gz")
    with pytest.raises(DataInvalid, match=r"could not be downloaded from http://127.0.0.1:9/.*by hand"):
        cifar10(tmp_path, train=True, download=True)
