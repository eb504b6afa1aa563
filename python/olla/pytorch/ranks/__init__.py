"""Ranks: operators that communicate, buckets of gradients, one plan for all. Importing this does not import torch."""
