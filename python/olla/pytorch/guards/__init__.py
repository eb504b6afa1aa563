"""What a captured step reads from Python, compared at every call."""
