"""The command `lam` as a module: `python -m lam`, or `torchrun --nproc_per_node 2 -m lam run CONFIG`."""

import sys

from lam.cli import main

if __name__ == "__main__":
    sys.exit(main())
