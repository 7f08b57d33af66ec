"""The full counts of the checks whose light form the tests run: kills, samplers, golden grids.

    python benchmarks/faults.py

Runs every test with the `slow` marker and writes results/faults.json: what was run, how it ended, how long it took.
"""

import subprocess
import sys
import tempfile
from pathlib import Path
from xml.etree import ElementTree

from timing import write

ROOT = Path(__file__).parent.parent


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "slow.xml"
        command = [sys.executable, "-m", "pytest", "-q", "-m", "slow", "--timeout=1800", f"--junitxml={report}"]
        code = subprocess.run(command, cwd=ROOT, check=False).returncode
        cases = ElementTree.parse(report).iter("testcase")
        checks: dict[str, dict[str, float | int]] = {}
        for case in cases:
            name = f"{case.get('classname')}.{case.get('name', '').partition('[')[0]}"
            found = checks.setdefault(name, {"passed": 0, "failed": 0, "skipped": 0, "seconds": 0.0})
            failed = case.find("failure") is not None or case.find("error") is not None
            outcome = "failed" if failed else "skipped" if case.find("skipped") is not None else "passed"
            found[outcome] += 1
            found["seconds"] = round(found["seconds"] + float(case.get("time", 0)), 1)
    write("faults", {"checks": checks})
    return code


if __name__ == "__main__":
    sys.exit(main())
