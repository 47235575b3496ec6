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
from importlib.metadata import PackageNotFoundError, packages_distributions, version
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
"""For everything but the table and the report."""
LAST_POINT_S = 30.0
"""Of the budget, for the point that is being measured when no other is begun."""
POINT_S = 90.0
"""For one point; what takes longer has hung, and the run is given up."""
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
    shape: OperationConfig | None
    implementation: str

    @property
    def name(self) -> str:
        """As a person says it; no two points of the set share one."""
        return f"{self.label} by {self.implementation}"


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
        try:
            prepares = find_implementation(name).prepares
        except Exception as error:
            log.error("%s is left out: %s: %s", name, type(error).__name__, error)
            continue
        for label, shape in SHAPES.items():
            if operation_of(shape).kind in prepares:
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
        self.row: Row = {}
        failed = [row for row in self.folder.rows() if row["status"] == "failed"]
        self.folder.claim(
            {
                "app": "bench",
                "swept_keys": ["operation", "implementation"],
                "fixed": {},
                "config": {"device": chosen.value, "device_name": self.device_name},
                "provenance": {k: v for k, v in provenance().items() if k != "commit"},
                "shown": SHOWN,
            }
        )
        # What failed may fail again, and end this run as it may have ended the last one; so it
        # comes last, and is remembered until then.
        for row in failed:
            self.folder.write_row(row)
        names = {_name(row) for row in failed}
        self.points = sorted(points(), key=lambda point: point.name in names)

    def run(self) -> str:
        """Measure until the set, the time or the device comes to an end.

        Returns which points were left, and why; empty if there are none.
        """
        for index, point in enumerate(self.points):
            if self._is_done(point):
                continue
            now_s = time.monotonic()
            if now_s >= self.end_s:
                return self._left("no time was left for", self.points[index:])
            self.row = self._start(point)
            patience_s = min(POINT_S, self.end_s + LAST_POINT_S - now_s)
            watchdog = threading.Timer(patience_s, self.give_up, [patience_s])
            watchdog.daemon = True
            watchdog.start()
            try:
                finish_row(self.row, lambda point=point: self.bench.measure(self._config(point)))
            finally:
                # Also after ctrl-C: it would end what comes then.
                watchdog.cancel()
            self.folder.write_row(self.row)
            p50_us = self.row["metrics"].get("p50_us")
            said = self.row["status"] if p50_us is None else f"{p50_us:,.1f} us"
            log.info("%s: %s", point.name, said)
            if self.row["status"] == "failed" and self.bench.is_lost():
                rest = self.points[index + 1 :]
                return self._left("the GPU is lost to this process, and with it", rest)
        return ""

    def _is_done(self, point: Point) -> bool:
        known = self.folder.row(self._start(point)["config_hash"])
        return known is not None and known["status"] == "ok"

    def _left(self, why: str, points: list[Point]) -> str:
        """`why`, and how many points of each implementation were left; empty if there are none."""
        counts = Counter(point.implementation for point in points if not self._is_done(point))
        names = ", ".join(f"{number} by {name}" for name, number in counts.items())
        return f"{why} {counts.total()} points: {names}" if counts else ""

    def _start(self, point: Point) -> Row:
        swept = {"operation": point.label, "implementation": point.implementation}
        return start_row(dataclasses.asdict(self._config(point)), swept, None, self.device_name)

    def _config(self, point: Point) -> PointConfig:
        return PointConfig(point.shape, point.implementation, self.chosen)

    def summary(self) -> str:
        """The device and the table of what was measured so far."""
        return f"\n{self.device_name}\n\n{measured_table(self.folder.rows())}\n"

    def give_up(self, patience_s: float) -> None:
        """End the process, which hangs in a point, with what was measured before."""
        try:
            message = f"did not end within {patience_s:.0f} s"
            row = {"status": "failed", "message": message, "metrics": {}, "notes": {}}
            self.folder.write_row(self.row | row | {"occupancy": {}, "wall_s": patience_s})
            print(f"{self.summary()}\n{_name(self.row)} {message}: given up", flush=True)
            print(self.how_to_go_on(), flush=True)
        finally:
            os._exit(1)

    def how_to_go_on(self) -> str:
        """The command that measures what is left."""
        device = "" if self.chosen is DeviceName.cuda else f" --device {self.chosen.value}"
        command = f"python -m experiments.bench.suite --no-tests --dir {self.folder.root}{device}"
        return f"to go on: {command}"


def _name(row: Row) -> str:
    return Point(row["swept"]["operation"], None, row["swept"]["implementation"]).name


def missing_requirements() -> list[str]:
    """What is needed and not here, each with the version that was found."""
    missing = []
    for name, least in REQUIRED.items():
        found = _version(name)
        numbers = tuple(map(int, re.findall(r"\d+", found)[:2]))
        if numbers < least:
            missing.append(f"{name} >= {'.'.join(map(str, least))} (found {found})")
    return missing


def _version(module: str) -> str:
    """The version of the distribution that a module is from, whatever that is called, or "none"."""
    try:
        return version(module)
    except PackageNotFoundError:
        others = packages_distributions().get(module, [])
        return version(others[0]) if others else "none"


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
    """Run the tests and the set; exit with 1 where anything failed, can't be right or was left."""
    start_s = time.monotonic()
    parser = argparse.ArgumentParser(
        prog="python -m experiments.bench.suite",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--dir", type=Path, default=None, help="default: outputs/bench/<time>")
    device_help = "default: cuda; rehearsal: in Triton's interpreter, its times mean nothing"
    parser.add_argument("--device", choices=["cuda", "rehearsal"], default="cuda", help=device_help)
    budget_help = f"seconds for everything; default: {BUDGET_S:.0f}"
    parser.add_argument("--budget-s", type=_seconds, default=BUDGET_S, help=budget_help)
    parser.add_argument("--no-tests", action="store_true", help="leave out the first step")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
    if missing := missing_requirements():
        sys.exit(f"error: {sys.executable} lacks {', '.join(missing)}; choose another with PYTHON=")
    root = arguments.dir or Path("outputs/bench", time.strftime("%Y-%m-%d_%H-%M-%S"))
    try:
        chosen = choose_device(DeviceName(arguments.device))
        suite = Suite(root, chosen, start_s + arguments.budget_s - LAST_POINT_S)
    except (InputError, OSError) as error:
        sys.exit(f"error: {error}")
    tests = "left out" if arguments.no_tests else run_tests()
    try:
        left = suite.run()
    except KeyboardInterrupt:
        left = f"interrupted in {_name(suite.row)}"
    print(suite.summary())
    print(make_report(root))
    print(f"tests: {tests}")
    if left:
        print(f"{left}\n{suite.how_to_go_on()}")
    bad = any(row["status"] in ("failed", "suspect") for row in suite.folder.rows())
    sys.exit(int(bool(bad or left or tests.startswith(("FAILED", "NOT ")))))


def _seconds(text: str) -> float:
    """A positive number of seconds, for argparse."""
    seconds = float(text)
    if not 0 < seconds < math.inf:
        raise ValueError(text)
    return seconds


if __name__ == "__main__":
    main()
