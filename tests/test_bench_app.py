"""The bench app as its users launch it: every experiment, offline and rehearsed, and refusals."""

import dataclasses
import functools
import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir

from experiments.bench import app, implementations, measuring
from experiments.bench.config import BenchConfig, DeviceName, TimingConfig
from experiments.bench.implementations.implementation import Implementation
from experiments.bench.shapes import SHAPES
from experiments.config import to_object
from experiments.ranges import ConfigError, InputError
from experiments.results import Row

ROOT = Path(__file__).resolve().parent.parent
CONFIGS = ROOT / "configs"
EXPERIMENTS = (
    *("decode_block_size", "decode_batch_length", "prefill_with_cached_prefix"),
    *("copy_on_write_fanout", "prefix_hash_lookup", "swap_bandwidth", "tile_choice"),
    "every_kernel",
)
# What the interpreter runs in a moment.
TINY = (
    *("operation=decode", "operation.context_len=40", "operation.batch_size=1"),
    *("operation.num_heads=2", "operation.num_kv_heads=1", "operation.head_size=16"),
)
OF_ATTENTION = (*EXPERIMENTS[:3], "tile_choice")
FEWER_HEADS = ("operation.num_heads=8", "operation.num_kv_heads=2")
Launch = Callable[..., int]


@pytest.fixture
def launch(launch_main: Launch) -> Launch:
    """Launches the app; see `launch_main`."""
    app._bench.cache_clear()
    return functools.partial(launch_main, app.main)


def rows_of(folder: Path) -> list[Row]:
    return [json.loads(path.read_text()) for path in sorted((folder / "rows").iterdir())]


def composed(*overrides: str, with_hydra: bool = False) -> object:
    with initialize_config_dir(str(CONFIGS), version_base="1.3"):
        return compose("bench", list(overrides), return_hydra_config=with_hydra)


def narrowed(experiment: str) -> list[str]:
    """Overrides that leave two values of the experiment's first key, and one of each other."""
    params = composed(f"experiment={experiment}", with_hydra=True).hydra.sweeper.params
    first, *others = ((key, str(values).split(",")) for key, values in params.items())
    kept = [f"{first[0]}={','.join(first[1][:2])}", *(f"{key}={v[0]}" for key, v in others)]
    return [f"experiment={experiment}", *kept]


def test_the_experiments_are_those_of_the_app() -> None:
    for path in (CONFIGS / "experiment").glob("*.yaml"):
        assert ("For bench." in path.read_text()) == (path.stem in EXPERIMENTS)


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_every_experiment_composes_whole(experiment: str) -> None:
    """All implementations and shapes that its sweep names exist."""
    config = composed(f"experiment={experiment}", with_hydra=True)
    params = {key: str(values).split(",") for key, values in config.hydra.sweeper.params.items()}
    assert set(params.get("implementation", [])) <= set(implementations.NAMES)
    assert set(params.get("operation", [])) <= set(SHAPES)
    default = to_object(composed(f"experiment={experiment}")).operation.name
    keys = [key.split(".")[1] for key in params if key.startswith("operation.")]
    for shape in params.get("operation", [default]):
        names = {field.name for field in dataclasses.fields(SHAPES[shape])}
        assert set(keys) <= names
    assert keys or "operation" in params


@pytest.mark.parametrize("experiment", EXPERIMENTS)
@pytest.mark.parametrize("device", ["offline", "rehearsal"])
def test_every_experiment_runs(
    launch: Launch, tmp_path: Path, experiment: str, device: str
) -> None:
    """Offline, as a CPU does; and rehearsed, all that a GPU does but in the interpreter."""
    fewer_heads = FEWER_HEADS if experiment in OF_ATTENTION else ()
    sweep = [*narrowed(experiment), *fewer_heads, f"device={device}", "hydra.sweep.dir=out"]
    assert launch(*sweep) == 0
    rows = rows_of(tmp_path / "out")
    assert [row["status"] for row in rows] == ["ok", "ok"]
    page = (tmp_path / "out" / "report.html").read_text()
    assert ("Predicted: nothing was timed" in page) == (device == "offline")
    for row in rows:
        metrics, kind = row["metrics"], row["notes"]["kind"]
        if device == "offline":
            assert kind == "predicted: nothing was timed"
            assert metrics["predicted_us"] > 0
            assert metrics["registers"] > 0
            assert "p50_us" not in metrics
        else:
            assert kind == "rehearsal: its times mean nothing"
            assert metrics["p20_us"] <= metrics["p50_us"] <= metrics["p80_us"]
            assert metrics["share_of_limit"] > 0
            assert "rehearsed_shape" in row["notes"]
        assert "block_size=" in row["notes"]["shape"]


