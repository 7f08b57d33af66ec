"""`python -m lam.cli`."""

import sys

from lam.cli import main

sys.exit(main())
