"""Checks of values that a captured step keeps, and why a step cannot be captured."""
