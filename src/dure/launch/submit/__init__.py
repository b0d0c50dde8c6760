"""Handing a run to a cluster: what is submitted, and how."""
