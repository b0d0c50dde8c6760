"""Names of the parts of a step for readers, the same in every table, chart and timeline."""

PART_LABELS = {
    "data": "waiting for data",
    "forward_backward": "forward and backward",
    "forward": "forward",
    "backward": "backward",
    "sync": "synchronising",
    "optimizer": "optimiser",
    "other": "other",
}
