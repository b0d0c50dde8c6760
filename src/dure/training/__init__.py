"""The run itself: task, sample order, loop, evaluation, checkpoint, worker."""
