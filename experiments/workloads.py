"""Which requests arrive when: readers of recorded traces and seeded generators.

A prompt is a list of segments, and a token is a function of (seed, segment id, offset in the
segment) alone. Prompts that share segments therefore share exactly those tokens, and none has to
be kept: a trace of 145 million tokens is expanded one request at a time.
"""

import gzip
import heapq
import itertools
import json
import math
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from .config import (
    AzureConfig,
    ChatConfig,
    FewShotConfig,
    IndependentConfig,
    InputError,
    MooncakeConfig,
    TraceConfig,
    WorkloadConfig,
)

MOONCAKE_TOKENS_PER_ID = 512
# Odd 64-bit constants of the splitmix64 generator (Steele, Lea and Flood, 2014).
GOLDEN_GAMMA = np.uint64(0x9E3779B97F4A7C15)
MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
MIX_2 = np.uint64(0x94D049BB133111EB)
LENGTH_SIGMA = 0.6


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


def make_workload(config: WorkloadConfig, seed: int = 0) -> Workload:
    """The workload that `config` describes; equal seeds give equal requests.

    A trace is read through once, so that a malformed line ends the run before it starts.
    Raises InputError, a ValueError, naming file and line for such a line, or the missing file.
    """
    match config:
        case MooncakeConfig():
            return MooncakeTrace(config, seed)
        case AzureConfig():
            return AzureTrace(config, seed)
        case ChatConfig():
            return Chat(config, seed)
        case FewShotConfig():
            return FewShot(config, seed)
        case IndependentConfig():
            return Independent(config, seed)
    raise ValueError(f"no workload is made from {type(config).__name__}")


# Tokens


def segment_token_ids(segments: tuple[Segment, ...], seed: int) -> np.ndarray:
    """The tokens of `segments` one after the other, int32 [sum of num_tokens], 0 <= t < 2^31."""
    table = np.array(segments, dtype=np.int64).reshape(-1, 2)  # [num_segments, 2]
    lengths = table[:, 1]
    ends = np.cumsum(lengths)
    counters = _counters(int(ends[-1]))  # [num_tokens]
    # Subtracting a segment's start makes the counter restart at each segment.
    keys = _mix(table[:, 0].astype(np.uint64) ^ _mix(np.array([seed], dtype=np.uint64)))
    keys -= (ends - lengths).astype(np.uint64) * GOLDEN_GAMMA
    mixed = np.repeat(keys, lengths)  # [num_tokens]
    mixed += counters
    mixed ^= mixed >> np.uint64(32)
    mixed *= MIX_1
    mixed >>= np.uint64(33)
    return mixed.astype(np.int32)


def _mix(values: np.ndarray) -> np.ndarray:
    """The finaliser of splitmix64, a bijection of uint64."""
    values = (values ^ (values >> np.uint64(30))) * MIX_1
    values = (values ^ (values >> np.uint64(27))) * MIX_2
    return values ^ (values >> np.uint64(31))


_counter_table = np.arange(1 << 17, dtype=np.uint64) * GOLDEN_GAMMA


def _counters(count: int) -> np.ndarray:
    """The first `count` multiples of the golden gamma, uint64, from a table that grows."""
    global _counter_table
    if count > len(_counter_table):
        _counter_table = np.arange(2 * count, dtype=np.uint64) * GOLDEN_GAMMA
    return _counter_table[:count]


# Recorded traces


class _Trace(Workload):
    """Reads records line by line; `_records` yields (line number, seconds, request fields)."""

    def __init__(self, config: TraceConfig, seed: int) -> None:
        self.config = config
        self.seed = seed
        self.path = Path(config.path).expanduser()
        if not self.path.is_file():
            raise InputError(f"workload.path={config.path}: no such file, seen from {Path.cwd()}")
        super().__init__(config.name, sum(1 for _ in self))
        if not self.num_requests:
            raise InputError(f"{self.path}: no request in this trace")

    def _records(self) -> Iterator[tuple[int, float, dict[str, Any]]]:
        raise NotImplementedError

    def __iter__(self) -> Iterator[Request]:
        first = previous = None
        records = itertools.islice(self._records(), self.config.num_requests)
        for request_id, (line, seconds, request) in enumerate(records):
            first = seconds if first is None else first
            if previous is not None and seconds < previous:
                raise InputError(
                    f"{self.path}:{line}: timestamp goes back by {previous - seconds:g} s"
                )
            previous = seconds
            arrival_s = (seconds - first) / self.config.rate_scale
            yield Request(request_id, arrival_s, seed=self.seed, **request)


