"""State of plain Python objects: detection of changes, and restoration."""
