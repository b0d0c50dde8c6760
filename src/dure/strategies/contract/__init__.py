"""Interface between the training loop and a strategy, and code that the implementations share."""
