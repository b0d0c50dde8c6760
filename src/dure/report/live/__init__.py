"""Live view of a run: records are read as they grow, and shown in a browser and in the terminal."""
