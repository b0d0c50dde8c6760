"""`Faulty` on a disk that is slow, or goes wrong, when checkpoints are written."""

import errno
import os
import time
from pathlib import Path
from typing import Any

from faulty_task import Faulty  # beside this file
from torch import nn

from dure.training.checkpoints import rank_shard as checkpoint_share


class OnBadDisk(Faulty):
    write_seconds: float = 0.0
    """Delay of every file of a checkpoint."""
    bad_rank: int = 0
    """The rank whose files cannot be written."""
    bad_save: int = 0
    """The number of the save from which on they cannot, from 1; 0: none."""
    good_save: int = 0
    """The number of the save from which on they can again; 0: none."""
    reason: str = "EIO"

    def build_model(self) -> nn.Module:
        write, seen = checkpoint_share.write_new_file, set[Path]()

        def write_new_file(path: Path, buffers: Any) -> Any:
            seen.add(path.parent)
            time.sleep(self.write_seconds)
            is_bad = 0 < self.bad_save <= len(seen) and not 0 < self.good_save <= len(seen)
            if is_bad and int(os.environ.get("RANK", "0")) == self.bad_rank:
                number = getattr(errno, self.reason)
                raise OSError(number, os.strerror(number), str(path))
            return write(path, buffers)

        checkpoint_share.write_new_file = write_new_file
        return super().build_model()
