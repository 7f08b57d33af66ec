"""The full counts of checks whose light form is in the tests: kills, samplers, golden grids.

    python benchmarks/faults.py [--only EXPRESSION] [--minutes MINUTES]

Runs tests with the `slow` marker, all or the ones that pytest's -k EXPRESSION selects ("service", "kill and not run").
Writes each test, its outcome, duration and measurements into results/faults.json, where other checks stay unchanged.
Among the measurements, `load` is the load of the machine at the end.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from timing import RESULTS, machine, write

ROOT = Path(__file__).parent.parent


def outcomes(report: Path) -> dict[str, Any]:
    """The outcome of each test in a report of pytest; parameters of a test are joined."""
    checks: dict[str, Any] = {}
    processor = machine()["processor"]
    for case in ElementTree.parse(report).iter("testcase"):
        name = f"{case.get('classname')}.{case.get('name', '').partition('[')[0]}"
        found = checks.setdefault(
            name, {"passed": 0, "failed": 0, "skipped": 0, "seconds": 0.0, "processor": processor}
        )
        failed = case.find("failure") is not None or case.find("error") is not None
        found["failed" if failed else "skipped" if case.find("skipped") is not None else "passed"] += 1
        found["seconds"] = round(found["seconds"] + float(case.get("time", 0)), 1)
        for measured in case.iter("property"):
            values = {**json.loads(measured.get("value", "{}")), "load": machine()["load"]}
            found.setdefault("measured", {})[measured.get("name")] = values
    return checks


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", metavar="EXPRESSION", help="as pytest's -k; by default all slow tests")
    parser.add_argument("--minutes", type=float, default=10.0, help="of good and bad requests at once")
    given = parser.parse_args()
    only = given.only
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "slow.xml"
        options = ["-m", "slow", "--timeout=3600", f"--minutes-of-traffic={given.minutes}"]
        options += [f"--junitxml={report}", "-o", "junit_family=xunit1", *(["-k", only] if only else [])]
        code = subprocess.run([sys.executable, "-m", "pytest", "-q", *options], cwd=ROOT, check=False).returncode
        found = outcomes(report)
    known = RESULTS / "faults.json"
    kept = json.loads(known.read_text(encoding="utf-8"))["checks"] if only and known.is_file() else {}
    write("faults", {"checks": dict(sorted({**kept, **found}.items()))})
    return code


if __name__ == "__main__":
    sys.exit(main())
