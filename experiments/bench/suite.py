"""One command for a new GPU: correctness first, then a fixed set of points, rows and a table.

    python -m experiments.bench.suite --dir DIR

Needs torch, Triton, NumPy and einops: pytest for the first step, pandas and matplotlib for the
report are used where they are installed. Rows are written one by one, so whatever ends the run,
those that were measured are there; with the same DIR it goes on where it was, and
`python -m experiments.report DIR` makes the report of them anywhere.
"""

import argparse
import dataclasses
import importlib.util
import logging
import math
import os
import re
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import NamedTuple

from ..ranges import InputError
from ..results import REPOSITORY, ResultsFolder, Row, finish_row, provenance, start_row
from .config import DeviceName, OperationConfig, PointConfig
from .measuring import Bench, choose_device, device_name
from .shapes import SHAPES
from .tables import measured_table

log = logging.getLogger(__name__)

SHOWN = {
    "rank_by": "share_of_limit",
    "columns": ["p50_us", "achieved_gb_per_s", "achieved_tflop_per_s", "share_of_limit"],
}
BUDGET_S = 330.0
"""For everything: six minutes, less the start of Python and what the last point takes too long."""
REPORT_S = 30.0
"""Of the budget, for the table and the report."""
HUNG_S = 60.0
"""What a point may take longer than the budget before the run is given up."""
TEST_S = 120.0
"""For the tests that need a GPU; what isn't done by then has hung."""
TEST_OPTIONS = (
    *("-q", "--maxfail=5", "-m", "gpu or gpu_first", "-p", "no:cacheprovider"),
    # Those in pyproject.toml ask for plugins that may not be here.
    *("-o", "addopts=--import-mode=importlib"),
)
MORE_SIZES = (
    ("decode", "block_size", (1, 8, 32, 64, 128, 256)),
    ("prefill", "cached_len", (4096, 7168)),
    ("copy_blocks", "fanout", (1, 32)),
    ("match_prefix", "num_prompts", (1, 1024)),
)
FIRST = ("prefixlab", "torch_ops", "host")
"""Always there, and ready at once."""
LAST = ("flashinfer", "flex_attention")
"""They compile for long."""
REQUIRED = {"torch": (2, 11), "triton": (3, 6), "numpy": (2, 0), "einops": (0, 8)}


class Point(NamedTuple):
    """What is measured: a shape under a name of its own, and with what."""

    label: str
    shape: OperationConfig
    implementation: str


def points() -> Iterator[Point]:
    """This project's kernels at every shape and some more sizes, then what there is beside them.

    In this order because the time may run out; what compiles for long comes last.
    """
    from .implementations import NAMES, find_implementation
    from .operations import operation_of

    yield from (Point(label, shape, "prefixlab") for label, shape in SHAPES.items())
    for name, key, values in MORE_SIZES:
        for value in values:
            shape = dataclasses.replace(SHAPES[name], **{key: value})
            yield Point(f"{name} {key}={value}", shape, "prefixlab")
    others = [name for name in (*FIRST, *NAMES) if name not in ("prefixlab", *LAST)]
    for name in (*dict.fromkeys(others), *LAST):
        for label, shape in SHAPES.items():
            if operation_of(shape).kind in find_implementation(name).prepares:
                yield Point(label, shape, name)


class Suite:
    """The fixed set, measured into one results folder."""

    def __init__(self, root: Path, chosen: DeviceName, end_s: float) -> None:
        """Claims the folder; no point is begun after `end_s`, a value of time.monotonic().

        Raises InputError where the folder holds other results.
        """
        self.folder = ResultsFolder(root)
        self.chosen = chosen
        self.end_s = end_s
        self.bench = Bench(chosen)
        # A device that is lost later on can't be asked any more.
        self.device_name = device_name(chosen)
        self.running = "no point"
        self.folder.claim(
            {
                "app": "bench",
                "swept_keys": ["operation", "implementation"],
                "fixed": {},
                "config": {"device": chosen.value},
                "provenance": {k: v for k, v in provenance().items() if k != "commit"},
                "shown": SHOWN,
            }
        )

    def run(self) -> str:
        """Measure until the set, the time or the device comes to an end.

        Returns which points were left, and why; empty if there are none.
        """
        every = list(points())
        for index, point in enumerate(every):
            if time.monotonic() >= self.end_s:
                return _left("no time was left for", every[index:])
            self.running = f"{point.label} by {point.implementation}"
            row = self._start(point)
            known = self.folder.row(row["config_hash"])
            if known and known["status"] == "ok" and known["device"] == self.device_name:
                continue
            self._finish(row, point)
            self.folder.write_row(row)
            p50_us = row["metrics"].get("p50_us")
            said = row["status"] if p50_us is None else f"{p50_us:,.1f} us"
            log.info("%s: %s", self.running, said)
            if row["status"] == "failed" and self.bench.is_lost():
                return _left("the GPU is lost to this process, and with it", every[index + 1 :])
        return ""

    def _start(self, point: Point) -> Row:
        swept = {"operation": point.label, "implementation": point.implementation}
        return start_row(dataclasses.asdict(self._config(point)), swept, None, self.device_name)

    def _finish(self, row: Row, point: Point) -> None:
        finish_row(row, lambda: self.bench.measure(self._config(point)))

    def _config(self, point: Point) -> PointConfig:
        return PointConfig(point.shape, point.implementation, self.chosen)

    def summary(self) -> str:
        """The device and the table of what was measured so far."""
        return f"\n{self.device_name}\n\n{measured_table(self.folder.rows())}\n"

    def give_up(self) -> None:
        """End the process, which hangs in a point, with what was measured before."""
        print(f"{self.summary()}\n{self.running} does not end: given up", flush=True)
        os._exit(1)


