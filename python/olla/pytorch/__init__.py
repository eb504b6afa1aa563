"""PyTorch in, graphs out. Nothing outside this package imports torch, and capture does so only when it is called."""