class MooncakeTrace(_Trace):
    """Mooncake JSONL; prompts share what their leading hash ids share."""

    def _records(self) -> Iterator[tuple[int, float, dict[str, Any]]]:
        for line, text in _numbered_lines(self.path):
            try:
                yield line, *_mooncake_record(text)
            except InputError as error:
                raise InputError(f"{self.path}:{line}: {error}") from None


def _mooncake_record(text: str) -> tuple[float, dict[str, Any]]:
    try:
        record = json.loads(text)
    except ValueError as error:
        raise InputError(f"not a JSON object ({error}): {text[:60]!r}") from None
    if not isinstance(record, dict):
        raise InputError(f"not a JSON object: {text[:60]!r}")
    for key in ("timestamp", "input_length", "output_length", "hash_ids"):
        if key not in record:
            raise InputError(f"no {key!r} in {text[:60]!r}")
    num_prompt_tokens = _length("input_length", record["input_length"])
    ids = record["hash_ids"]
    if not isinstance(ids, list) or any(type(i) is not int or not 0 <= i < 2**62 for i in ids):
        raise InputError(f"hash_ids must be a list of numbers >= 0, got {str(ids)[:60]}")
    num_ids = -(-num_prompt_tokens // MOONCAKE_TOKENS_PER_ID)
    if len(ids) != num_ids:
        raise InputError(
            f"input_length {num_prompt_tokens} needs {num_ids} hash_ids of "
            f"{MOONCAKE_TOKENS_PER_ID} tokens, got {len(ids)}"
        )
    segments = [Segment(i, MOONCAKE_TOKENS_PER_ID) for i in ids]
    last = num_prompt_tokens - (num_ids - 1) * MOONCAKE_TOKENS_PER_ID
    segments[-1] = Segment(ids[-1], last)
    timestamp = record["timestamp"]
    if type(timestamp) not in (int, float) or not math.isfinite(timestamp):
        raise InputError(f"timestamp must be a number of milliseconds, got {timestamp!r}")
    return timestamp / 1000, {
        "num_prompt_tokens": num_prompt_tokens,
        "num_output_tokens": _length("output_length", record["output_length"]),
        "segments": tuple(segments),
    }


class AzureTrace(_Trace):
    """Azure LLM inference CSV: lengths without content, so no prompt shares anything."""

    COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")

    def _records(self) -> Iterator[tuple[int, float, dict[str, Any]]]:
        lines = _numbered_lines(self.path)
        line, header = next(lines, (1, ""))
        if tuple(header.split(",")) != self.COLUMNS:
            raise InputError(
                f"{self.path}:{line}: expected the header {','.join(self.COLUMNS)}, "
                f"got {header[:60]!r}"
            )
        for line, text in lines:
            try:
                yield line, *_azure_record(text)
            except InputError as error:
                raise InputError(f"{self.path}:{line}: {error}") from None


def _azure_record(text: str) -> tuple[float, dict[str, Any]]:
    cells = text.split(",")
    if len(cells) != len(AzureTrace.COLUMNS):
        raise InputError(f"expected {len(AzureTrace.COLUMNS)} columns, got {text[:60]!r}")
    try:
        moment = datetime.fromisoformat(cells[0])
    except ValueError:
        raise InputError(f"TIMESTAMP is not a date and time: {cells[0]!r}") from None
    # Unlike timestamp(), a difference of naive datetimes knows no daylight saving time; a start
    # nearby keeps microseconds exact in a float.
    seconds = (moment.replace(tzinfo=None) - datetime(2020, 1, 1)).total_seconds()
    lengths = [int(cell) if cell.isdecimal() else cell for cell in cells[1:]]
    return seconds, {
        "num_prompt_tokens": _length("ContextTokens", lengths[0]),
        "num_output_tokens": _length("GeneratedTokens", lengths[1]),
    }


def _length(key: str, value: Any) -> int:
    if type(value) is not int or value < 1:
        raise InputError(f"{key} must be a number of tokens >= 1, got {value!r}")
    return value


def _numbered_lines(path: Path) -> Iterator[tuple[int, str]]:
    """The lines of a text file, plain or .gz, with their numbers from 1; blank ones left out."""
    line = 0
    opener = gzip.open if path.suffix == ".gz" else open
    try:
        with opener(path, "rt", encoding="utf-8") as file:
            for line, text in enumerate(file, start=1):
                if text := text.strip():
                    yield line, text
    except (EOFError, gzip.BadGzipFile, zlib.error, UnicodeDecodeError) as error:
        raise InputError(f"{path}:{line + 1}: cannot be read on: {error}") from error


# Seeded generators


class _Generated(Workload):
    """Holds what the generators share: the configuration, the seed and the length distribution."""

    def __init__(self, config: Any, seed: int) -> None:
        super().__init__(config.name, config.num_requests)
        self.config = config
        self.seed = seed


def _draw_length(rng: np.random.Generator, mean: float) -> int:
    """A number of tokens >= 1, log-normal with the given mean: many are short, a few are long."""
    return max(1, round(rng.lognormal(math.log(mean) - LENGTH_SIGMA**2 / 2, LENGTH_SIGMA)))


class Chat(_Generated):
    """Conversations that start as a Poisson process; each turn's prompt holds all before it.

    A turn follows the one before after an exponential pause, whether or not that one was answered:
    the workload doesn't depend on how fast it is served.
    """

    def __iter__(self) -> Iterator[Request]:
        rng = np.random.default_rng(self.seed)
        segment_ids = itertools.count(self.config.num_system_prompts)
        starts_per_s = self.config.request_rate_per_s / self.config.turns
        next_start = 0.0
        upcoming: list[tuple[float, int, Iterator[dict[str, Any]], dict[str, Any]]] = []
        for request_id in range(self.num_requests):
            while not upcoming or next_start <= upcoming[0][0]:
                turns = self._turns(next_start, segment_ids, rng.spawn(1)[0])
                turn = next(turns)
                heapq.heappush(upcoming, (turn["arrival_s"], next(segment_ids), turns, turn))
                next_start += rng.exponential(1 / starts_per_s)
            _, tie, turns, turn = heapq.heappop(upcoming)
            yield Request(request_id, seed=self.seed, **turn)
            if (turn := next(turns, None)) is not None:
                heapq.heappush(upcoming, (turn["arrival_s"], tie, turns, turn))

    def _turns(
        self, start_s: float, segment_ids: Iterator[int], rng: np.random.Generator
    ) -> Iterator[dict[str, Any]]:
        config = self.config
        system = int(rng.integers(config.num_system_prompts))
        said = [Segment(system, config.system_prompt_tokens)]
        tenant = int(rng.integers(config.num_tenants))
        arrival_s = start_s
        for _ in range(config.turns):
            said.append(Segment(next(segment_ids), _draw_length(rng, config.user_tokens_mean)))
            answer = Segment(next(segment_ids), _draw_length(rng, config.assistant_tokens_mean))
            yield {
                "arrival_s": arrival_s,
                "num_prompt_tokens": sum(segment.num_tokens for segment in said),
                "num_output_tokens": answer.num_tokens,
                "extra_key": ("tenant", str(tenant)) if config.num_tenants > 1 else None,
                "segments": tuple(said),
                "output_segment": answer.id,
            }
            said.append(answer)
            arrival_s += rng.exponential(config.think_time_mean_s)


class FewShot(_Generated):
    """Prompts of shared examples and a question of their own, as a Poisson process."""

    def __iter__(self) -> Iterator[Request]:
        config = self.config
        rng = np.random.default_rng(self.seed)
        arrival_s = 0.0
        for request_id in range(self.num_requests):
            template = int(rng.integers(config.num_templates))
            segments = (
                Segment(template, config.num_shots * config.tokens_per_shot),
                Segment(
                    config.num_templates + request_id,
                    _draw_length(rng, config.question_tokens_mean),
                ),
            )
            yield Request(
                request_id,
                arrival_s,
                num_prompt_tokens=sum(segment.num_tokens for segment in segments),
                num_output_tokens=_draw_length(rng, config.output_tokens_mean),
                segments=segments,
                seed=self.seed,
            )
            arrival_s += rng.exponential(1 / config.request_rate_per_s)


class Independent(_Generated):
    """Prompts that share nothing, as a Poisson process; several samples of one share its prompt."""

    def __iter__(self) -> Iterator[Request]:
        config = self.config
        rng = np.random.default_rng(self.seed)
        arrival_s = 0.0
        for request_id in range(self.num_requests):
            yield Request(
                request_id,
                arrival_s,
                num_prompt_tokens=_draw_length(rng, config.prompt_tokens_mean),
                num_output_tokens=_draw_length(rng, config.output_tokens_mean),
                num_samples=int(rng.choice(config.sample_counts)),
                seed=self.seed,
            )
            arrival_s += rng.exponential(1 / config.request_rate_per_s)
