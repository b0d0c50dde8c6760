"""Scripts for the tests of `dure lint`."""

from pathlib import Path

from dure.scripts.lint.check import checked
from dure.scripts.lint.finding import Finding
from dure.scripts.lint.modules import Module
from dure.scripts.lint.project import Project
from dure.scripts.lint.source import parsed

START = """\
import os
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler

dist.init_process_group("nccl")
rank = dist.get_rank()
device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
"""
END = "dist.destroy_process_group()\n"


def script(text: str) -> str:
    """Return a script of ranks that opens and destroys its process group."""
    return f"{START}{text}{END}"


def findings_of(**files: str) -> list[Finding]:
    """Return the findings in files that belong together, each given by its name without its suffix."""
    modules = [
        Module(source=parsed(text, Path(f"{name}.py"), f"{name}.py"), dotted=tuple(name.split(".")))
        for name, text in files.items()
    ]
    return checked(Project(modules))


def rules_in(text: str, **files: str) -> list[str]:
    """Return the rules of the findings in a script, next to further modules."""
    return [finding.rule for finding in findings_of(train=text, **files)]
