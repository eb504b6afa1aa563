"""Adapters for other packages, each imported when it is asked for."""
