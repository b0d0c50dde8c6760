"""Functions behind the commands: train, evaluate, export, run a script, compare, submit."""
