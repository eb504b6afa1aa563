"""Batches of many lengths."""
