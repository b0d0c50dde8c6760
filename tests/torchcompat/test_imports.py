"""Imports that torch delays, that warn, or that do not fit this torch."""

import sys

import pytest

from dure.errors import EnvironmentLacks
from dure.torchcompat.imports import import_torchvision
from tests.torchcompat.fresh_interpreter import run_python


@pytest.mark.slow
def test_late_parts_when_imported_first_then_ddp_lets_go_of_its_group() -> None:
    out = run_python(
        "import gc, socket, psutil, torch.distributed as dist\n"
        "from datetime import timedelta\n"
        "from torch import nn\n"
        "from dure.torchcompat.imports import import_late_parts\n"
        "from dure.torchcompat.stores import store_on_socket\n"
        "import_late_parts()\n"
        "store = store_on_socket(socket.create_server(('127.0.0.1', 0)), timedelta(seconds=20))\n"
        "dist.init_process_group('gloo', store=store, rank=0, world_size=1)\n"
        "nn.parallel.DistributedDataParallel(nn.Linear(2, 2))\n"
        "dist.destroy_process_group()\n"
        "del store\n"
        "gc.collect()\n"
        "print(psutil.Process().net_connections('tcp'))"
    )
    assert out == "[]\n"


@pytest.mark.slow
def test_torchvision_when_imported_through_dure_then_models_and_transforms_work() -> None:
    pytest.importorskip("PIL", reason="the vision extra is not installed")
    # a fresh interpreter: a process can declare operators once
    out = run_python(
        "from dure.torchcompat.imports import import_torchvision, repair_torchvision\n"
        "vision = import_torchvision()\n"
        "import torch, torchvision.transforms.v2 as transforms\n"
        "print(vision.models.resnet18(num_classes=3)(torch.rand(2, 3, 32, 32)).shape)\n"
        "print(transforms.RandomHorizontalFlip(1.0)(torch.arange(2).view(1, 1, 2)).tolist())\n"
        "print(repair_torchvision())"
    )
    assert out.splitlines() == ["torch.Size([2, 3])", "[[[1, 0]]]", "False"]


def test_torchvision_when_not_installed_then_the_cure_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchvision", None)
    monkeypatch.setattr("dure.torchcompat.imports.repair_torchvision", lambda: False)
    with pytest.raises(EnvironmentLacks, match=r"pip install 'dure\[vision\]'"):
        import_torchvision()


MISFITS = {
    "raise RuntimeError('operator fake::nms does not exist')": True,
    "import torch\ntorch.no_such_thing_at_all": True,
    "from torch import no_such_thing_at_all": True,
    "raise RuntimeError('the file is missing')": False,
}


@pytest.mark.parametrize(("source", "is_misfit"), MISFITS.items())
def test_library_when_it_was_made_for_another_torch_then_a_sentence_says_so(source, is_misfit, tmp_path, monkeypatch):
    from dure.errors import EnvironmentLacks, TaskInvalid
    from dure.training.task.load_task import load_task_class

    library = tmp_path / "site-packages/fakevision"
    library.mkdir(parents=True)
    (library / "__init__.py").write_text(source)
    (tmp_path / "misfit_task.py").write_text("import fakevision\n")
    monkeypatch.syspath_prepend(str(library.parent))
    kind, said = (EnvironmentLacks, "fakevision does not fit torch") if is_misfit else (TaskInvalid, "does not import")
    with pytest.raises(kind, match=said):
        load_task_class(f"{tmp_path}/misfit_task.py:Task")
