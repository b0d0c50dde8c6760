"""Output of the ranks."""
