"""A captured step in planned order, as a program that runs."""
