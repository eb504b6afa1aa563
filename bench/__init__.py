"""Benchmarks, in the rooms of the package; imported from the repository's root, as in ``bench.support.harness``."""
