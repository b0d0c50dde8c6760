"""Programs of ranks that only communicate."""
