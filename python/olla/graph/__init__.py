"""The training step as a graph: tensors, ops, what they cost, what they allow."""
