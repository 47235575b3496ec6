"""The serve app as its users launch it: sweeps, failures, resuming, and where results go.

But where a test says otherwise, arithmetic on the configuration stands in for the simulation.
"""

import csv
import functools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hydra import compose, initialize_config_dir

from experiments import callbacks, results, serve
from experiments.callbacks import parse_sweep
from experiments.config import ServeConfig
from experiments.simulator import simulate
from experiments.workloads import Workload

ROOT = Path(__file__).resolve().parent.parent
CONFIGS = ROOT / "configs"
SMALL = ("workload.num_requests=20",)
MADE_BY = {"commit": "abc", "code_hash": "def", "numpy": "2"}
Launch = Callable[..., int]


def arithmetic(workload: Workload, config: ServeConfig, progress: bool) -> SimpleNamespace:
    """Stands in for the simulation: reads the whole workload, and computes from keys alone."""
    tokens = sum(request.num_prompt_tokens for request in workload)
    cache = config.cache
    free = np.array([60, 50, 40])
    return SimpleNamespace(
        metrics={
            "output_tokens_per_s": 1000 * (1 - cache.watermark) / cache.block_size,
            "ttft_p50_s": np.float64(cache.block_size / 100),
            "requests_finished": workload.num_requests,
            "prompt_tokens": tokens,
        },
        occupancy={
            "time_s": np.array([0.0, 1.0, 2.0]),
            "in_use_blocks": 90 - free,
            "cached_blocks": np.array([10, 10, 10]),
            "free_blocks": free,
        },
    )


def stand_in(simulate: Callable[..., SimpleNamespace]) -> None:
    """Replace the simulation, and fix what may change while the tests run: the checkout."""
    serve.simulate = simulate
    results.provenance = callbacks.provenance = lambda: MADE_BY


@pytest.fixture
def launch(launch_main: Launch, monkeypatch: pytest.MonkeyPatch) -> Launch:
    """Launches the app, in which arithmetic stands in for the simulation; see `launch_main`."""
    # Setting them to what they are makes monkeypatch restore them.
    monkeypatch.setattr(serve, "simulate", serve.simulate)
    monkeypatch.setattr(results, "provenance", results.provenance)
    monkeypatch.setattr(callbacks, "provenance", callbacks.provenance)
    stand_in(arithmetic)
    return functools.partial(launch_main, serve.main)


