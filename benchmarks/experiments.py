"""What `lam experiment` found, of one or more runs, as results from which the tables are made.

    lam experiment posterior-recovery -o FOLDER
    python benchmarks/experiments.py posterior_recovery FOLDER ...

results/NAME.json holds the settings and the table of each run, without its curves.
"""

import json
import sys
from pathlib import Path

from timing import write


def main() -> None:
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    runs = []
    for folder in sys.argv[2:]:
        outcome = json.loads((Path(folder) / "outcome.json").read_text(encoding="utf-8"))
        runs.append({"settings": outcome["settings"], "rows": outcome["rows"]})
    write(sys.argv[1], {"runs": runs})


if __name__ == "__main__":
    main()
