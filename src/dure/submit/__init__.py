"""Job files for cluster managers."""
