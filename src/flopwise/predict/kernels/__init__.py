"""Seconds of kernels on a device: products, attention, what is bound by bytes."""
