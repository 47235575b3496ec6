"""The replay app as its users launch it: experiments, refusals, launchers, searches and reports."""

import csv
import importlib.util
import json
import logging
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hydra import compose, initialize_config_dir

from cache.evictor import POLICIES
from experiments import replay
from experiments.config import register, to_replay_config, to_serve_config
from experiments.plots import capacity_figure
from experiments.replayer import Replay
from experiments.results import Row
from experiments.simulator import simulate
from experiments.workloads import make_workload

ROOT = Path(__file__).resolve().parent.parent
CONFIGS = ROOT / "configs"
BASE = ("model=llama3_8b", "workload.path=trace.jsonl")


def needs(plugin: str) -> pytest.MarkDecorator:
    missing = importlib.util.find_spec(f"hydra_plugins.{plugin}") is None
    return pytest.mark.skipif(missing, reason=f"needs {plugin}: pip install '.[launchers]'")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a trace: eight documents of 1 to 8 blocks, read over and over, unevenly."""
    rng = np.random.default_rng(2)
    lines = []
    for i in range(150):
        document = min(int(rng.geometric(0.3)), 8)
        ids = [100 * document + k for k in range(document)] + [10_000 + i]
        lines.append(
            {
                "timestamp": 1000 * i,
                "input_length": 512 * document + 30,
                "output_length": 5,
                "hash_ids": ids,
            }
        )
    (tmp_path / "trace.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return tmp_path


def launch(folder: Path, *arguments: str, app: str = "replay") -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", f"experiments.{app}", *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )


def read_csv(folder: Path) -> list[dict[str, str]]:
    with (folder / "results.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def measure(folder: Path, *overrides: str) -> dict[str, str]:
    """What replay measures, in this process and as text."""
    register()
    path = f"workload.path={folder / 'trace.jsonl'}"
    with initialize_config_dir(str(CONFIGS), version_base="1.3"):
        composed = compose("replay", [path, *overrides])
    metrics = Replay(to_replay_config(composed)).metrics()
    return {name: str(value) for name, value in metrics.items() if "wall" not in name}


def without_wall_times(folder: Path) -> list[dict[str, str]]:
    return [{k: v for k, v in row.items() if "wall" not in k} for row in read_csv(folder)]


def test_a_capacity_curve_ends_in_table_plot_and_report(folder: Path) -> None:
    """With a failed point and capacities that refuse requests; the other points are measured."""
    run = launch(
        folder,
        *BASE,
        "experiment=capacity_curve",
        "cache.model=blocks",
        "evictor=lru,sieve,belady",
        "cache.num_gpu_blocks=0,6,12,400",
        "hydra.sweep.dir=out",
    )
    assert run.returncode == 1
    message = "cache.num_gpu_blocks=0: expected a number >= 1 or 'auto' or 'unbounded'"
    rows = read_csv(folder / "out")
    assert len(rows) == 12
    failed = [row for row in rows if row["status"] == "failed"]
    assert {row["message"] for row in failed} == {f"ConfigError: {message}"}
    rates = {
        (row["evictor"], int(row["cache.num_gpu_blocks"])): float(row["block_hit_rate"])
        for row in rows
        if row["status"] == "ok"
    }
    assert rates["lru", 6] < rates["lru", 12] < rates["lru", 400]
    assert rates["belady", 12] > rates["lru", 12]
    assert rates["lru", 400] == rates["sieve", 400] == rates["belady", 400]
    refused = {int(r["requests_refused"]) for r in rows if r["cache.num_gpu_blocks"] == "6"}
    assert len(refused) == 1
    assert refused.pop() > 0
    plots = {path.name for path in (folder / "out" / "plots").iterdir()}
    assert {"capacity_curve.png", "token_hit_rate.png", "saved_gpu_s.png"} <= plots
    assert "num_gpu_blocks.png" not in plots
    page = (folder / "out" / "report.html").read_text()
    assert "<h2>Hit rate over capacity</h2><img" in page
    assert "best of 12 by block_hit_rate" in run.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["evictor=mru"], "Could not find 'evictor/mru'"),
        (["evictor.name=mru"], "evictor.name"),
        (["cache.model=tree"], "cache.model"),
        (["cache.num_gpu_blocks=0"], "cache.num_gpu_blocks=0: expected a number >= 1"),
        (["cache.num_gpu_blocks=some"], "expected a number >= 1 or 'auto' or 'unbounded'"),
        (["cache.block_size=96"], "cache.block_size=96: expected a divisor or a multiple of 512"),
        (["cache.model=flat", "cache.overlap=true"], "cache.overlap=true: expected cache.model=bl"),
        (["workload=azure"], "workload.name=azure: its requests carry no hash ids"),
        (["workload=no_sharing", "~workload.path"], "its requests carry no hash ids"),
        (["workload.path=missing.jsonl"], "workload.path=missing.jsonl: no such file"),
        (["workload.path=???"], "workload.path is not set"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_cannot_be_replayed_is_refused_by_name(
    folder: Path,
    arguments: list[str],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
) -> None:
    if arguments == ["workload=azure"]:
        text = "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.68,374,44\n"
        (folder / "trace.jsonl").write_text(text)
    base = BASE if "~workload.path" not in arguments else BASE[:1]
    arguments = [a for a in arguments if not a.startswith("~")]
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "argv", ["replay.py", *base, *arguments, "hydra.run.dir=out"])
    handlers, level = list(logging.root.handlers), logging.root.level
    with pytest.raises(SystemExit) as end:
        replay.main()
    logging.root.handlers[:], logging.root.level = handlers, level
    printed = "".join([*capsys.readouterr(), str(end.value.code)])
    assert end.value.code not in (0, None)
    assert message in printed
    assert "Traceback" not in printed


def test_every_policy_has_a_configuration() -> None:
    """A reader adds one file here and one there; each configuration names its policy."""
    register()
    assert {path.stem for path in (CONFIGS / "evictor").iterdir()} == set(POLICIES)
    with initialize_config_dir(str(CONFIGS), version_base="1.3"):
        for name in POLICIES:
            composed = compose("replay", ["workload.path=trace", f"evictor={name}"])
            assert composed.evictor.name.value == name


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_serve_takes_every_policy(name: str) -> None:
    """In a pool that evicts; Belady's policy knows the prompts to come, and hits most."""
    register()
    overrides = ["workload=few_shot", "workload.num_requests=60", "cache.num_gpu_blocks=600"]
    rates = {}
    with initialize_config_dir(str(CONFIGS), version_base="1.3"):
        for policy in (name, "belady"):
            config = to_serve_config(compose("serve", [*overrides, f"evictor={policy}"]))
            metrics = simulate(make_workload(config.workload, config.seed), config).metrics
            assert metrics["requests_finished"] == 60
            assert metrics["evicted_blocks"] > 0
            rates[policy] = metrics["token_hit_rate"]
    assert 0 < rates[name] <= rates["belady"] + 0.02


