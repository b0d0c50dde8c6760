"""Facts about this host: devices, memory limits, health of GPUs, cores kept busy by other work."""
