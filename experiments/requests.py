"""What a request is, and which tokens it has.

A prompt is a list of segments, and a token is a function of (seed, segment id, offset in the
segment) alone. Prompts that share segments therefore share exactly those tokens, and none has to
be kept: a trace of 145 million tokens is expanded one request at a time.
"""

import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

# Odd 64-bit constants of the splitmix64 generator (Steele, Lea and Flood, 2014).
GOLDEN_GAMMA = np.uint64(0x9E3779B97F4A7C15)
MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
MIX_2 = np.uint64(0x94D049BB133111EB)


class Segment(NamedTuple):
    """A run of tokens that wherever it occurs, reads the same."""

    id: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Request:
    """One request of a workload. Without `segments`, its prompt is its own and shared by none."""

    request_id: int
    arrival_s: float
    """Seconds from the start of the workload."""
    num_prompt_tokens: int
    num_output_tokens: int
    """Of each sample, at least 1."""
    num_samples: int = 1
    """More than 1: parallel sampling, forked after the prefill."""
    extra_key: object = None
    """A tuple that keeps equal prompts of different tenants apart, or None."""
    segments: tuple[Segment, ...] = ()
    output_segment: int | None = None
    seed: int = 0

    def prompt_token_ids(self) -> np.ndarray:
        """The prompt, int32 [num_prompt_tokens], each >= 0: built anew and equal on each call."""
        segments = self.segments or (Segment(self.request_id, self.num_prompt_tokens),)
        return segment_token_ids(segments, self.seed)

    def output_token_ids(self, sample: int = 0) -> np.ndarray:
        """What sample number `sample` generates, int32 [num_output_tokens], each >= 0."""
        first = -1 - self.request_id if self.output_segment is None else self.output_segment
        segment = Segment(first - (sample << 40), self.num_output_tokens)
        return segment_token_ids((segment,), self.seed)


class Workload:
    """Requests in arrival order; may be iterated again, and yields equal requests each time."""

    def __init__(self, name: str, num_requests: int) -> None:
        self.name = name
        self.num_requests = num_requests

    def __len__(self) -> int:
        return self.num_requests

    def __iter__(self) -> Iterator[Request]:
        raise NotImplementedError


def segment_token_ids(segments: tuple[Segment, ...], seed: int) -> np.ndarray:
    """The tokens of `segments` one after the other, int32 [sum of num_tokens], 0 <= t < 2^31."""
    table = np.fromiter(itertools.chain.from_iterable(segments), dtype=np.int64).reshape(-1, 2)
    lengths = table[:, 1]
    ends = np.cumsum(lengths)
    counters = _counters(int(ends[-1]))  # [num_tokens]
    # Subtracting a segment's start makes the counter restart at each segment.
    keys = mix(table[:, 0].astype(np.uint64) ^ _mixed_seed(seed))
    keys -= (ends - lengths).astype(np.uint64) * GOLDEN_GAMMA
    mixed = np.repeat(keys, lengths)  # [num_tokens]
    mixed += counters
    mixed ^= mixed >> np.uint64(32)
    mixed *= MIX_1
    mixed >>= np.uint64(33)
    return mixed.astype(np.int32)


def mix(values: np.ndarray) -> np.ndarray:
    """The finaliser of splitmix64, a bijection of uint64."""
    values = (values ^ (values >> np.uint64(30))) * MIX_1
    values = (values ^ (values >> np.uint64(27))) * MIX_2
    return values ^ (values >> np.uint64(31))


@functools.lru_cache(maxsize=16)
def _mixed_seed(seed: int) -> np.uint64:
    return mix(np.array([seed], dtype=np.uint64))[0]


_counter_table = np.arange(1 << 17, dtype=np.uint64) * GOLDEN_GAMMA


def _counters(count: int) -> np.ndarray:
    """The first `count` multiples of the golden gamma, uint64, from a table that grows."""
    global _counter_table
    if count > len(_counter_table):
        _counter_table = np.arange(2 * count, dtype=np.uint64) * GOLDEN_GAMMA
    return _counter_table[:count]
