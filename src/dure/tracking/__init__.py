"""Hand-over of a run to experiment trackers, by a process that reads the run's records and never touches training."""
