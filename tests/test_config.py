"""Composition and validation of configurations: what is refused, and with which words."""

import dataclasses
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from hydra.errors import ConfigCompositionException
from omegaconf import OmegaConf

from experiments import config as config_module
from experiments.bench.config import CacheDtype, DeviceName, Dtype
from experiments.bench.implementations import NAMES
from experiments.bench.schema import register as register_bench
from experiments.config import (
    ChatConfig,
    IndependentConfig,
    Preemption,
    ReplayConfig,
    ServeConfig,
    refuse_padded_numbers,
    register,
    to_object,
    to_replay_config,
    to_serve_config,
)
from experiments.generate_config import register as register_generate
from experiments.ranges import ConfigError
from kernels.launch import TARGETS

ROOT = Path(__file__).resolve().parent.parent
CONFIGS = ROOT / "configs"
GROUPS = ("cache", "evictor", "workload", "model", "gpu", "scheduler", "experiment")
OF_REPLAY = ("capacity_curve", "block_size_hit_rate", "policy_table")
OPTIONS = [
    (path.parent.name, path.stem)
    for g in GROUPS
    for path in sorted((CONFIGS / g).iterdir())
    # tests/test_generate_app.py and tests/test_bench_app.py run those of their apps.
    if not path.stem.startswith("generate_") and "For bench." not in path.read_text()
]
GPUS = [option for group, option in OPTIONS if group == "gpu"]


@pytest.fixture(autouse=True)
def hydra_configs() -> Iterator[None]:
    register()
    with initialize_config_dir(str(CONFIGS), version_base="1.3"):
        yield


def composed(*overrides: str) -> ServeConfig:
    refuse_padded_numbers(overrides)
    return to_serve_config(compose("serve", overrides=list(overrides)))


def composed_replay(*overrides: str) -> ReplayConfig:
    refuse_padded_numbers(overrides)
    return to_replay_config(compose("replay", ["workload.path=trace", *overrides]))


@pytest.mark.parametrize(("group", "option"), OPTIONS, ids=[f"{g}-{o}" for g, o in OPTIONS])
def test_every_shipped_config_composes_and_is_valid(group: str, option: str) -> None:
    """E06: every file of every group composes, without Hydra's own configuration being set."""
    if option in OF_REPLAY:
        config = composed_replay(f"{group}={option}")
    else:
        needs_path = option in ("mooncake", "azure")
        config = composed(f"{group}={option}", *(["workload.path=trace"] if needs_path else []))
    if hasattr(chosen := getattr(config, group, None), "name"):
        assert chosen.name == option


def help_of(app: str) -> str:
    register_bench()
    register_generate()
    return compose(app, return_hydra_config=True).hydra.help.header


def test_the_help_of_bench_lists_the_values_that_there_are() -> None:
    listed = dict(re.findall(r"^([\w.]+)=(\S+\|\S+)$", help_of("bench"), re.M))
    assert {key: sorted(values.split("|")) for key, values in listed.items()} == {
        "implementation": sorted(NAMES),
        "device": sorted(DeviceName),
        "operation.dtype": sorted(Dtype),
        "operation.cache_dtype": sorted(CacheDtype),
    }


def test_the_help_of_each_app_lists_its_experiments() -> None:
    named: dict[str, set[str]] = {"serve": set(), "replay": {*OF_REPLAY}}
    for path in (CONFIGS / "experiment").glob("*.yaml"):
        app = "bench" if "For bench." in path.read_text() else path.stem.partition("_")[0]
        if path.stem not in OF_REPLAY:
            named.setdefault(app if app in ("bench", "generate") else "serve", set()).add(path.stem)
    for app, experiments in named.items():
        listed = re.findall(r"^  (\w+)  +\S", help_of(app), re.M)
        assert sorted(listed) == sorted(experiments), app


@pytest.mark.parametrize("app", ["serve", "replay", "generate", "bench"])
def test_help_begins_with_what_the_app_does(app: str) -> None:
    """Hydra fills its template once more, where a dollar sign would be taken for a variable."""
    command = [sys.executable, "-m", f"experiments.{app}", "--help"]
    shown = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert shown.startswith(f"python -m experiments.{app}: ")
    assert help_of(app).strip() in shown
    assert "\nseed: 0\n" in shown


