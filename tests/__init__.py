"""Tests, in the rooms of the package; imported from the repository's root, as in ``tests.support.samples``."""
