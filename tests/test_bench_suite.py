"""The one command for a new GPU: rehearsed where nothing but torch and Triton is installed."""

import dataclasses
import json
import logging
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from experiments.bench import suite
from experiments.bench.config import DeviceName
from experiments.bench.implementations import NAMES, find_implementation
from experiments.bench.operations import operation_of
from experiments.bench.shapes import SHAPES
from experiments.bench.tables import markdown, measured_table, predicted_table
from experiments.ranges import InputError
from experiments.results import Measurement, ResultsFolder, Row

ROOT = Path(__file__).resolve().parent.parent
OPTIONAL = ("hydra", "omegaconf", "pandas", "matplotlib", "pytest", "hypothesis", "tqdm")


def run_suite(*arguments: str, without: tuple[str, ...] = ()) -> subprocess.CompletedProcess:
    """`python -m experiments.bench.suite` on a machine that lacks some packages."""
    code = (
        "import sys, runpy\n"
        f"sys.modules.update(dict.fromkeys({without!r}))\n"
        "runpy.run_module('experiments.bench.suite', run_name='__main__')"
    )
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)


def rows_in(folder: Path) -> dict[tuple[str, str], Row]:
    rows = [json.loads(path.read_text()) for path in (folder / "rows").iterdir()]
    return {(row["swept"]["operation"], row["swept"]["implementation"]): row for row in rows}


@pytest.mark.slow
def test_the_whole_set_is_rehearsed_with_torch_and_triton_alone(tmp_path: Path) -> None:
    """Every point that a first GPU will see, by the code that it will see; no typo is left."""
    run = run_suite("--device=rehearsal", "--budget-s=3000", f"--dir={tmp_path}", without=OPTIONAL)
    assert run.returncode == 0, run.stdout + run.stderr
    rows = rows_in(tmp_path)
    points = list(suite.points())
    assert set(rows) == {(point.label, point.implementation) for point in points}
    for name in ("flashinfer", "vllm", "flash_attn"):
        statuses = {row["status"] for (_, by), row in rows.items() if by == name}
        assert statuses == {"absent"}
    here = [r for (_, by), r in rows.items() if by in ("prefixlab", "torch_ops", "host")]
    assert {row["status"] for row in here} == {"ok"}
    assert all(row["metrics"]["p50_us"] > 0 for row in here)
    assert "tests: not run, as pytest is not installed" in run.stdout
    assert "Rehearsal: its times mean nothing." in run.stdout
    assert "no report: " in run.stdout
    assert "| decode " in run.stdout
    assert "absent: flash_attn: flash_attn is not installed" in run.stdout
    # The report is made where its libraries are.
    made = subprocess.run(
        [sys.executable, "-m", "experiments.report", str(tmp_path)], cwd=ROOT, capture_output=True
    )
    assert made.returncode == 0
    assert "Rehearsal: its times mean nothing" in (tmp_path / "report.html").read_text()


def test_it_needs_a_gpu() -> None:
    run = run_suite()
    assert run.returncode == 1
    assert "error: device=cuda: there is no GPU here" in run.stderr
    assert "Traceback" not in run.stderr


def test_the_set_covers_every_operation_and_all_that_offers_it() -> None:
    """This project's kernels come first, what compiles for long last."""
    points = list(suite.points())
    assert len({(p.label, p.implementation) for p in points}) == len(points)
    for label, shape in SHAPES.items():
        kind = operation_of(shape).kind
        offering = {name for name in NAMES if kind in find_implementation(name).prepares}
        assert offering == {p.implementation for p in points if p.label == label}
    order = [point.implementation for point in points]
    assert list(dict.fromkeys(order))[:3] == ["prefixlab", "torch_ops", "host"]
    assert list(dict.fromkeys(order))[-2:] == ["flashinfer", "flex_attention"]
    # vLLM registers a module of that name which is not flash-attn.
    assert order.index("flash_attn") < order.index("vllm")


class FakeBench:
    """Measures nothing: what `outcomes` says of a point happens, else a figure."""

    def __init__(self, outcomes: dict[str, object]) -> None:
        self.outcomes = outcomes
        self.seen: list[str] = []

    def measure(self, config: object) -> Measurement:
        name = f"{config.operation.name} by {config.implementation}"
        self.seen.append(name)
        outcome = self.outcomes.get(name, Measurement({"p50_us": 1.0, "p20_us": 1, "p80_us": 1}))
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome

    def is_lost(self) -> bool:
        return False


