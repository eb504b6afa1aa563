"""Settings of every test."""

from hypothesis import settings

settings.register_profile("olla", deadline=None)  # the first call of a kernel compiles it
settings.load_profile("olla")
