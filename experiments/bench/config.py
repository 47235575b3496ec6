"""What may be configured for `bench`: a dataclass an operation, its sizes and their ranges.

Sizes that a name stands for are in `shapes`. Nothing here needs Hydra.
"""

from dataclasses import dataclass, field, fields, is_dataclass
from enum import StrEnum

from ..gpu import GpuConfig
from ..ranges import COUNT, MISSING, POSITIVE, ConfigError, Range, check_ranges, ranged

HEAD_SIZE = Range(1, 576)
BLOCK_SIZE = Range(1, 4096)  # tokens
"""What the kernels can do."""


class Dtype(StrEnum):
    """Of queries, keys and values."""

    bf16 = "bf16"
    fp16 = "fp16"
    fp32 = "fp32"


class CacheDtype(StrEnum):
    """Of the KV cache; auto: that of the queries."""

    auto = "auto"
    fp8e4m3 = "fp8e4m3"
    fp8e5m2 = "fp8e5m2"


class DeviceName(StrEnum):
    """Where a point is measured.

    auto: on the GPU if there is one, else offline. rehearsal: all that happens on a GPU, but in
    Triton's interpreter and at sizes that it can bear; its times mean nothing. offline: compiled,
    metered and predicted for `gpu`; nothing is timed.
    """

    auto = "auto"
    cuda = "cuda"
    rehearsal = "rehearsal"
    offline = "offline"


@dataclass
class OperationConfig:
    """What every operation has; `name` labels it in results."""

    name: str = MISSING


@dataclass
class HeadsConfig(OperationConfig):
    """The shape of one layer's KV blocks."""

    num_kv_heads: int = ranged(COUNT, 8)
    head_size: int = ranged(HEAD_SIZE, 128)
    block_size: int = ranged(BLOCK_SIZE, 16)
    dtype: Dtype = Dtype.bf16


@dataclass
class TileConfig:
    """A tile of paged attention to take in place of the one in `kernels/launch.py`.

    m rows of query tokens x heads, n keys. All four, or none.
    """

    m: int | None = ranged(Range(8, 256), None)
    n: int | None = ranged(Range(16, 256), None)
    num_warps: int | None = ranged(Range(1, 32), None)
    num_stages: int | None = ranged(Range(1, 8), None)


@dataclass
class AttentionConfig(HeadsConfig):
    """Attention of each sequence's newest tokens, over a paged cache with scattered blocks."""

    batch_size: int = ranged(COUNT, 64)  # sequences
    num_heads: int = ranged(COUNT, 32)
    cache_dtype: CacheDtype = CacheDtype.auto
    sliding_window: int | None = ranged(COUNT, None)  # tokens
    num_splits: int | None = ranged(Range(1, 1024), None)  # of the keys; None: as launched
    tile: TileConfig = field(default_factory=TileConfig)


@dataclass
class DecodeConfig(AttentionConfig):
    """One new token a sequence; `context_len` tokens are attended, the new one included."""

    context_len: int = ranged(COUNT, 4096)


@dataclass
class PrefillConfig(AttentionConfig):
    """A prompt a sequence, whose first `cached_len` tokens have their KV already."""

    batch_size: int = ranged(COUNT, 2)
    prompt_len: int = ranged(COUNT, 8192)
    cached_len: int = ranged(Range(0), 0)


@dataclass
class MergeConfig(OperationConfig):
    """Merging partial attention results."""

    num_states: int = ranged(COUNT, 8)
    num_tokens: int = ranged(COUNT, 2048)
    num_heads: int = ranged(COUNT, 32)
    head_size: int = ranged(HEAD_SIZE, 128)
    dtype: Dtype = Dtype.bf16


@dataclass
class WriteConfig(HeadsConfig):
    """Writing new keys and values to scattered slots."""

    num_tokens: int = ranged(COUNT, 32768)
    cache_dtype: CacheDtype = CacheDtype.auto


@dataclass
class CopyConfig(HeadsConfig):
    """Block copy-on-write in all layers: `fanout` copies of each of `num_sources` blocks."""

    num_layers: int = ranged(COUNT, 32)
    num_sources: int = ranged(COUNT, 64)
    fanout: int = ranged(COUNT, 4)


@dataclass
class GatherConfig(HeadsConfig):
    """Gathering scattered blocks of all layers into contiguous memory."""

    num_layers: int = ranged(COUNT, 32)
    num_blocks: int = ranged(COUNT, 256)


