"""Interface between the training loop and a strategy, and what implementations share."""
