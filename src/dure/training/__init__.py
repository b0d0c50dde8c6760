"""Training run of a rank: task, sample order, loop, evaluation, checkpoints, worker."""
