"""Facts about this host: devices, memory limits, health of GPUs."""
