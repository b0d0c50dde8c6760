"""What a run came to, for people: readers of a run's records."""
