"""One training step of a model, recorded as a graph."""
