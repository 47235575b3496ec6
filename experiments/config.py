"""What may be configured: one dataclass a config group, its types, ranges and cross-checks.

Hydra composes YAML from `configs/` on these dataclasses, so a mistyped key or a value of the wrong
type is refused while composing, with the key's name; keys that `+key=value` adds are refused by
`to_object`. Ranges are declared beside the fields and checked by `to_serve_config`. Numbers that
describe a model or a GPU live in YAML only.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass, field, fields, is_dataclass
from enum import StrEnum
from typing import Any

from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import MISSING, DictConfig, OmegaConf

from cache.evictor import POLICIES

from .gpu import GpuConfig
from .ranges import AUTO, COUNT, POSITIVE, ConfigError, Range, check_ranges, ranged

UNBOUNDED = "unbounded"


class Preemption(StrEnum):
    """How a running sequence gives up its blocks."""

    recompute = "recompute"
    swap = "swap"


EvictorName = StrEnum("EvictorName", {name: name for name in sorted(POLICIES)})
"""Which cached block goes first when the pool is full: the names of the policies in `cache`."""


class CacheModel(StrEnum):
    """What `replay` takes a cache to be; see `experiments.cache_models`."""

    flat = "flat"
    blocks = "blocks"


class HashAlgorithm(StrEnum):
    """What chains the content hash: mix64 is fast, sha256 is equal in every process."""

    mix64 = "mix64"
    sha256 = "sha256"


@dataclass
class CacheConfig:
    """The block manager: pools of `block_size`-token blocks, and what is cached in them."""

    block_size: int = ranged(COUNT, 16)
    watermark: float = ranged(Range(0, 1, high_open=True), 0.01)
    num_gpu_blocks: int | str = ranged(Range(1, words=(AUTO,)), AUTO)
    num_cpu_blocks: int | str = ranged(Range(0, words=(AUTO,)), AUTO)
    enable_caching: bool = True
    sliding_window: int | None = ranged(COUNT, None)  # tokens
    hash_algorithm: HashAlgorithm = HashAlgorithm.mix64


@dataclass
class EvictorConfig:
    """The eviction policy."""

    name: EvictorName = EvictorName.lru


@dataclass
class SchedulerConfig:
    """Continuous batching: the limits of one step and what happens when blocks run out."""

    max_num_seqs: int = ranged(COUNT, 256)
    max_num_batched_tokens: int = ranged(COUNT, 8192)
    preemption: Preemption = Preemption.recompute
    chunked_prefill: bool = True
    ignore_arrivals: bool = False  # every request is waiting from the start


@dataclass
class ModelConfig:
    """A decoder-only transformer with gated MLPs and untied embeddings; figures from its card."""

    name: str = MISSING
    num_layers: int = ranged(COUNT)
    hidden_size: int = ranged(COUNT)
    intermediate_size: int = ranged(COUNT)
    num_heads: int = ranged(COUNT)
    num_kv_heads: int = ranged(COUNT)
    head_size: int = ranged(COUNT)
    vocab_size: int = ranged(COUNT)
    qk_norm: bool = False
    bytes_per_weight: float = ranged(POSITIVE, 2.0)
    bytes_per_kv_element: float = ranged(POSITIVE, 2.0)


@dataclass
class WorkloadConfig:
    """What every workload has; `name` labels it in results."""

    name: str = MISSING


@dataclass
class TraceConfig(WorkloadConfig):
    """A recorded trace, plain or .gz. Relative paths start where the app was launched."""

    path: str = MISSING
    num_requests: int | None = ranged(COUNT, None)  # None: the whole trace
    rate_scale: float = ranged(POSITIVE, 1.0)  # 2.0: arrivals come twice as fast


@dataclass
class MooncakeConfig(TraceConfig):
    """Mooncake JSONL: timestamp (ms), input_length, output_length, hash_ids (512 tokens each)."""


@dataclass
class AzureConfig(TraceConfig):
    """Azure LLM inference CSV: TIMESTAMP, ContextTokens, GeneratedTokens; nothing is shared."""


@dataclass
class GeneratedConfig(WorkloadConfig):
    """A seeded generator: Poisson arrivals; lengths vary around the means (log-normal)."""

    num_requests: int = ranged(COUNT)
    request_rate_per_s: float = ranged(POSITIVE)


@dataclass
class ChatConfig(GeneratedConfig):
    """Conversations: a shared system prompt, then turns that repeat all that was said before."""

    num_system_prompts: int = ranged(COUNT)
    system_prompt_tokens: int = ranged(COUNT)
    turns: int = ranged(COUNT)
    user_tokens_mean: float = ranged(COUNT)
    assistant_tokens_mean: float = ranged(COUNT)
    think_time_mean_s: float = ranged(Range(0))
    num_tenants: int = ranged(COUNT, 1)  # > 1: each conversation's blocks carry its tenant's salt


@dataclass
class FewShotConfig(GeneratedConfig):
    """Prompts that start with one of `num_templates` sets of examples and end in a new question."""

    num_templates: int = ranged(COUNT)
    num_shots: int = ranged(COUNT)
    tokens_per_shot: int = ranged(COUNT)
    question_tokens_mean: float = ranged(COUNT)
    output_tokens_mean: float = ranged(COUNT)


@dataclass
class IndependentConfig(GeneratedConfig):
    """Prompts that share nothing; each draws its number of samples from `sample_counts`."""

    prompt_tokens_mean: float = ranged(COUNT)
    output_tokens_mean: float = ranged(COUNT)
    sample_counts: list[int] = field(default_factory=lambda: [1], metadata={"range": COUNT})


@dataclass
class ServeConfig:
    """Everything that determines one simulated serving run, and how a sweep of them behaves."""

    cache: CacheConfig = field(default_factory=CacheConfig)
    evictor: EvictorConfig = field(default_factory=EvictorConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    workload: WorkloadConfig = field(default_factory=WorkloadConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    gpu: GpuConfig = field(default_factory=GpuConfig)
    seed: int = ranged(Range(0, 2**63 - 1), 0)
    fail_fast: bool = False  # after a failed point, leave the rest of the sweep unrun


@dataclass
class ReplayCacheConfig:
    """The cache that a trace is replayed through."""

    model: CacheModel = CacheModel.blocks
    block_size: int = ranged(COUNT, 512)
    num_gpu_blocks: int | str = ranged(Range(1, words=(AUTO, UNBOUNDED)), AUTO)
    reuse_uncached_first: bool = False
    overlap: bool = False
    from_tokens: bool = False


@dataclass
class ReplayConfig:
    """Everything that determines the replay of a trace through a cache."""

    cache: ReplayCacheConfig = field(default_factory=ReplayCacheConfig)
    evictor: EvictorConfig = field(default_factory=EvictorConfig)
    workload: WorkloadConfig = field(default_factory=WorkloadConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    gpu: GpuConfig = field(default_factory=GpuConfig)
    seed: int = ranged(Range(0, 2**63 - 1), 0)
    fail_fast: bool = False  # after a failed point, leave the rest of the sweep unrun


def register() -> None:
    """Make the dataclasses known to Hydra, under the names that `configs/` refers to."""
    store = ConfigStore.instance()
    store.store(name="serve_schema", node=ServeConfig)
    store.store(name="replay_schema", node=ReplayConfig)
    for group, name, node in (
        ("model", "model", ModelConfig),
        ("gpu", "gpu", GpuConfig),
        ("workload", "mooncake", MooncakeConfig),
        ("workload", "azure", AzureConfig),
        ("workload", "chat", ChatConfig),
        ("workload", "few_shot", FewShotConfig),
        ("workload", "independent", IndependentConfig),
    ):
        store.store(group=f"schema/{group}", name=name, node=node)


def to_serve_config(composed: DictConfig) -> ServeConfig:
    """Turn what Hydra composed into dataclasses, with every range and cross-check applied.

    Raises ConfigError naming key, value and what was expected; omegaconf's
    MissingMandatoryValue, naming the key, where a value was never given.
    """
    config = to_object(composed)
    validate(config)
    return config


def to_replay_config(composed: DictConfig) -> ReplayConfig:
    """As `to_serve_config`, for `replay`."""
    config = to_object(composed)
    check_ranges(config)
    check_heads(config.model)
    if config.cache.overlap and config.cache.model is CacheModel.flat:
        raise ConfigError("cache.overlap=true: expected cache.model=blocks, which holds blocks")
    return config


def to_object(composed: DictConfig) -> Any:
    """The dataclasses of what Hydra composed.

    Raises ConfigError, naming an unknown key, which `+key=value` adds, or a key without value.
    """
    _refuse_unknown_keys("", composed)
    missing = sorted(OmegaConf.missing_keys(composed))
    if missing:
        raise ConfigError(f"{missing[0]} is not set: give it as {missing[0]}=VALUE")
    return OmegaConf.to_object(composed)


def _refuse_unknown_keys(prefix: str, node: DictConfig) -> None:
    """Refuse a key under `node` that its dataclass has no field for. Raises ConfigError."""
    cls = OmegaConf.get_type(node)
    known = {spec.name for spec in fields(cls)} if is_dataclass(cls) else {*node}
    for key in node:
        if key not in known:
            raise ConfigError(
                f"{prefix}{key}: no such key; expected one of {', '.join(sorted(known))}"
            )
        if not OmegaConf.is_missing(node, key) and isinstance(node[key], DictConfig):
            _refuse_unknown_keys(f"{prefix}{key}.", node[key])


def check_heads(model: ModelConfig) -> None:
    """Check that KV heads divide the heads. Raises ConfigError."""
    if model.num_heads % model.num_kv_heads:
        raise ConfigError(
            f"model.num_heads={model.num_heads}: expected a multiple of "
            f"model.num_kv_heads={model.num_kv_heads}"
        )


def validate(config: ServeConfig) -> None:
    """Check every declared range, and the rules that join two keys. Raises ConfigError."""
    check_ranges(config)
    check_heads(config.model)
    cache, scheduler = config.cache, config.scheduler
    if cache.sliding_window is not None and cache.enable_caching:
        raise ConfigError(
            f"cache.sliding_window={cache.sliding_window}: expected cache.enable_caching=false, "
            "because blocks outside the window cannot be shared"
        )
    if scheduler.preemption is Preemption.swap and cache.num_cpu_blocks == 0:
        raise ConfigError("cache.num_cpu_blocks=0: expected at least 1 with preemption by swap")
    if scheduler.max_num_batched_tokens < scheduler.max_num_seqs:
        raise ConfigError(
            f"scheduler.max_num_batched_tokens={scheduler.max_num_batched_tokens}: expected at "
            f"least scheduler.max_num_seqs={scheduler.max_num_seqs}, one token a sequence"
        )
    if isinstance(config.workload, IndependentConfig) and not config.workload.sample_counts:
        raise ConfigError("workload.sample_counts=[]: expected at least one number")


def refuse_padded_numbers(overrides: Iterable[str]) -> None:
    """Refuse a number with leading zeros, such as 016, which is 16 to one reader and 14 to another.

    `overrides` are a job's command-line overrides, `key=value`. Raises ConfigError.
    """
    for override in OverridesParser.create().parse_overrides(list(overrides)):
        value = override.value()
        if isinstance(value, str) and re.fullmatch(r"[+-]?0\d+", value):
            raise ConfigError(
                f"{override.key_or_group}={value}: expected a number without leading zeros"
            )
