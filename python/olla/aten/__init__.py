"""Planned forward and backward behind an ordinary ``loss.backward()``, on torch's own kernels."""
