"""Facts about this host: devices, memory limits, health of GPUs, cores that other work keeps busy."""