def _left(why: str, left: list[Point]) -> str:
    """`why`, and how many points of each implementation were left."""
    counts = Counter(point.implementation for point in left)
    names = ", ".join(f"{number} by {name}" for name, number in counts.items())
    return f"{why} {len(left)} points: {names}"


def missing_requirements() -> list[str]:
    """What is needed and not here, each with the version that was found."""
    missing = []
    for name, least in REQUIRED.items():
        try:
            found = version(name)
        except PackageNotFoundError:
            found = "none"
        numbers = tuple(map(int, re.findall(r"\d+", found)[:2]))
        if numbers < least:
            missing.append(f"{name} >= {'.'.join(map(str, least))} (found {found})")
    return missing


def run_tests() -> str:
    """Run the kernel tests that come first on a new GPU; returns how they ended.

    Without pytest there are only the checks that precede each timing.
    """
    if importlib.util.find_spec("pytest") is None:
        return "not run, as pytest is not installed"
    files = sorted(str(path) for path in (REPOSITORY / "tests").glob("test_kernel_*.py"))
    command = [sys.executable, "-m", "pytest", *TEST_OPTIONS, *files]
    try:
        status = subprocess.run(command, cwd=REPOSITORY, timeout=TEST_S).returncode
    except subprocess.TimeoutExpired:
        return f"NOT FINISHED within {TEST_S:.0f} s"
    return {0: "passed", 1: "FAILED"}.get(status, f"NOT RUN: pytest ended with status {status}")


def make_report(root: Path) -> str:
    """Write the report if its libraries are installed; returns where it is, or what it takes."""
    try:
        from ..report import write_report

        return write_report(ResultsFolder(root)).splitlines()[-1]
    except Exception as error:
        # What was measured is in the rows, whatever is wrong with what draws it here.
        return f"rows: {root}\nno report: {error}; `python -m experiments.report DIR` makes it"


def main() -> None:
    """Run the tests and the set; exit with 1 where anything failed or can't be right."""
    start_s = time.monotonic()
    parser = argparse.ArgumentParser(prog="python -m experiments.bench.suite", description=__doc__)
    parser.add_argument("--dir", type=Path, default=None, help="default: outputs/bench/<time>")
    parser.add_argument("--device", choices=["cuda", "rehearsal"], default="cuda")
    parser.add_argument("--budget-s", type=_seconds, default=BUDGET_S, help="for everything")
    parser.add_argument("--no-tests", action="store_true", help="leave out the first step")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
    if missing := missing_requirements():
        sys.exit(f"error: {sys.executable} lacks {', '.join(missing)}; choose another with PYTHON=")
    root = arguments.dir or Path("outputs/bench", time.strftime("%Y-%m-%d_%H-%M-%S"))
    try:
        chosen = choose_device(DeviceName(arguments.device))
        suite = Suite(root, chosen, start_s + arguments.budget_s - REPORT_S)
    except (InputError, OSError) as error:
        sys.exit(f"error: {error}")
    tests = "left out" if arguments.no_tests else run_tests()
    watchdog = threading.Timer(
        start_s + arguments.budget_s + HUNG_S - time.monotonic(), suite.give_up
    )
    watchdog.daemon = True
    watchdog.start()
    try:
        left = suite.run()
    except KeyboardInterrupt:
        left = f"interrupted in {suite.running}"
    watchdog.cancel()
    print(suite.summary())
    print(make_report(root))
    print(f"tests: {tests}")
    if left:
        print(left)
    bad = any(row["status"] in ("failed", "suspect") for row in suite.folder.rows())
    sys.exit(int(bad or tests.startswith(("FAILED", "NOT "))))


def _seconds(text: str) -> float:
    """A positive number of seconds, for argparse."""
    seconds = float(text)
    if not 0 < seconds < math.inf:
        raise ValueError(text)
    return seconds


if __name__ == "__main__":
    main()
