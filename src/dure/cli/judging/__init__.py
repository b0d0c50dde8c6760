"""Commands that compare and explain runs."""
