"""What is wrong with a run, from the files that it left: evidence, cause, remedy."""