def read_csv(folder: Path) -> list[dict[str, str]]:
    with (folder / "results.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def without_wall_times(folder: Path) -> list[dict[str, str]]:
    return [{k: v for k, v in row.items() if "wall" not in k} for row in read_csv(folder)]


def files(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_a_sweep_from_the_command_line_ends_in_one_table_and_report(
    launch: Launch, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    """E09: one row a point with every swept key, unit-named metrics, versions and status."""
    overrides = ["cache.block_size=64,16", "cache.watermark=0.05,0", "hydra.sweep.dir=out"]
    assert launch("-m", *overrides, *SMALL) == 0
    rows = read_csv(tmp_path / "out")
    swept = [(row["cache.block_size"], row["cache.watermark"]) for row in rows]
    assert swept == [("16", "0.0"), ("16", "0.05"), ("64", "0.0"), ("64", "0.05")]
    assert [float(row["output_tokens_per_s"]) for row in rows] == [62.5, 59.375, 15.625, 14.84375]
    assert {row["status"] for row in rows} == {"ok"}
    for column in ("seed", "commit", "code_hash", "numpy", "model", "gpu", "wall_s", "config_hash"):
        assert all(row[column] for row in rows), column
    printed = capsys.readouterr().out
    assert "best of 4 by output_tokens_per_s" in printed
    assert f"report: {tmp_path / 'out' / 'report.html'}" in printed
    plots = files(tmp_path / "out" / "plots")
    assert plots == {"output_tokens_per_s.png", "ttft_p50_s.png", "occupancy.png"}
    # Rebuilt from the rows alone, it is the same.
    before = {
        name: (tmp_path / "out" / name).read_bytes() for name in ("results.csv", "report.html")
    }
    for name in before:
        (tmp_path / "out" / name).unlink()
    rebuilt = subprocess.run(
        [sys.executable, "-m", "experiments.report", "out"],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert "best of 4 by output_tokens_per_s" in rebuilt.stdout
    for name, content in before.items():
        assert (tmp_path / "out" / name).read_bytes() == content


def test_a_single_run_ends_in_a_report_too(launch: Launch, tmp_path: Path) -> None:
    assert launch("hydra.run.dir=out", *SMALL) == 0
    assert {"results.csv", "report.html", "plots", "rows"} <= files(tmp_path / "out")
    (row,) = read_csv(tmp_path / "out")
    assert float(row["output_tokens_per_s"]) == pytest.approx(61.875)
    assert files(tmp_path / "out" / "plots") == {"occupancy.png"}


def test_results_go_to_the_output_folder_and_traces_come_from_the_start_folder(
    launch: Launch, tmp_path: Path
) -> None:
    """E02: nothing depends on where Hydra puts its output, and nothing else is written."""
    line = '{"timestamp": 1, "input_length": 700, "output_length": 2, "hash_ids": [1, 2]}\n'
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "trace.jsonl").write_text(3 * line)
    assert launch("workload=mooncake", "workload.path=data/trace.jsonl") == 0
    (run,) = (tmp_path / "outputs").glob("*/*")
    assert read_csv(run)[0]["prompt_tokens"] == "2100"
    assert launch("-m", "workload=mooncake", "workload.path=data/trace.jsonl", "seed=1,2") == 0
    (sweep,) = (tmp_path / "multirun").glob("*/*")
    assert [row["prompt_tokens"] for row in read_csv(sweep)] == ["2100", "2100"]
    assert files(tmp_path) == {"data", "outputs", "multirun"}


def test_a_bad_point_is_a_row_and_the_others_are_measured(
    launch: Launch, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    """E04: 8,0,16 gives three rows; the error is in that job's log before the next one starts."""
    seen = []

    def look(workload: Workload, config: ServeConfig, progress: bool) -> SimpleNamespace:
        log = tmp_path / "out" / "jobs" / "1" / "serve.log"
        seen.append(log.exists() and "cache.block_size=0: expected" in log.read_text())
        return arithmetic(workload, config, progress)

    stand_in(look)
    assert launch("-m", "cache.block_size=8,0,16", "hydra.sweep.dir=out", *SMALL) == 1
    assert seen == [False, True]
    rows = read_csv(tmp_path / "out")
    assert [(r["cache.block_size"], r["status"]) for r in rows] == [
        ("0", "failed"),
        ("8", "ok"),
        ("16", "ok"),
    ]
    message = "ConfigError: cache.block_size=0: expected a number >= 1"
    assert rows[0]["message"] == message
    assert rows[0]["output_tokens_per_s"] == ""
    assert float(rows[2]["output_tokens_per_s"]) == pytest.approx(61.875)
    printed = capsys.readouterr().out
    assert f"failed: cache.block_size=0: {message}" in printed
    assert "Traceback" not in printed
    assert "cache.block_size=0: expected" in (tmp_path / "out" / "report.html").read_text().replace(
        "&gt;", ">"
    )


def test_an_unexpected_error_keeps_its_traceback(launch: Launch, tmp_path: Path) -> None:
    """E04: the job's log holds what is needed to find a fault of the code."""

    def faulty(workload: Workload, config: ServeConfig, progress: bool) -> SimpleNamespace:
        raise KeyError("lost")

    stand_in(faulty)
    assert launch("hydra.run.dir=out", *SMALL) == 1
    log = (tmp_path / "out" / "serve.log").read_text()
    assert "Traceback" in log
    assert "in faulty" in log
    assert read_csv(tmp_path / "out")[0]["message"] == "KeyError: 'lost'"


def test_fail_fast_leaves_the_rest_unrun(launch: Launch, tmp_path: Path) -> None:
    """E04: after the failed point nothing is measured; run again, only the missing points are."""
    sweep = ("-m", "cache.block_size=8,0,16", "hydra.sweep.dir=out", *SMALL)
    assert launch(*sweep, "fail_fast=true") == 1
    statuses = {r["cache.block_size"]: r["status"] for r in read_csv(tmp_path / "out")}
    assert statuses == {"0": "failed", "8": "ok"}
    assert launch(*sweep) == 1
    assert len(read_csv(tmp_path / "out")) == 3


def test_running_a_folder_again_repeats_only_failed_points(launch: Launch, tmp_path: Path) -> None:
    """E05: finished points are known by their configuration, whatever their job number."""
    measured = []
    broken = {16}

    def counting(workload: Workload, config: ServeConfig, progress: bool) -> SimpleNamespace:
        measured.append(config.cache.block_size)
        if config.cache.block_size in broken:
            raise RuntimeError("out of luck")
        return arithmetic(workload, config, progress)

    stand_in(counting)
    assert launch("-m", "cache.block_size=8,16,32", "hydra.sweep.dir=out", *SMALL) == 1
    broken.clear()
    assert launch("-m", "cache.block_size=4,8,16,32", "hydra.sweep.dir=out", *SMALL) == 0
    assert measured == [8, 16, 32, 4, 16]
    assert [row["cache.block_size"] for row in read_csv(tmp_path / "out")] == ["4", "8", "16", "32"]
    assert {row["status"] for row in read_csv(tmp_path / "out")} == {"ok"}


def test_a_point_whose_trace_has_changed_is_measured_again(launch: Launch, tmp_path: Path) -> None:
    """E05: the trace's content counts, not its name."""
    line = '{"timestamp": 1, "input_length": 700, "output_length": 2, "hash_ids": [1, 2]}\n'
    run = ("workload=mooncake", "workload.path=trace.jsonl", "hydra.run.dir=out")
    for copies in (1, 2):
        (tmp_path / "trace.jsonl").write_text(copies * line)
        assert launch(*run) == 0
        (row,) = read_csv(tmp_path / "out")
        assert row["prompt_tokens"] == str(700 * copies)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ("scheduler.max_num_seqs=64", "config.scheduler.max_num_seqs was 256, now 64"),
        ("gpu=h200", "config.gpu.name was h100, now h200"),
        ("evictor=fifo,lru", "swept_keys was ['cache.block_size'], now"),
    ],
)
def test_a_folder_of_another_sweep_is_refused(
    launch: Launch, tmp_path: Path, capsys: pytest.CaptureFixture, change: str, named: str
) -> None:
    """E05: a changed configuration is detected, and the folder is left as it was."""
    sweep = ("-m", "cache.block_size=8,16", "hydra.sweep.dir=out", *SMALL)
    assert launch(*sweep) == 0
    before = (tmp_path / "out" / "results.csv").read_bytes()
    assert launch(*sweep, change) == 1
    assert named in capsys.readouterr().err
    assert (tmp_path / "out" / "results.csv").read_bytes() == before
    assert len(list((tmp_path / "out" / "rows").iterdir())) == 2


def test_changed_code_is_detected(
    launch: Launch, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """E05: rows of two versions of the code never stand in one table."""
    assert launch("hydra.run.dir=out", *SMALL) == 0
    monkeypatch.setattr(callbacks, "provenance", lambda: MADE_BY | {"code_hash": "new"})
    assert launch("hydra.run.dir=out", *SMALL) == 1
    assert "provenance.code_hash was def, now new" in capsys.readouterr().err


def test_a_folder_with_other_files_is_refused(
    launch: Launch, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    """E05: the home folder is not taken for a place for rows."""
    (tmp_path / "notes.txt").write_text("mine")
    assert launch("hydra.run.dir=.", *SMALL) == 1
    assert "is not empty and holds no sweep.json" in capsys.readouterr().err
    assert files(tmp_path) == {"notes.txt"}


SLOW_SERVE = """
import sys, time
sys.path[:0] = [{tests!r}, {root!r}]
import test_serve_app

def slow(workload, config, progress):
    time.sleep(0.3)
    return test_serve_app.arithmetic(workload, config, progress)

test_serve_app.stand_in(slow)
test_serve_app.serve.main()
"""


def test_a_killed_sweep_goes_on_and_gives_the_same_table(launch: Launch, tmp_path: Path) -> None:
    """E05: SIGKILL halfway, then the same command: as if nothing had happened but wall times."""
    script = tmp_path / "slow_serve.py"
    script.write_text(SLOW_SERVE.format(tests=str(ROOT / "tests"), root=str(ROOT)))
    sweep = ["-m", "cache.block_size=8,16,32", "cache.watermark=0,0.1", *SMALL]
    killed = subprocess.Popen(
        [sys.executable, str(script), *sweep, "hydra.sweep.dir=killed"],
        stdout=subprocess.DEVNULL,
        start_new_session=True,
    )
    rows = tmp_path / "killed" / "rows"
    deadline = time.monotonic() + 60
    while not (rows.is_dir() and len(list(rows.glob("[!.]*.json"))) >= 2):
        assert killed.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.02)
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    finished = {path.name: path.read_bytes() for path in rows.glob("[!.]*.json")}
    assert 2 <= len(finished) < 6
    assert not (tmp_path / "killed" / "results.csv").exists()
    assert launch(*sweep, "hydra.sweep.dir=killed") == 0
    assert launch(*sweep, "hydra.sweep.dir=undisturbed") == 0
    assert all((rows / name).read_bytes() == content for name, content in finished.items())
    assert without_wall_times(tmp_path / "killed") == without_wall_times(tmp_path / "undisturbed")


def test_a_wrong_type_in_a_sweep_stops_it_before_any_point(
    launch: Launch, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    """E07: 8,abc measures nothing, and names the key."""
    assert launch("-m", "cache.block_size=8,abc", "hydra.sweep.dir=out", *SMALL) == 1
    assert "cache.block_size" in capsys.readouterr().err
    assert not (tmp_path / "out" / "rows").exists()


@pytest.mark.parametrize(
    ("override", "key", "values"),
    [
        ("cache.block_size=8,16", "cache.block_size", ["8", "16"]),
        ("cache.block_size=range(8,33,8)", "cache.block_size", ["8", "16", "24", "32"]),
        ("workload.sample_counts=[1,2],[3]", "workload.sample_counts", ["[1, 2]", "[3]"]),
        ("evictor=lru,fifo", "evictor", ["fifo", "lru"]),
        ("scheduler.preemption=recompute,swap", "scheduler.preemption", ["recompute", "swap"]),
    ],
    ids=["choice", "range", "lists", "group", "enum"],
)
def test_documented_sweeps(
    launch: Launch, tmp_path: Path, override: str, key: str, values: list[str]
) -> None:
    """E07: commas, lists, ranges and config groups give exactly the jobs they seem to."""
    assert launch("-m", override, "workload=no_sharing", "hydra.sweep.dir=out", *SMALL) == 0
    assert [row[key] for row in read_csv(tmp_path / "out")] == values


def test_a_padded_number_is_refused(launch: Launch, tmp_path: Path) -> None:
    """E07: 016 is not quietly 16."""
    assert launch("cache.block_size=016", "hydra.run.dir=out", *SMALL) == 1
    assert "without leading zeros" in read_csv(tmp_path / "out")[0]["message"]


@pytest.mark.parametrize("experiment", ["block_size_watermark"])
def test_every_sweep_file_runs(launch: Launch, tmp_path: Path, experiment: str) -> None:
    """E06: each experiment, cut down to two points of its own sweep, really simulated."""
    stand_in(simulate)
    with initialize_config_dir(str(CONFIGS), version_base="1.3"):
        config = compose("serve", [f"experiment={experiment}"], return_hydra_config=True)
    first, *others = config.hydra.sweeper.params.items()
    narrowed = [f"{first[0]}={','.join(str(first[1]).split(',')[:2])}"]
    narrowed += [f"{key}={str(values).split(',')[0]}" for key, values in others]
    assert launch(f"experiment={experiment}", *narrowed, "hydra.sweep.dir=out", *SMALL) == 0
    assert len(read_csv(tmp_path / "out")) == 2
    assert (tmp_path / "out" / "report.html").stat().st_size > 10_000


def test_a_later_override_replaces_a_swept_one() -> None:
    """The experiment's own sweep gives way to the command line's."""
    params = {"a": "1,2", "b": "1,2,3", "d": "x"}
    swept, fixed, num_points = parse_sweep(params, ["c=y", "a=7", "b=5,6"])
    assert (swept, fixed, num_points) == (["b"], {"d": "x"}, 2)


def test_rows_are_whole_json_with_all_that_a_report_needs(launch: Launch, tmp_path: Path) -> None:
    """E09: results can be rebuilt, and read by other tools, from the job files alone."""
    assert launch("-m", "cache.block_size=8,16", "hydra.sweep.dir=out", *SMALL) == 0
    rows = {p.stem: json.loads(p.read_text()) for p in (tmp_path / "out" / "rows").iterdir()}
    assert {row["swept"]["cache.block_size"] for row in rows.values()} == {8, 16}
    for name, row in rows.items():
        assert name == row["config_hash"]
        assert row["config"]["cache"]["block_size"] == row["swept"]["cache.block_size"]
        assert row["occupancy"]["free_blocks"] == [60, 50, 40]
        assert row["metrics"]["requests_finished"] == 20
