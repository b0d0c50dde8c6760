"""Starting and ending the processes of a run on one host. Sees files and processes, never tensors."""
