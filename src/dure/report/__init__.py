"""Reports on a run for people, from its records."""
