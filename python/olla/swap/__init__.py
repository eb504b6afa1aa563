"""Plans that copy tensors to host memory and back."""
