"""What `serve` measures: each number is defined where it is computed, its unit part of its name."""

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from cache.block_manager import BlockSpaceManager

MAX_SERIES_POINTS = 500


class SimulationResult(NamedTuple):
    """What a run measured."""

    metrics: dict[str, float | int]
    """By name, the unit part of it; NaN where nothing was there to measure."""
    occupancy: dict[str, np.ndarray]
    """Series of one length: time_s float64, and in_use_blocks, cached_blocks and free_blocks int64:
    referenced by a sequence; evictable; neither."""


@dataclass(slots=True)
class RequestRecord:
    """What is known of one request."""

    arrival_s: float
    num_unfinished: int
    """Samples that have not ended."""
    first_token_s: float | None = None


@dataclass(slots=True)
class _Series:
    """A series that keeps at most MAX_SERIES_POINTS points, evenly spread over the steps."""

    points: list[tuple[float, int, int, int]] = field(default_factory=list)
    stride: int = 1
    num_seen: int = 0

    def add(self, point: tuple[float, int, int, int]) -> None:
        if self.num_seen % self.stride == 0:
            self.points.append(point)
            if len(self.points) > MAX_SERIES_POINTS:
                self.points = self.points[::2]
                self.stride *= 2
        self.num_seen += 1


class MetricsRecorder:
    """Collects what happens in a simulation and turns it into a `SimulationResult`."""

    def __init__(self, manager: BlockSpaceManager, num_gpus: int) -> None:
        self._manager = manager
        self._num_gpus = num_gpus
        self.num_ended = 0
        """Requests that finished or were refused."""
        self.num_output_tokens = 0
        self.recompute_preemptions = 0
        self._swap_preemptions = 0
        self._num_refused = 0
        self._num_finished = 0
        self._num_prompt_tokens = 0
        self._num_cached_tokens = 0
        self._num_prompt_blocks = 0
        self._num_cached_blocks = 0
        self._num_recomputed_tokens = 0
        self._num_blocks_out = 0
        self._num_blocks_in = 0
        self._ttft_s: list[float] = []
        self._tpot_s: list[float] = []
        self._latency_s: list[float] = []
        self._busy_s = 0.0
        self._in_use_integral = 0.0
        self._waste_integral = 0.0
        self._peak_in_use = 0
        self._series = _Series()

    # -- events

    def refused(self) -> None:
        """A request was turned away: alone in the pool, it could not be served to its end."""
        self._num_refused += 1
        self.num_ended += 1

    def admitted(self, num_tokens: int, num_cached: int) -> None:
        """A request got its blocks for the first time; `num_cached` tokens need no computing."""
        block_size = self._manager.block_size
        self._num_prompt_tokens += num_tokens
        self._num_cached_tokens += num_cached
        self._num_prompt_blocks += -(-num_tokens // block_size)
        self._num_cached_blocks += num_cached // block_size

    def resumed(self, num_computed_before: int, num_cached: int) -> None:
        """A request is recomputed: all that it had computed and does not find in the cache."""
        self._num_recomputed_tokens += max(0, num_computed_before - num_cached)

    def swapped_out(self, num_blocks: int) -> None:
        """A request gave up its GPU blocks to the CPU."""
        self._swap_preemptions += 1
        self._num_blocks_out += num_blocks

    def swapped_in(self, num_blocks: int) -> None:
        """A request came back."""
        self._num_blocks_in += num_blocks

    def sample_finished(self, record: RequestRecord, now: float, num_tokens: int) -> None:
        """A sample has all its tokens."""
        if num_tokens > 1:
            self._tpot_s.append((now - record.first_token_s) / (num_tokens - 1))
        record.num_unfinished -= 1
        if not record.num_unfinished:
            self._ttft_s.append(record.first_token_s - record.arrival_s)
            self._latency_s.append(now - record.arrival_s)
            self._num_finished += 1
            self.num_ended += 1

    def step(self, now: float, seconds: float, rows: np.ndarray) -> None:
        """A step took `seconds` from `now` on, with these rows holding blocks."""
        occupancy = self._manager.get_gpu_occupancy()
        in_use = occupancy.num_in_use
        self._busy_s += seconds
        self._in_use_integral += in_use * seconds
        self._peak_in_use = max(self._peak_in_use, in_use)
        if in_use:
            wasted = self._manager.tables.num_empty_slots(rows)
            self._waste_integral += wasted / (in_use * self._manager.block_size) * seconds
        self._series.add((now, in_use, occupancy.num_evictable, occupancy.num_free))

    # -- results

    def result(self, simulated_s: float, wall_s: float) -> SimulationResult:
        """Everything, for a simulation that ran from 0 to `simulated_s`."""
        stats = self._manager.get_stats()
        total_blocks = self._manager.get_num_total_gpu_blocks()
        metrics: dict[str, float | int] = {
            # Tokens sampled, of all samples, over the whole simulated time.
            "output_tokens_per_s": _ratio(self.num_output_tokens, simulated_s),
            # The same plus prompt tokens of admitted requests, computed or cached.
            "total_tokens_per_s": _ratio(
                self.num_output_tokens + self._num_prompt_tokens, simulated_s
            ),
            # From arrival to the first token, over finished requests.
            **_percentiles("ttft", self._ttft_s, (50, 90, 99)),
            # Time after the first token, a token, over finished samples of 2 tokens and more.
            **_percentiles("tpot", self._tpot_s, (50, 90, 99)),
            # From arrival to the last token of the last sample, over finished requests.
            **_percentiles("e2e_latency", self._latency_s, (50, 99)),
            # Prompt tokens that were not computed because their blocks were cached and computed,
            # over all prompt tokens, at first admission. The block rate counts partial blocks too.
            "token_hit_rate": _ratio(self._num_cached_tokens, self._num_prompt_tokens),
            "block_hit_rate": _ratio(self._num_cached_blocks, self._num_prompt_blocks),
            "requests_finished": self._num_finished,
            "requests_refused": self._num_refused,
            "preemptions_recompute": self.recompute_preemptions,
            "preemptions_swap": self._swap_preemptions,
            # Tokens whose KV was lost to a preemption and not found in the cache afterwards.
            "recomputed_tokens": self._num_recomputed_tokens,
            # Blocks copied between GPU and CPU.
            "swapped_out_blocks": self._num_blocks_out,
            "swapped_in_blocks": self._num_blocks_in,
            "copied_blocks": stats.copies,
            "evicted_blocks": stats.evictions,
            # In use: referenced by a sequence. The mean is over busy time.
            "mean_pool_use": _ratio(self._in_use_integral, self._busy_s * total_blocks),
            "peak_pool_use": self._peak_in_use / total_blocks,
            # Empty slots of blocks in use over their slots; the mean is over busy time.
            "mean_partial_block_waste": _ratio(self._waste_integral, self._busy_s),
            # Of the one replica that serves; all figures are for these GPUs together.
            "num_gpus": self._num_gpus,
            "num_gpu_blocks": total_blocks,
            "simulated_s": simulated_s,
            "simulator_wall_s": wall_s,
        }
        series = np.array(self._series.points, dtype=np.float64).reshape(-1, 4)
        occupancy = {"time_s": series[:, 0]}
        for column, name in enumerate(("in_use_blocks", "cached_blocks", "free_blocks"), start=1):
            occupancy[name] = series[:, column].astype(np.int64)
        return SimulationResult(metrics, occupancy)


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else float("nan")


def _percentiles(name: str, seconds: list[float], percents: tuple[int, ...]) -> dict[str, float]:
    """Percentiles with linear interpolation, named like ttft_p50_s."""
    values = np.percentile(seconds, percents) if seconds else [float("nan")] * len(percents)
    return {f"{name}_p{p}_s": float(v) for p, v in zip(percents, values, strict=True)}
