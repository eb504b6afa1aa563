"""`python -m olla` is `olla`."""

import sys

from olla.cli import main

sys.exit(main())