def test_a_policy_is_added_with_one_file_and_one_configuration(folder: Path) -> None:
    """As the README says: a copy of the checkout's packages with a policy of its own."""
    for package in ("cache", "experiments", "configs"):
        subprocess.run(["cp", "-r", str(ROOT / package), str(folder)], check=True)
    (folder / "cache" / "evictors" / "mru.py").write_text(
        "from .lru import LRU\n\n\n"
        "class MRU(LRU):\n"
        '    name = "mru"\n'
        "    evictor_type = None\n\n"
        "    def evict(self, incoming=None):\n"
        "        return self._queue.popitem()[0]\n"
    )
    (folder / "configs" / "evictor" / "mru.yaml").write_text("name: mru\n")
    for from_tokens in ("true", "false"):
        run = subprocess.run(
            [
                *(sys.executable, "-m", "experiments.replay", *BASE, "evictor=mru"),
                *("cache.num_gpu_blocks=12", f"cache.from_tokens={from_tokens}"),
                f"hydra.run.dir={from_tokens}",
            ],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": str(folder)},
            capture_output=True,
            text=True,
        )
        assert run.returncode == 0, run.stderr
        assert "block_hit_rate" in run.stdout


LAUNCHERS = [
    pytest.param("joblib", ["hydra.launcher.n_jobs=2"], marks=needs("hydra_joblib_launcher")),
    pytest.param(
        "submitit_local",
        ["hydra.launcher.timeout_min=5"],
        marks=needs("hydra_submitit_launcher"),
    ),
]


