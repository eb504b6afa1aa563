"""`python -m olla` is `olla`."""

import sys

from olla.cli.parser import main

sys.exit(main())
