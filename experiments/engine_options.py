"""How an engine schedules and stores, and what it counts."""

from dataclasses import dataclass

from .attention import OPS
from .config import Preemption
from .ranges import InputError


@dataclass(frozen=True)
class EngineOptions:
    """How an engine schedules and stores; the cache's sizes are the block manager's.

    Raises InputError for a value out of range.
    """

    block_size: int = 16
    num_gpu_blocks: int = 256
    num_cpu_blocks: int = 0
    watermark: float = 0.0
    enable_caching: bool = True
    evictor: str = "lru"
    hash_algorithm: str = "mix64"
    kernels: str = "torch"
    """The backend of every kernel: torch or triton."""
    preemption: Preemption = Preemption.recompute
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8192
    """Tokens that a step may compute before it admits no more; prompts are cut to what is left."""
    num_lookahead_slots: int = 0
    """Slots kept for speculated tokens, of which this engine has none."""
    fixed_shapes: bool = False
    """Compute every sequence in a pass of its own, prompts a block at a time and what was generated
    a token at a time. Products of matrices of one shape round in one way, so the KV of a prompt is
    equal to the last bit whatever other prompts left in the cache and whoever else runs. Slow."""

    def __post_init__(self) -> None:
        if self.kernels not in OPS:
            raise InputError(f"kernels={self.kernels!r}: expected one of {', '.join(OPS)}")
        for name in ("max_num_seqs", "max_num_batched_tokens"):
            if getattr(self, name) < 1:
                raise InputError(f"{name}={getattr(self, name)}: expected at least 1")
        if self.fixed_shapes and self.max_num_batched_tokens < self.block_size:
            raise InputError(
                f"max_num_batched_tokens={self.max_num_batched_tokens}: expected at least "
                f"block_size={self.block_size} with fixed_shapes"
            )
        if self.num_lookahead_slots < 0:
            raise InputError(f"num_lookahead_slots={self.num_lookahead_slots}: expected at least 0")


@dataclass
class EngineStats:
    """Counts since the engine was made. Tokens are positions whose KV was computed."""

    num_steps: int = 0
    prompt_tokens_computed: int = 0
    """Also those of prompts that were computed again after a preemption."""
    prompt_tokens_skipped: int = 0
    """Found in the cache, at every admission."""
    generated_tokens_computed: int = 0
    output_tokens: int = 0
    copied_blocks: int = 0
    swapped_out_blocks: int = 0
    swapped_in_blocks: int = 0
    preemptions_recompute: int = 0
    preemptions_swap: int = 0
    peak_blocks_in_use: int = 0
    unshared_blocks_at_peak: int = 0
    """What the sequences at that moment would hold if none shared a block."""
