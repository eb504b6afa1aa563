"""Odd but ordinary training loops, each run as a loop and through olla.compile: nothing may be silently different."""
