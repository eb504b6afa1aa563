"""Planned memory: the requests of ops, their offsets in the arena, and the allocator that serves them."""
