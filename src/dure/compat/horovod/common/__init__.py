"""Parts of Horovod's interface that belong to no framework."""
