"""One command for a new GPU: correctness first, then a fixed set of points, rows and a table.

    python -m experiments.bench.suite --dir DIR

Needs torch and Triton alone: pytest for the first step, pandas and matplotlib for the report are
used where they are installed. Rows are written one by one, so whatever ends the run, those that
were measured are there, and `python -m experiments.report DIR` makes the report of them anywhere.
"""

import argparse
import dataclasses
import importlib.util
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
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
    *("-q", "--maxfail=5", "-m", "gpu", "-p", "no:cacheprovider"),
    # Those in pyproject.toml ask for plugins that may not be here.
    *("-o", "addopts=--import-mode=importlib"),
)
MORE_SIZES = (
    ("decode", "block_size", (1, 8, 32, 64, 128, 256)),
    ("prefill", "cached_len", (4096, 7168)),
    ("copy_blocks", "fanout", (1, 32)),
    ("match_prefix", "num_prompts", (1, 1024)),
)
SLOW_TO_COMPILE = "flex_attention"


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
    others = [name for name in NAMES if name != "prefixlab"]
    for name in sorted(others, key=lambda name: name == SLOW_TO_COMPILE):
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
            row = self._measure(point)
            self.folder.write_row(row)
            p50_us = row["metrics"].get("p50_us")
            said = row["status"] if p50_us is None else f"{p50_us:,.1f} us"
            log.info("%s: %s", self.running, said)
            if row["status"] == "failed" and self.bench.is_lost():
                return _left("the GPU is lost to this process, and with it", every[index + 1 :])
        return ""

    def _measure(self, point: Point) -> Row:
        config = PointConfig(point.shape, point.implementation, self.chosen)
        swept = {"operation": point.label, "implementation": point.implementation}
        row = start_row(dataclasses.asdict(config), swept, None, self.device_name)
        finish_row(row, lambda: self.bench.measure(config))
        return row

    def summary(self) -> str:
        """The device and the table of what was measured so far."""
        return f"\n{self.device_name}\n\n{measured_table(self.folder.rows())}\n"

    def give_up(self) -> None:
        """End the process, which hangs in a point, with what was measured before."""
        print(f"{self.summary()}\n{self.running} does not end: given up", flush=True)
        os._exit(1)


def _left(why: str, left: list[Point]) -> str:
    names = "; ".join(f"{point.label} by {point.implementation}" for point in left)
    return f"{why} {len(left)} points: {names}"


def run_tests() -> bool:
    """Run the kernel tests that need a GPU; False where one failed or they hang.

    Without pytest there are only the checks that precede each timing.
    """
    if importlib.util.find_spec("pytest") is None:
        log.warning("pytest is not installed: only answers that are timed are checked")
        return True
    files = sorted(str(path) for path in (REPOSITORY / "tests").glob("test_kernel_*.py"))
    command = [sys.executable, "-m", "pytest", *TEST_OPTIONS, *files]
    try:
        return subprocess.run(command, cwd=REPOSITORY, timeout=TEST_S).returncode == 0
    except subprocess.TimeoutExpired:
        log.error("the tests did not end within %.0f s", TEST_S)
        return False


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
    parser.add_argument("--budget-s", type=float, default=BUDGET_S, help="seconds for everything")
    parser.add_argument("--no-tests", action="store_true", help="leave out the first step")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
    root = arguments.dir or Path("outputs/bench", time.strftime("%Y-%m-%d_%H-%M-%S"))
    try:
        chosen = choose_device(DeviceName(arguments.device))
        suite = Suite(root, chosen, start_s + arguments.budget_s - REPORT_S)
    except InputError as error:
        sys.exit(f"error: {error}")
    correct = arguments.no_tests or run_tests()
    watchdog = threading.Timer(
        start_s + arguments.budget_s + HUNG_S - time.monotonic(), suite.give_up
    )
    watchdog.daemon = True
    watchdog.start()
    left = suite.run()
    watchdog.cancel()
    print(suite.summary())
    print(make_report(root))
    if left:
        print(left)
    if not correct:
        print("TESTS FAILED, see above: do not trust what was not checked by a row of its own")
    bad = any(row["status"] in ("failed", "suspect") for row in suite.folder.rows())
    sys.exit(int(bad or not correct))


if __name__ == "__main__":
    main()
