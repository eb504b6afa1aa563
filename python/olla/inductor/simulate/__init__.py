"""Compiled steps on fake tensors: live bytes, peaks, what a partitioner saved."""
