"""`python -m lam`: the command for launchers that start modules, `torchrun --nproc_per_node 2 -m lam run CONFIG`."""

import sys

from lam.cli import main

if __name__ == "__main__":
    sys.exit(main())
