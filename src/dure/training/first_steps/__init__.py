"""First steps of a run, compared with those of one process."""
