"""State of plain Python objects: seen when it changes, and put back."""
