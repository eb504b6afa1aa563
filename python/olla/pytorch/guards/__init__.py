"""Guards: the Python state a captured step reads, compared at every call."""
