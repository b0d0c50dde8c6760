"""Other hosts of a run, and the connections to their launchers."""
