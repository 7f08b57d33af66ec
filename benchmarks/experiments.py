"""Results of one or more runs of `lam experiment`, for the tables.

    lam experiment posterior-recovery -o FOLDER
    python benchmarks/experiments.py posterior_recovery FOLDER ... [--add]

results/NAME.json holds the settings and the tables of each run, without plots; --add keeps the runs that are in it.
"""

import json
import sys
from pathlib import Path

from timing import kept, write


def main() -> None:
    name, *folders = [argument for argument in sys.argv[1:] if argument != "--add"] or [""]
    if not folders:
        sys.exit(__doc__)
    runs = kept(name)["runs"] if "--add" in sys.argv else []
    for folder in folders:
        outcome = json.loads((Path(folder) / "outcome.json").read_text(encoding="utf-8"))
        runs.append({key: outcome[key] for key in ("settings", "rows", "tables") if outcome[key]})
    write(name, {"runs": runs})


if __name__ == "__main__":
    main()
