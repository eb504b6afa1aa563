"""PyTorch in, graphs out; plans in, steps out. torch is imported only when one of these is called."""
