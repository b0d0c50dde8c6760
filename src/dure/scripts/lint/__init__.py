"""Rules for the source of training scripts, which is parsed and never run."""
