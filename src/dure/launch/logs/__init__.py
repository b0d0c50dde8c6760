"""Output and log files of the ranks."""
