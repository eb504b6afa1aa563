"""Adapters for other people's packages: one module each, which imports theirs only when it is used."""