ended: list[object] = []
"""What `main_with` ended with, the last one last."""


def main_with(
    monkeypatch: pytest.MonkeyPatch, folder: Path, outcomes: dict[str, object], *arguments: str
) -> int:
    """The exit status of the suite with a bench that is a fake."""
    monkeypatch.setattr(suite, "Bench", lambda chosen: FakeBench(outcomes))
    monkeypatch.setattr(suite, "choose_device", lambda wanted: DeviceName.rehearsal)
    monkeypatch.setattr(sys, "argv", ["suite", f"--dir={folder}", *arguments])
    handlers, level = list(logging.root.handlers), logging.root.level
    with pytest.raises(SystemExit) as end:
        suite.main()
    logging.root.handlers[:], logging.root.level = handlers, level
    ended.append(end.value.code)
    return int(end.value.code) if not isinstance(end.value.code, str) else 1


def test_a_failed_or_suspect_point_fails_the_run_and_the_rest_goes_on(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    figures = {"p50_us": 2.0, "p20_us": 1.0, "p80_us": 3.0}
    outcomes = {
        "decode by prefixlab": RuntimeError("illegal memory access"),
        "prefill by prefixlab": Measurement(figures, suspect="5 TB/s is above the peak"),
    }
    for index, (name, outcome) in enumerate(outcomes.items()):
        folder = tmp_path / str(index)
        assert main_with(monkeypatch, folder, {name: outcome}, "--no-tests") == 1
        assert len(rows_in(folder)) == len(list(suite.points()))
    printed = capsys.readouterr().out
    assert "failed: decode by prefixlab: RuntimeError: illegal memory access" in printed
    assert "suspect: prefill by prefixlab: 5 TB/s is above the peak" in printed
    assert "2.0! " in printed
    assert main_with(monkeypatch, tmp_path / "ok", {}, "--no-tests") == 0


def test_what_there_is_no_time_for_is_said(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    assert main_with(monkeypatch, tmp_path, {}, "--no-tests", "--budget-s=1e-6") == 1
    number = len(list(suite.points()))
    own, torch_ops = (
        sum(point.implementation == name for point in suite.points())
        for name in ("prefixlab", "torch_ops")
    )
    said = f"no time was left for {number} points: {own} by prefixlab, {torch_ops} by torch_ops"
    assert said in capsys.readouterr().out


@pytest.mark.parametrize("budget", ["0", "-5", "nan", "inf", "much"])
def test_a_budget_is_a_positive_number(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture, budget: str
) -> None:
    assert main_with(monkeypatch, tmp_path / "out", {}, f"--budget-s={budget}") == 2
    assert f"invalid _seconds value: '{budget}'" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_the_same_folder_goes_on_where_it_was(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    """Points that failed are measured again, and after an interrupt the table is printed."""
    outcomes = {"prefill by prefixlab": KeyboardInterrupt(), "decode by prefixlab": OSError("x")}
    assert main_with(monkeypatch, tmp_path, outcomes, "--no-tests") == 1
    assert "interrupted in prefill by prefixlab" in capsys.readouterr().out
    running = [
        type(thread) for thread in threading.enumerate() if not thread.name.startswith("Main")
    ]
    assert threading.Timer not in running, "a watchdog would end what comes after the interrupt"
    first = rows_in(tmp_path)
    assert [row["status"] for row in first.values()].count("ok") == 2
    again = FakeBench({})
    monkeypatch.setattr(suite, "Bench", lambda chosen: again)
    monkeypatch.setattr(sys, "argv", ["suite", f"--dir={tmp_path}", "--no-tests"])
    with pytest.raises(SystemExit) as end:
        suite.main()
    assert end.value.code == 0
    assert len(again.seen) == len(list(suite.points())) - 2
    assert again.seen[0] == "prefill by prefixlab"
    assert again.seen[-1] == "decode by prefixlab", "what failed may end the run again"


def test_what_is_needed_is_said_with_what_was_found(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    assert suite.missing_requirements() == []
    found = {"torch": "2.9.1+cu128", "triton": "3.6.0", "numpy": "2.2.6"}

    def version(name: str) -> str:
        if name not in found:
            raise suite.PackageNotFoundError(name)
        return found[name]

    monkeypatch.setattr(suite, "version", version)
    monkeypatch.setattr(suite, "packages_distributions", lambda: {})
    wanted = ["torch >= 2.11 (found 2.9.1+cu128)", "einops >= 0.8 (found none)"]
    assert suite.missing_requirements() == wanted
    monkeypatch.setattr(suite, "packages_distributions", lambda: {"einops": ["einops-nightly"]})
    found["einops-nightly"] = "0.9"
    assert suite.missing_requirements() == wanted[:1]
    assert main_with(monkeypatch, tmp_path / "out", {}) == 1
    assert "lacks torch >= 2.11 (found 2.9.1+cu128); choose another with PYTHON=" in str(ended[-1])


@pytest.mark.parametrize(
    ("status", "said", "code"),
    [(0, "passed", 0), (1, "FAILED", 1), (5, "NOT RUN: pytest ended with status 5", 1)],
)
def test_how_the_tests_end_is_said(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture,
    status: int,
    said: str,
    code: int,
) -> None:
    """Points are measured in any case: each is checked by itself."""
    done = subprocess.CompletedProcess([], status)
    monkeypatch.setattr(suite.subprocess, "run", lambda *a, **k: done)
    assert main_with(monkeypatch, tmp_path, {}) == code
    assert f"tests: {said}\n" in capsys.readouterr().out
    assert len(rows_in(tmp_path)) == len(list(suite.points()))


def test_tests_that_hang_have_not_passed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    def hang(command: list[str], **options: object) -> None:
        raise subprocess.TimeoutExpired(command, suite.TEST_S)

    monkeypatch.setattr(suite.subprocess, "run", hang)
    assert main_with(monkeypatch, tmp_path, {}) == 1
    assert "tests: NOT FINISHED within 120 s\n" in capsys.readouterr().out


def measure_until_lost(
    monkeypatch: pytest.MonkeyPatch, folder: Path, lost_in: str, message: str = "CUDA error"
) -> list[str]:
    """The points seen by a run in which one of them, if it comes to that, loses the GPU."""
    bench = FakeBench({lost_in: RuntimeError(message)})
    bench.is_lost = lambda: True
    monkeypatch.setattr(suite, "Bench", lambda chosen: bench)
    monkeypatch.setattr(sys, "argv", ["suite", f"--dir={folder}", "--no-tests"])
    with pytest.raises(SystemExit) as end:
        suite.main()
    assert end.value.code == 1
    return bench.seen


def test_a_lost_gpu_ends_the_run_with_what_was_measured(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    """After an illegal access every later call in the process would fail, too."""
    monkeypatch.setattr(suite, "choose_device", lambda wanted: DeviceName.rehearsal)
    message = "CUDA error: an illegal memory access was encountered\nCUDA kernel errors might be"
    names = [point.name for point in suite.points()]
    seen = measure_until_lost(monkeypatch, tmp_path, "merge_states by prefixlab", message)
    number = names.index("merge_states by prefixlab")
    assert len(seen) == len(rows_in(tmp_path)) == number + 1
    printed = capsys.readouterr().out
    assert f"the GPU is lost to this process, and with it {len(names) - number - 1}" in printed
    assert f"to go on: python -m experiments.bench.suite --no-tests --dir {tmp_path}" in printed
    assert "illegal memory access was encountered\n" in printed
    assert "kernel errors might be" not in printed.split("| operation")[0].split("failed: ")[1]
    # Going on, the point that lost it comes last, and by then all others are there.
    seen = measure_until_lost(monkeypatch, tmp_path, "merge_states by prefixlab")
    assert len(seen) == len(names) - number
    assert seen[-1] == "merge_states by prefixlab"
    statuses = [row["status"] for row in rows_in(tmp_path).values()]
    assert sorted(statuses) == ["failed"] + ["ok"] * (len(names) - 1)


def test_a_point_that_hangs_is_given_up(tmp_path: Path) -> None:
    """In a process of its own, which would never end: rows and table are there, and the command
    that goes on comes to the point last."""
    code = (
        "import sys, time\n"
        "from experiments.bench import suite\n"
        "from experiments.results import Measurement\n"
        "class Hanging:\n"
        "    def __init__(self, chosen): pass\n"
        "    def measure(self, config):\n"
        "        time.sleep(1e6 * (config.operation.name == 'decode_fp8'))\n"
        "        return Measurement({'p20_us': 1.0, 'p50_us': 2.0, 'p80_us': 3.0})\n"
        "suite.Bench, suite.POINT_S = Hanging, 1.0\n"
        "suite.main()"
    )
    arguments = ["--device=rehearsal", "--no-tests", f"--dir={tmp_path}"]
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", code, *arguments]
    for number in (1, 2):
        run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
        assert run.returncode == 1
        assert "did not end within 1 s: given up" in run.stdout
        assert f"--no-tests --dir {tmp_path} --device rehearsal" in run.stdout
        rows = rows_in(tmp_path)
        assert rows["decode", "prefixlab"]["status"] == "ok"
        failed = [row for row in rows.values() if row["status"] == "failed"]
        assert {row["message"] for row in failed} == {"did not end within 1 s"}
        assert {row["config"]["operation"]["name"] for row in failed} == {"decode_fp8"}
        # The second run is ended by the next point that hangs, on its way to the first.
        assert len(failed) == number
    assert rows["prefill", "prefixlab"]["status"] == "ok"


def test_another_gpu_s_folder_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Its rows would stand under the new one's name."""
    for name in ("NVIDIA H100", "NVIDIA H200"):
        monkeypatch.setattr(suite, "device_name", lambda chosen, name=name: name)
        if name == "NVIDIA H100":
            suite.Suite(tmp_path, DeviceName.rehearsal, 0.0)
        else:
            with pytest.raises(InputError, match="device_name was NVIDIA H100, now NVIDIA H200"):
                suite.Suite(tmp_path, DeviceName.rehearsal, 0.0)


def test_a_file_that_is_broken_is_left_out(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from experiments.bench import implementations

    monkeypatch.setattr(implementations, "NAMES", [*implementations.NAMES, "mine"])
    names = {point.implementation for point in suite.points()}
    assert names == set(NAMES) - {"mine"}
    assert "mine is left out: ModuleNotFoundError" in caplog.text


def test_the_tests_that_need_a_gpu_are_collected_without_this_project_s_plugins() -> None:
    """As `run_tests` calls pytest, but with plugins absent and collecting only."""
    files = sorted(str(path) for path in (ROOT / "tests").glob("test_kernel_*.py"))
    plugins = ["benchmark", "xdist", "timeout", "hypothesispytest", "randomly"]
    options = [item for name in plugins for item in ("-p", f"no:{name}")]
    command = [sys.executable, "-m", "pytest", *suite.TEST_OPTIONS, *options, "--collect-only"]
    run = subprocess.run([*command, *files], cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
    assert "test_captured_at_one_length_replays_at_another" in run.stdout
    assert "test_fp8_caches" in run.stdout
    assert "test_features" not in run.stdout


def test_a_folder_with_other_results_is_refused(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(InputError, match="is not empty and holds no sweep"):
        suite.Suite(tmp_path, DeviceName.rehearsal, 0.0)


def test_the_points_do_not_depend_on_a_data_sheet(tmp_path: Path) -> None:
    made = suite.Suite(tmp_path, DeviceName.rehearsal, 0.0)
    row = made._start(suite.Point("decode", SHAPES["decode"], "prefixlab"))
    assert "gpu" not in row["config"]
    assert row["config"]["operation"] == dataclasses.asdict(SHAPES["decode"])
    assert ResultsFolder(tmp_path).manifest()["app"] == "bench"


# ---- tables


def row(operation: str, by: str, status: str = "ok", message: str = "", **metrics: float) -> Row:
    times = {"p20_us": 9.0, "p50_us": 10.0, "p80_us": 11.0}
    return {
        "swept": {"operation": operation, "implementation": by},
        "status": status,
        "message": message,
        "metrics": {**times, **metrics} if status in ("ok", "suspect") else {},
        "config": {"operation": {"name": operation.split()[0]}, "implementation": by},
        "notes": {},
    }


def test_the_measured_table() -> None:
    ceilings = {"copy_gb_per_s": 4000.0, "matrix_tflop_per_s": 780.0, "empty_call_us": 2.5}
    ceilings["link_gb_per_s"] = 4400.0
    rows = [
        row("copy_blocks", "prefixlab", achieved_gb_per_s=3000.0, share_of_limit=0.75),
        row("decode", "torch_ops", p50_us=25.0) | {"notes": {"clock": "stream"}},
        row("decode block_size=128", "prefixlab"),
        row("decode block_size=8", "prefixlab"),
        row("decode", "prefixlab", launch_bound=1, **ceilings),
        row("prefill", "vllm", "absent", "vllm: vllm is not installed"),
        row("decode", "vllm", "absent", "vllm: vllm is not installed"),
        row("decode", "flashinfer", "failed", "RuntimeError: boom"),
    ]
    text = measured_table(rows)
    problems, table, absent, ceilings = text.split("\n\n")
    assert problems == "failed: decode by flashinfer: RuntimeError: boom"
    assert absent == "absent: vllm: vllm is not installed"
    said = (
        "first: memory 4,400 GB/s (a copy 4,000); products of matrices: bf16 780 TFLOP/s; an empt"
    )
    assert said in ceilings
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()]
    heads = ["operation", "by", "p50 us", "p20 to p80", "GB/s", "TFLOP/s", "of limit", "x ours"]
    assert lines[0] == heads
    assert lines[2] == ["decode", "prefixlab", "10.0~", "9.0 to 11.0", "", "", "", "1.00"]
    assert lines[3][:3] == ["decode", "torch_ops", "25.0*"]
    assert lines[3][-1] == "2.50"
    assert [line[0] for line in lines[4:6]] == ["decode block_size=8", "decode block_size=128"]
    assert lines[6][4:] == ["3,000", "", "75%", "1.00"]


def test_nothing_is_held_against_a_time_that_cannot_be_right() -> None:
    rows = [row("decode", "prefixlab", "suspect", "too fast"), row("decode", "torch_ops")]
    lines = measured_table(rows).splitlines()
    assert [line.split("|")[-2].strip() for line in lines if "| decode" in line] == ["", ""]


def test_a_table_says_what_its_figures_are() -> None:
    rehearsed = row("decode", "prefixlab")
    rehearsed["notes"] = {"kind": "rehearsal: its times mean nothing"}
    assert measured_table([rehearsed]).startswith("Rehearsal: its times mean nothing.\n\n|")


def test_the_predicted_table_joins_what_compiles_to_the_same() -> None:
    code = {"registers": 28, "shared_bytes": 0, "spilled_bytes": 0, "launch_bound": 0, "flops": 0}
    rows = []
    for gpu, target, us in (("b200", "sm_100", 1.0), ("h100", "sm_90", 2.0)):
        for operation in ("copy_blocks", "gather_blocks", "decode"):
            made = row(operation, "prefixlab", predicted_us=us, needed_bytes=10**6, **code)
            made["config"]["gpu"] = {"name": gpu}
            made["notes"] = {"target": target}
            made["swept"] = {"operation": operation, "gpu": gpu}
            rows.append(made)
    rows[-1]["metrics"] |= {"registers": 234, "shared_bytes": 39168, "instructions_per_token": 23.1}
    rows[-1]["metrics"] |= {"spilled_bytes": 16, "launch_bound": 1, "touched_over_needed": 1.008}
    times, machine_code = predicted_table(rows).split("\n\n")
    assert "h100, us | b200, us" in times, "by target"
    assert " 2~ |" in times
    assert len(times.splitlines()) == 2 + 3
    assert "copy_blocks, gather_blocks |" in machine_code
    assert "234 regs, 38.2 K, 23.1 instr, 16 B spilled |" in machine_code
    assert len(machine_code.splitlines()) == 2 + 2


def test_markdown_aligns_names_left_and_numbers_right() -> None:
    assert markdown(["operation", "us"], [["a", "1,000"], ["bb", "2"]]).splitlines() == [
        "| operation |    us |",
        "| :-------- | ----: |",
        "| a         | 1,000 |",
        "| bb        |     2 |",
    ]
