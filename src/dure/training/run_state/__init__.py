"""State of a run over time: checkpoints, snapshots, and comparison of replicas."""
