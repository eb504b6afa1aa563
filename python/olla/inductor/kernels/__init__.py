"""The order of fused kernels, what is fused, and where their buffers lie."""
