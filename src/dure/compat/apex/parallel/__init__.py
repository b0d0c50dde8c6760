"""`apex.parallel`: gradients averaged in buckets, BatchNorm over ranks, and LARC."""

from dure.compat.apex.parallel.distributed import DistributedDataParallel, Reducer
from dure.compat.apex.parallel.larc import LARC
from dure.compat.apex.parallel.sync_batchnorm import (
    SyncBatchNorm,
    convert_syncbn_model,
    create_syncbn_process_group,
)

__all__ = [
    "LARC",
    "DistributedDataParallel",
    "Reducer",
    "SyncBatchNorm",
    "convert_syncbn_model",
    "create_syncbn_process_group",
]
