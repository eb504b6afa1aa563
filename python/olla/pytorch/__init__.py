"""PyTorch in, graphs out. Nothing outside this package imports torch, and capture does so only when it is called."""

import time

STARTED_NS = time.time_ns()  # source files that are younger may differ from what this process has loaded
