"""The ordinary step, for what cannot be captured."""
