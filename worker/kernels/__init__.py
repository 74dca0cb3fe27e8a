"""Kernels: the plain torch twins; a device's fast ones stand beside them."""