@pytest.mark.parametrize(("launcher", "options"), LAUNCHERS)
def test_a_sweep_in_other_processes_goes_on_where_it_was(
    folder: Path, launcher: str, options: list[str]
) -> None:
    """Rows as measured in this process; what was finished is kept, what failed is repeated."""
    launched = ["-m", *BASE, "cache.num_gpu_blocks=0,12", "evictor=lru,sieve", *options]
    launched += [f"hydra/launcher={launcher}", "hydra.sweep.dir=out"]
    assert launch(folder, *launched).returncode == 1
    before = without_wall_times(folder / "out")
    assert [row["status"] for row in before] == ["failed", "failed", "ok", "ok"]
    for row in before[2:]:
        measured = measure(folder, f"evictor={row['evictor']}", "cache.num_gpu_blocks=12")
        assert {name: row[name] for name in measured} == measured
    rows = folder / "out" / "rows"
    finished = {p.name: p.read_bytes() for p in rows.iterdir() if '"ok"' in p.read_text()}
    assert len(finished) == 2
    lost = sorted(finished)[0]
    (rows / lost).unlink()
    again = launch(folder, *launched)
    assert again.returncode == 1
    assert without_wall_times(folder / "out") == before
    for name, content in finished.items():
        assert name == lost or (rows / name).read_bytes() == content, "a finished row was redone"
    assert "best of 4 by block_hit_rate" in again.stdout


@needs("hydra_submitit_launcher")
def test_a_cluster_is_asked_for_what_the_configuration_says() -> None:
    register()
    with initialize_config_dir(str(CONFIGS), version_base="1.3"):
        composed = compose(
            "replay",
            [
                "workload.path=trace",
                "hydra/launcher=submitit_slurm",
                "hydra.launcher.partition=cpu",
            ],
            return_hydra_config=True,
        )
    launcher = composed.hydra.launcher
    assert launcher._target_.endswith("SlurmLauncher")
    assert launcher.partition == "cpu"


@needs("hydra_optuna_sweeper")
def test_a_search_finds_the_best_of_what_it_tried_and_goes_on(folder: Path) -> None:
    """Optuna under serve; run again with more trials, the points tried before are kept."""
    search = [
        *("experiment=best_serving", "workload.num_requests=12", "hydra.sweep.dir=out"),
        # Equal choices give equal points, and a point out of range is a failed row.
        *("cache.block_size=choice(16,64)", "cache.watermark=choice(0.0,0.05,1.5)"),
        "evictor=choice(lru,arc)",
    ]
    first = launch(folder, *search, "hydra.sweeper.n_trials=4", app="serve")
    assert (folder / "out" / "report.html").exists(), first.stderr
    rows = {p.name: p.read_bytes() for p in (folder / "out" / "rows").iterdir()}
    assert 2 <= len(rows) <= 4
    second = launch(folder, *search, "hydra.sweeper.n_trials=7", app="serve")
    table = read_csv(folder / "out")
    assert len(table) >= len(rows)
    ok = [row for row in table if row["status"] == "ok"]
    best = max(float(row["output_tokens_per_s"]) for row in ok)
    assert f"Best value: {best}" in second.stderr + second.stdout
    for name, content in rows.items():
        if '"ok"' in content.decode():
            assert (folder / "out" / "rows" / name).read_bytes() == content
    failed = [row for row in table if row["status"] == "failed"]
    assert all("cache.watermark=1.5" in row["message"] for row in failed)
    assert second.returncode == (1 if failed else 0)


def row(evictor: str, capacity: int, rate: float) -> Row:
    return {
        "swept": {"evictor": evictor, "cache.num_gpu_blocks": capacity},
        "metrics": {"block_hit_rate": rate, "unbounded_block_hit_rate": 0.5},
    }


def test_the_capacity_plot_names_lines_bounds_and_winners() -> None:
    rates = {
        "lru": [0.1, 0.2, 0.3],
        "sieve": [0.2, 0.1, 0.25],
        "lfu": [0.2, 0.1, 0.25],
        "arc": [0.1, 0.25, 0.2],
        "belady": [0.3, 0.4, 0.5],
    }
    rows = [
        row(name, capacity, rate)
        for name, curve in rates.items()
        for capacity, rate in zip((10, 100, 1000), curve, strict=True)
    ]
    rows.append({"swept": {"evictor": "lru", "cache.num_gpu_blocks": 0}, "metrics": {}})
    figure = capacity_figure(rows)
    top, bottom = figure.axes
    labels = [text.get_text() for text in top.get_legend().get_texts()]
    # Best on average first; policies that agree share a line.
    assert labels == [
        *("unbounded cache", "belady (knows the future)"),
        *("lru", "sieve, lfu", "arc"),
    ]
    assert top.get_ylabel() == "block hit rate, %"
    assert bottom.get_ylabel() == "points above lru"
    assert bottom.get_xscale() == "log"
    winners = {(text.get_text(), text.xy[0]) for text in bottom.texts}
    assert winners == {("sieve", 10), ("arc", 100), ("lru", 1000)}
    lines = {line.get_label(): line.get_ydata() for line in top.lines}
    assert np.allclose(lines["unbounded cache"], 50)
    assert np.allclose(lines["arc"], [10, 25, 20])
