"""Pictures of where memory goes."""
