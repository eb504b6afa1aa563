"""olla: the memory planner for PyTorch training."""
