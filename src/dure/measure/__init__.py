"""What a run measures of itself: sums, clocks and the records of its steps."""
