"""Contract between a supervisor and the processes of its ranks."""
