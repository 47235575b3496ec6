"""What may be configured for `generate`: dataclasses, ranges and cross-checks, as in `config`."""

from dataclasses import dataclass, field
from enum import StrEnum

from hydra.core.config_store import ConfigStore
from omegaconf import MISSING, DictConfig

from .config import CacheConfig, EvictorConfig, Preemption, to_object
from .ranges import COUNT, ConfigError, Range, check_ranges, ranged


class Kernels(StrEnum):
    """The backend of every kernel."""

    torch = "torch"
    triton = "triton"


class Dtype(StrEnum):
    """Of weights and KV."""

    float32 = "float32"
    float16 = "float16"
    bfloat16 = "bfloat16"


class DeviceName(StrEnum):
    """Where the model runs; auto: on the GPU if there is one."""

    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"


@dataclass
class LanguageModelConfig:
    """A model of `experiments.models`."""

    name: str = "smollm2"
    dtype: Dtype = Dtype.float32
    device: DeviceName = DeviceName.auto


@dataclass
class EngineConfig:
    """Continuous batching of the real model."""

    max_num_seqs: int = ranged(COUNT, 64)
    max_num_batched_tokens: int = ranged(COUNT, 2048)
    preemption: Preemption = Preemption.recompute
    num_lookahead_slots: int = ranged(Range(0), 0)
    fixed_shapes: bool = False


@dataclass
class SamplingConfig:
    """How the tokens of every request are chosen."""

    max_tokens: int = ranged(COUNT, 16)
    n: int = ranged(COUNT, 1)
    temperature: float = ranged(Range(0), 0.0)
    top_k: int | None = ranged(COUNT, None)
    beam_width: int | None = ranged(COUNT, None)
    length_penalty: float = 1.0
    ignore_stop_tokens: bool = False


@dataclass
class PromptsConfig:
    """What every set of prompts has; `name` labels it in results."""

    name: str = MISSING


@dataclass
class TextsConfig(PromptsConfig):
    """These texts, all at once. Models without a tokenizer get random tokens in their place."""

    texts: list[str] = field(default_factory=list)


@dataclass
class SharedDocumentConfig(PromptsConfig):
    """Questions about the start of one document, one after another, with other texts between.

    Of the document, prompts have its first `document_tokens`; what stands between the questions
    is taken from its end. A relative path starts at the root of the repository.
    """

    path: str = "LICENSE"
    document_tokens: int = ranged(COUNT, 1000)
    tokens_between: int = ranged(Range(0), 0)
    questions: list[str] = field(default_factory=list)


@dataclass
class RandomPromptsConfig(PromptsConfig):
    """Random tokens, all at once; lengths are uniform, and the first tokens are shared."""

    num_requests: int = ranged(COUNT)
    min_tokens: int = ranged(COUNT)
    max_tokens: int = ranged(COUNT)
    shared_tokens: int = ranged(Range(0), 0)


@dataclass
class GenerateConfig:
    """Everything that determines what `generate` measures."""

    model: LanguageModelConfig = field(default_factory=LanguageModelConfig)
    kernels: Kernels = Kernels.torch
    cache: CacheConfig = field(default_factory=CacheConfig)
    evictor: EvictorConfig = field(default_factory=EvictorConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    prompts: PromptsConfig = field(default_factory=PromptsConfig)
    verify: bool = True  # compare greedy and beam texts with transformers' own generate
    seed: int = ranged(Range(0, 2**63 - 1), 0)
    fail_fast: bool = False  # after a failed point, leave the rest of the sweep unrun


def register() -> None:
    """Make the dataclasses known to Hydra, under the names that `configs/` refers to."""
    store = ConfigStore.instance()
    store.store(name="generate_schema", node=GenerateConfig)
    for name, node in (
        ("texts", TextsConfig),
        ("shared_document", SharedDocumentConfig),
        ("random", RandomPromptsConfig),
    ):
        store.store(group="schema/prompts", name=name, node=node)


def to_generate_config(composed: DictConfig) -> GenerateConfig:
    """Turn what Hydra composed into dataclasses, with every range and cross-check applied.

    Raises ConfigError, naming key, value and what was expected.
    """
    config: GenerateConfig = to_object(composed)
    check_ranges(config)
    cache, sampling, prompts = config.cache, config.sampling, config.prompts
    if cache.sliding_window is not None:
        raise ConfigError(
            f"cache.sliding_window={cache.sliding_window}: expected null, because the layers' own "
            "windows are used"
        )
    if config.evictor.name == "belady":
        raise ConfigError("evictor.name=belady: expected another one, as it must know the future")
    if config.engine.preemption is Preemption.swap and cache.num_cpu_blocks == 0:
        raise ConfigError("cache.num_cpu_blocks=0: expected at least 1 with preemption by swap")
    if sampling.beam_width is not None and (sampling.n > 1 or sampling.temperature > 0):
        raise ConfigError(
            f"sampling.beam_width={sampling.beam_width}: expected sampling.n=1 and "
            "sampling.temperature=0"
        )
    if isinstance(prompts, RandomPromptsConfig) and prompts.min_tokens > prompts.max_tokens:
        raise ConfigError(
            f"prompts.min_tokens={prompts.min_tokens}: expected at most "
            f"prompts.max_tokens={prompts.max_tokens}"
        )
    for key in ("texts", "questions"):
        if getattr(prompts, key, None) == []:
            raise ConfigError(f"prompts.{key}=[]: expected at least one")
    return config
