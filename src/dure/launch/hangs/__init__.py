"""Detection, probing and diagnosis of ranks that hang."""
