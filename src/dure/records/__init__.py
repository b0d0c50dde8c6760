"""Run folders and the records in them."""
