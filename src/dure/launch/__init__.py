"""Start and end of the processes of a run, on one host or several. Handles files and processes, never tensors."""
