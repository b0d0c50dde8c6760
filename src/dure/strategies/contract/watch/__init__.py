"""Watches for effects of the task on parameters, generators and other ranks during training."""
