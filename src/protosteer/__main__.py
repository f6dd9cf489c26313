"""`python -m protosteer` is the same as `protosteer`."""

import sys

from protosteer.cli import main

sys.exit(main())