class Direction(StrEnum):
    """Of a swap."""

    to_host = "to_host"
    from_host = "from_host"


@dataclass
class SwapConfig(HeadsConfig):
    """Swapping scattered blocks of all layers to or from pinned host memory."""

    num_layers: int = ranged(COUNT, 32)
    num_blocks: int = ranged(COUNT, 64)
    direction: Direction = Direction.to_host


@dataclass
class HashConfig(OperationConfig):
    """Hashing every full block of a batch of prompts."""

    num_prompts: int = ranged(COUNT, 256)
    prompt_len: int = ranged(COUNT, 4096)
    block_size: int = ranged(BLOCK_SIZE, 16)


@dataclass
class MatchConfig(HashConfig):
    """Looking up the cached prefix of a batch of prompts: hash, probe, compare, cut.

    Each prompt's first `cached_len` tokens are cached, in blocks of its own.
    """

    cached_len: int = ranged(Range(0), 3072)


@dataclass
class MatchGatherConfig(HeadsConfig):
    """Looking up cached prefixes and gathering their KV, without asking the host between."""

    num_prompts: int = ranged(COUNT, 16)
    prompt_len: int = ranged(COUNT, 1024)
    cached_len: int = ranged(Range(0), 768)
    num_layers: int = ranged(COUNT, 4)


@dataclass
class TimingConfig:
    """How long and how often a call is timed."""

    warmup_s: float = ranged(Range(0), 0.1)  # at least one call
    budget_s: float = ranged(POSITIVE, 0.25)  # of device time, for all samples together
    min_samples: int = ranged(Range(3), 20)
    max_samples: int = ranged(Range(3), 500)
    cold_l2: bool = True  # the L2 cache is filled with other data before each sample


@dataclass
class PointConfig:
    """Everything that determines one measured point."""

    operation: OperationConfig = field(default_factory=OperationConfig)
    implementation: str = "prefixlab"  # a file of `experiments/bench/implementations`
    device: DeviceName = DeviceName.auto
    timing: TimingConfig = field(default_factory=TimingConfig)
    seed: int = ranged(Range(0, 2**63 - 1), 0)


@dataclass
class BenchConfig(PointConfig):
    """A point, the GPU whose data sheet it is predicted from, and how a sweep of points behaves."""

    gpu: GpuConfig = field(default_factory=GpuConfig)
    fail_fast: bool = False  # after a failed point, leave the rest of the sweep unrun


def describe(shape: OperationConfig) -> str:
    """Every size of a shape in a few words, its name left out, and what is null."""
    parts = []
    for spec in fields(shape):
        value = getattr(shape, spec.name)
        if is_dataclass(value):
            value = describe(value).replace(" ", ",")
        if spec.name != "name" and value not in (None, ""):
            parts.append(f"{spec.name}={value}")
    return " ".join(parts)


def check(config: PointConfig) -> None:
    """Check every range, and the rules that join two keys.

    Raises ConfigError, naming key, value and what was expected.
    """
    check_ranges(config)
    timing, operation = config.timing, config.operation
    if timing.max_samples < timing.min_samples:
        raise ConfigError(
            f"timing.max_samples={timing.max_samples}: expected at least "
            f"timing.min_samples={timing.min_samples}"
        )
    if isinstance(operation, AttentionConfig):
        _check_attention(operation)
    cached_len = getattr(operation, "cached_len", 0)
    prompt_len = getattr(operation, "prompt_len", cached_len + 1)
    if cached_len >= prompt_len:
        raise ConfigError(
            f"operation.cached_len={cached_len}: expected less than "
            f"operation.prompt_len={prompt_len}, as one token is always computed"
        )


def _check_attention(operation: AttentionConfig) -> None:
    if operation.num_heads % operation.num_kv_heads:
        raise ConfigError(
            f"operation.num_heads={operation.num_heads}: expected a multiple of "
            f"operation.num_kv_heads={operation.num_kv_heads}"
        )
    tile = operation.tile
    sizes = {"m": tile.m, "n": tile.n, "num_warps": tile.num_warps, "num_stages": tile.num_stages}
    given = [value for value in sizes.values() if value is not None]
    if given and len(given) < len(sizes):
        absent = next(key for key, value in sizes.items() if value is None)
        raise ConfigError(f"operation.tile.{absent}=null: expected a number beside the others")
    for key in ("m", "n", "num_warps"):
        value = sizes[key]
        if value is not None and value & (value - 1):
            raise ConfigError(f"operation.tile.{key}={value}: expected a power of two")
