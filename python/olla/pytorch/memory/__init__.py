"""Planned memory: what ops request, where that lies, the allocator that serves it."""
