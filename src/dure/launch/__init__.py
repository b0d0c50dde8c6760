"""Starting and ending the processes of a run on one host or several. Sees files and processes, never tensors."""