def test_every_gpu_runs_a_target_and_every_target_has_a_gpu() -> None:
    """Kernel times are predicted from data sheets for every target that kernels compile for."""
    assert {composed(f"gpu={gpu}").gpu.target for gpu in GPUS} == set(TARGETS)


@pytest.mark.parametrize("option", GPUS)
def test_figures_of_a_gpu_agree_with_one_another(option: str) -> None:
    """Guards against a figure in the wrong unit or under the wrong key."""
    gpu = composed(f"gpu={option}").gpu
    assert gpu.fp32_flops_per_s < gpu.flops_per_s
    assert gpu.pcie_bytes_per_s <= gpu.link_bytes_per_s < gpu.memory_bytes_per_s
    assert 0.01 < gpu.memory_bytes / gpu.memory_bytes_per_s < 0.1  # seconds to read all of it


def test_shipped_configs_use_no_interpolation_that_needs_a_running_job() -> None:
    """E06: `${hydra:...}` fails while a sweep is composed; `${hydra.x}` and `${now:}` don't."""
    for path in CONFIGS.rglob("*.yaml"):
        assert "${hydra:" not in path.read_text(), path


def test_defaults_of_the_schema_and_of_the_files_agree() -> None:
    """A ServeConfig made in code means the same as the default files."""
    config = composed()
    for name in ("cache", "evictor", "scheduler"):
        assert getattr(config, name) == getattr(ServeConfig(), name)


def test_types_after_composition() -> None:
    config = composed("scheduler=swap", "cache.num_gpu_blocks=100", "workload=parallel_sampling")
    assert config.scheduler.preemption is Preemption.swap
    assert config.cache.num_gpu_blocks == 100
    assert isinstance(config.workload, IndependentConfig)
    assert config.workload.sample_counts == [4]
    assert isinstance(composed().workload, ChatConfig)
    assert composed("experiment=block_size_watermark").gpu.name == "rtx4090"


@pytest.mark.parametrize(
    "override",
    [
        "cache.block_size=abc",
        "cache.block_size=16.0",
        "cache.block_size=true",
        "cache.block_size=null",
        "cache.block_sise=16",
        "cache.watermark=much",
        "cache.num_gpu_blocks=1.5",
        "scheduler.preemption=discard",
        "cache.hash_algorithm=md5",
        "workload.path=trace",
        "seed=x",
    ],
)
def test_a_typo_or_a_wrong_type_is_refused_while_composing(override: str) -> None:
    """E07: the error names the key, and nothing has been run by then."""
    with pytest.raises(ConfigCompositionException) as caught:
        compose("serve", overrides=[override])
    messages = f"{caught.value} {caught.value.__cause__}"
    assert override.split("=")[0] in messages