def test_without_a_gpu_a_run_is_offline(launch: Launch, tmp_path: Path) -> None:
    """And says so, with all that it is based on."""
    assert launch("hydra.run.dir=out", "gpu=a40", *TINY) == 0
    (row,) = rows_of(tmp_path / "out")
    assert row["notes"]["target"] == "sm_86"
    assert "context_len=40" in row["notes"]["metered_shape"]
    assert row["config"]["gpu"]["name"] == "a40"
    assert row["metrics"]["touched_over_needed"] == pytest.approx(1, abs=0.3)
    assert row["device"] == "none"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["implementation=mine"],
            "implementation=mine: expected one of flash_attn, flashinfer, fl",
        ),
        (
            ["operation=prefill", "operation.cached_len=8192"],
            "expected less than operation.prompt_",
        ),
        (["operation.num_kv_heads=3"], "operation.num_heads=32: expected a multiple of operation."),
        (["operation.tile.m=16"], "operation.tile.n=null: expected a number beside the others"),
        (["operation.block_size=0"], "operation.block_size=0: expected a number >= 1"),
        (
            ["operation.head_size=1024"],
            "operation.head_size=1024: expected a number >= 1 and <=",
        ),
        (
            ["operation=match_prefix", "operation.block_size=5000"],
            "operation.block_size=5000: exp",
        ),
        (["operation.tile.m=4"], "operation.tile.m=4: expected a number >= 8 and <= 256"),
        (["operation.block_size=016"], "operation.block_size=016: expected a number without lead"),
        (["operation.block_sise=16"], "operation.block_sise"),
        (["operation.dtype=int8"], "operation.dtype"),
        (["operation=encode"], "Could not find 'operation/encode'"),
        (["timing.max_samples=5"], "timing.max_samples=5: expected at least timing.min_samples=20"),
        (["timing.min_samples=1"], "timing.min_samples=1: expected a number >= 3"),
        (["gpu.target=sm_91"], "gpu.target=sm_91: expected one of sm_80"),
        (["device=cuda"], "device=cuda: there is no GPU here"),
        (["device=tpu"], "device"),
        (["seed=-1"], "seed=-1: expected a number >= 0"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_cannot_be_measured_is_refused_by_name(
    launch: Launch, capsys: pytest.CaptureFixture, arguments: list[str], message: str
) -> None:
    assert launch(*arguments, "hydra.run.dir=out") == 1
    printed = "".join(capsys.readouterr())
    assert message in printed
    assert "Traceback" not in printed


def test_tiles_are_powers_of_two(launch: Launch, capsys: pytest.CaptureFixture) -> None:
    tile = [f"operation.tile.{key}=8" for key in ("m", "num_warps", "num_stages")]
    assert launch(*tile, "operation.tile.n=48", "hydra.run.dir=out") == 1
    assert "operation.tile.n=48: expected a power of two" in "".join(capsys.readouterr())


def test_what_is_not_here_is_absent_and_no_failure(launch: Launch, tmp_path: Path) -> None:
    """A library that isn't installed, an operation that an implementation doesn't have."""
    sweep = ["-m", "implementation=prefixlab,vllm,host", "device=rehearsal", *TINY]
    assert launch(*sweep, "hydra.sweep.dir=out") == 0
    rows = {row["swept"]["implementation"]: row for row in rows_of(tmp_path / "out")}
    assert rows["prefixlab"]["status"] == "ok"
    assert rows["vllm"]["status"] == rows["host"]["status"] == "absent"
    assert rows["vllm"]["message"] == "vllm: vllm is not installed"
    assert rows["host"]["message"] == "host has no attention"


def test_offline_there_is_nothing_to_say_of_the_alternatives(
    launch: Launch, tmp_path: Path
) -> None:
    assert launch("implementation=torch_ops", "hydra.run.dir=out", *TINY) == 0
    (row,) = rows_of(tmp_path / "out")
    assert row["status"] == "absent"


def test_the_host_is_timed_wherever_it_is(launch: Launch, tmp_path: Path) -> None:
    """Its look-ups need no GPU, so offline they are measured, at full size."""
    lookup = ["operation=match_prefix", "operation.num_prompts=5", "implementation=host"]
    assert launch(*lookup, "device=offline", "hydra.run.dir=out") == 0
    (row,) = rows_of(tmp_path / "out")
    assert row["notes"]["kind"] == "measured on the CPU"
    assert row["notes"]["clock"] == "host"
    assert row["metrics"]["prompts_per_s"] > 0


def fake(monkeypatch: pytest.MonkeyPatch, prepare: Callable) -> None:
    """An implementation `fake` of attention."""
    module = type(sys)("experiments.bench.implementations.fake")
    module.IMPLEMENTATION = Implementation("fake", {"attention": prepare})
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(implementations, "NAMES", [*implementations.NAMES, "fake"])


def test_nothing_is_timed_before_its_answer_was_checked(
    launch: Launch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A wrong answer is a failed row without a time; the call was made once, for the check."""
    calls = []

    def prepare(op: object) -> Callable:
        def call() -> object:
            calls.append(1)
            return op.out.fill_(0.5)

        return call

    fake(monkeypatch, prepare)
    assert launch("implementation=fake", "device=rehearsal", *TINY, "hydra.run.dir=out") == 1
    (row,) = rows_of(tmp_path / "out")
    assert row["status"] == "failed"
    assert row["message"].startswith("WrongAnswerError: sequence 0, queries 0 to 0: error")
    assert row["metrics"] == {}
    assert calls == [1]


def test_what_was_timed_is_checked_again(
    launch: Launch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A call that is right at first and idle later is no measurement."""
    calls = []

    def prepare(op: object) -> Callable:
        right = implementations.find_implementation("torch_ops").prepare(op)

        def call() -> object:
            calls.append(1)
            return op.out.copy_(right()) if len(calls) == 1 else op.out

        return call

    fake(monkeypatch, prepare)
    assert launch("implementation=fake", "device=rehearsal", *TINY, "hydra.run.dir=out") == 1
    (row,) = rows_of(tmp_path / "out")
    assert row["message"] == "WrongAnswerError: NaN or infinity in the output"
    assert len(calls) > 4, "the samples were taken by then"
    assert row["metrics"] == {}


def test_an_answer_from_before_does_not_pass(
    launch: Launch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Points of one shape share inputs and outputs; a call that does nothing finds no answer."""
    fake(monkeypatch, lambda op: lambda: op.out)
    sweep = ["-m", "implementation=prefixlab,fake", "device=rehearsal", *TINY]
    assert launch(*sweep, "hydra.sweep.dir=out") == 1
    rows = {row["swept"]["implementation"]: row for row in rows_of(tmp_path / "out")}
    assert rows["prefixlab"]["status"] == "ok"
    assert rows["fake"]["message"] == "WrongAnswerError: NaN or infinity in the output"


def test_a_shape_of_your_own_is_a_file(launch: Launch, tmp_path: Path) -> None:
    (tmp_path / "more" / "operation").mkdir(parents=True)
    text = "defaults: [decode, _self_]\nname: mine\nbatch_size: 1\ncontext_len: 33\nhead_size: 16\n"
    (tmp_path / "more" / "operation" / "mine.yaml").write_text(text)
    searched = f"hydra.searchpath=[file://{tmp_path / 'more'}]"
    assert launch("operation=mine", "device=rehearsal", searched, "hydra.run.dir=out") == 0
    (row,) = rows_of(tmp_path / "out")
    assert row["config"]["operation"]["name"] == "mine"
    assert "batch_size=1" in row["notes"]["shape"]
    assert "context_len=33" in row["notes"]["rehearsed_shape"]


def test_defaults_of_the_schema_and_of_the_files_agree() -> None:
    config: BenchConfig = to_object(composed())
    assert config.timing == TimingConfig()
    assert config.operation == SHAPES["decode"]
    assert (config.implementation, config.device) == ("prefixlab", DeviceName.auto)


def test_a_finished_point_of_another_device_is_measured_again(
    launch: Launch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """E05: a sweep that goes on elsewhere does not mix two GPUs' figures."""
    run = ["device=rehearsal", *TINY, "hydra.run.dir=out"]
    assert launch(*run) == 0
    first = rows_of(tmp_path / "out")
    assert launch(*run) == 0
    assert rows_of(tmp_path / "out") == first
    monkeypatch.setattr(app, "device_name", lambda wanted: "another one")
    assert launch(*run) == 0
    (row,) = rows_of(tmp_path / "out")
    assert row["device"] == "another one"


@pytest.mark.parametrize(
    ("has_gpu", "interpret", "wanted", "outcome"),
    [
        (True, None, "auto", "cuda"),
        (True, None, "cuda", "cuda"),
        (True, "0", "cuda", "cuda"),
        (False, "1", "auto", "offline"),
        (True, "1", "offline", "offline"),
        (True, "1", "rehearsal", "rehearsal"),
        (True, "1", "auto", "device=cuda: TRITON_INTERPRET is set"),
        (True, None, "offline", "device=offline: Triton was imported to compile"),
        (False, None, "rehearsal", "device=rehearsal: Triton was imported to compile"),
        (False, "1", "cuda", "device=cuda: there is no GPU here"),
    ],
)
def test_the_device_decides_whether_kernels_are_interpreted(
    monkeypatch: pytest.MonkeyPatch, has_gpu: bool, interpret: str | None, wanted: str, outcome: str
) -> None:
    """Triton has been imported in this process; what it read then can't be changed any more."""
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    if interpret is not None:
        monkeypatch.setenv("TRITON_INTERPRET", interpret)
    if outcome in set(DeviceName):
        assert measuring.choose_device(DeviceName(wanted)) == outcome
    else:
        with pytest.raises(InputError, match=outcome):
            measuring.choose_device(DeviceName(wanted))


@pytest.mark.parametrize("what", ["memory", "shared memory"])
def test_what_does_not_fit_is_no_failure(
    launch: Launch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """B15: a tile for one GPU can overflow another's shared memory."""
    import torch
    from triton.runtime.errors import OutOfResources

    errors = {
        "memory": torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 34 GiB. GPU 0"),
        "shared memory": OutOfResources(147456, 101376, "shared memory"),
    }

    def prepare(op: object) -> Callable:
        raise errors[what]

    fake(monkeypatch, prepare)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    assert launch("implementation=fake", "device=rehearsal", *TINY, "hydra.run.dir=out") == 0
    (row,) = rows_of(tmp_path / "out")
    said = {
        "memory": "out of memory: CUDA out of memory",
        "shared memory": "does not fit: out of resource: shared memory, Required: 147456, Hardware",
    }
    assert row["status"] == "absent"
    assert row["message"].startswith(said[what])


def test_a_device_that_no_longer_answers_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """As after an illegal access: each later call of the process raises, whatever it is."""
    import torch

    assert not measuring.Bench(DeviceName.rehearsal).is_lost()
    bench = measuring.Bench(DeviceName.cuda)
    asked = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: asked.append("wait"))
    monkeypatch.setattr(torch, "ones", lambda *a, **k: torch.zeros(1))
    assert not bench.is_lost()
    assert asked == ["wait"]

    def illegal() -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(torch.cuda, "synchronize", illegal)
    assert bench.is_lost()


def test_a_file_that_is_no_implementation_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    module = type(sys)("experiments.bench.implementations.mine")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(implementations, "NAMES", [*implementations.NAMES, "mine"])
    with pytest.raises(ConfigError, match=r"mine.py: expected IMPLEMENTATION = "):
        implementations.find_implementation("mine")


def test_many_splits_are_rehearsed_as_few(launch: Launch, tmp_path: Path) -> None:
    run = ["device=rehearsal", *TINY, "operation.num_splits=1024", "hydra.run.dir=out"]
    assert launch(*run) == 0
    (row,) = rows_of(tmp_path / "out")
    assert "num_splits=1024" in row["notes"]["shape"]
    assert "num_splits=4" in row["notes"]["rehearsed_shape"]
