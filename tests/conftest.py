"""Settings of every test."""

import os

from hypothesis import settings

os.environ["OLLA_DISK_CACHE"] = "0"  # every test captures its own steps; those of the cache switch it on
settings.register_profile("olla", deadline=None)  # the first call of a kernel compiles it
settings.load_profile("olla")