@pytest.mark.parametrize(
    ("app", "override", "message"),
    [
        ("serve", "+foo=1", "foo: no such key; expected one of cache, evictor, fail_fast, gpu, "),
        ("serve", "+cache.blocksize=3", "cache.blocksize: no such key; expected one of block_size"),
        ("serve", "+workload.turn=2", "workload.turn: no such key; expected one of assistant_"),
        ("serve", "+gpu.nme=x", "gpu.nme: no such key; expected one of compute_efficiency, "),
        ("replay", "+cache.watermark=0.1", "cache.watermark: no such key; expected one of block_"),
        ("replay", "+workload.pth=trace", "workload.pth: no such key; expected one of name, num_"),
        ("generate", "+engine.kernels=torch", "engine.kernels: no such key; expected one of fixed"),
        ("generate", "+prompts.text=hi", "prompts.text: no such key; expected one of name, texts"),
        ("bench", "+operation.batch=3", "operation.batch: no such key; expected one of batch_size"),
        ("bench", "+operation.tile.warps=4", "operation.tile.warps: no such key; expected one of "),
        ("bench", "+timing.cold={l2: true}", "timing.cold: no such key; expected one of budget_s"),
        ("bench", "+cache.block_size=3", "cache: no such key; expected one of device, fail_fast, "),
    ],
)
def test_an_added_key_that_nothing_reads_is_refused(app: str, override: str, message: str) -> None:
    """Hydra answers a typo with "use +key=value", which ran with the key's default."""
    register_bench()
    register_generate()
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}"):
        to_object(compose(app, [override]))


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("cache.block_size=0", "cache.block_size=0: expected a number >= 1"),
        ("cache.block_size=-1", "cache.block_size=-1: expected a number >= 1"),
        ("cache.block_size=016", "cache.block_size=016: expected a number without leading zeros"),
        ("cache.watermark=1.0", "cache.watermark=1.0: expected a number >= 0 and < 1"),
        ("cache.watermark=1.5", "cache.watermark=1.5: expected a number >= 0 and < 1"),
        ("cache.watermark=-0.1", "cache.watermark=-0.1: expected a number >= 0 and < 1"),
        ("cache.watermark=nan", "cache.watermark=nan: expected a number >= 0 and < 1"),
        ("cache.num_gpu_blocks=0", "cache.num_gpu_blocks=0: expected a number >= 1 or 'auto'"),
        ("cache.num_gpu_blocks=all", "cache.num_gpu_blocks='all': expected a number >= 1 or"),
        ("cache.num_cpu_blocks=-1", "cache.num_cpu_blocks=-1: expected a number >= 0 or 'auto'"),
        ("cache.sliding_window=0", "cache.sliding_window=0: expected a number >= 1"),
        ("cache.sliding_window=64", "expected cache.enable_caching=false"),
        ("scheduler.max_num_seqs=0", "scheduler.max_num_seqs=0: expected a number >= 1"),
        ("scheduler.max_num_batched_tokens=255", "expected at least scheduler.max_num_seqs=256"),
        ("workload.num_requests=0", "workload.num_requests=0: expected a number >= 1"),
        ("workload.request_rate_per_s=0", "workload.request_rate_per_s=0.0: expected a number > 0"),
        ("workload.request_rate_per_s=inf", "workload.request_rate_per_s=inf: expected a number"),
        ("model.num_kv_heads=5", "expected a multiple of model.num_kv_heads=5"),
        ("gpu.memory_utilization=1.1", "expected a number > 0 and <= 1"),
        ("seed=-1", "seed=-1: expected a number >= 0"),
        ("workload=mooncake", "workload.path is not set: give it as workload.path=VALUE"),
    ],
)
def test_a_value_out_of_range_is_refused(override: str, message: str) -> None:
    """E07: the error names key, value and what was expected."""
    with pytest.raises(ConfigError, match=re.escape(message)):
        composed(override)


def test_rules_that_join_two_keys() -> None:
    with pytest.raises(ConfigError, match=r"cache\.num_cpu_blocks=0: .* preemption by swap"):
        composed("scheduler.preemption=swap", "cache.num_cpu_blocks=0")
    with pytest.raises(ConfigError, match=r"workload\.sample_counts=0: "):
        composed("workload=parallel_sampling", "workload.sample_counts=[2,0]")
    with pytest.raises(ConfigError, match="at least one number"):
        composed("workload=parallel_sampling", "workload.sample_counts=[]")
    assert composed("cache.sliding_window=64", "cache.enable_caching=false")


def test_every_dataclass_can_be_made_and_none_shares_a_default() -> None:
    """E01: mutable defaults break dataclasses from Python 3.11 on; factories don't."""
    for name, cls in vars(config_module).items():
        if name.endswith("Config") and dataclasses.is_dataclass(cls):
            assert OmegaConf.structured(cls) is not None
    assert ServeConfig().cache is not ServeConfig().cache
    counts = IndependentConfig().sample_counts
    assert counts is not IndependentConfig().sample_counts


def test_a_python_that_hydra_cannot_run_on_is_refused_at_installation() -> None:
    """E01: every Hydra app crashes on Python 3.14, so pip must refuse that version."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert "<3.14" in project["requires-python"]
