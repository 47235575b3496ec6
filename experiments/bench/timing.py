"""Times a call: warm-up, then as many samples as the budget allows, then percentiles.

On a GPU a sample is the time between two CUDA events around one replay of a CUDA graph of the call.
"""

import logging
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
import torch

from .config import TimingConfig

log = logging.getLogger(__name__)

Call = Callable[[], object]
Method = Literal["graph", "stream", "host"]

BATCH = 50
"""Samples that are launched before the device is waited for."""
CAPTURE_WARMUP_CALLS = 3
FLUSH_BYTES = 256 * 2**20
"""Read before a sample even if the L2 cache is small: 30 us of the fastest GPU, and the launches
that they are to hide take about half of that."""
ROW = 4096
"""Elements summed by one `read_rows` output: many rows, so that no row is split over thread blocks,
which would take a workspace."""


@dataclass(frozen=True)
class Timing:
    """Seconds a call takes.

    `method` is "graph" (a replayed CUDA graph), "stream" (launched anew for each sample) or "host".
    """

    p20_s: float
    p50_s: float
    p80_s: float
    num_samples: int
    method: Method


@dataclass(frozen=True)
class Prepared:
    """What is sampled in place of a call, and how.

    `replay` returns the call's answer. With method "graph" that is the object that the call
    returned when it was captured: its tensors lie in the memory of the graph, hold what the last
    replay has computed and change with the next. The graph lives as long as `replay`.
    """

    replay: Call
    method: Method


class Clock(Protocol):
    """Runs and times calls on one device."""

    def now(self) -> float:
        """Seconds since any fixed time, read once the device has finished all that was launched."""
        ...

    def prepare(self, call: Call) -> Prepared:
        """Run `call` at least once, untimed, wait for it, and return what to sample in its place.

        Raises what `call` raises.
        """
        ...

    def sample(self, replay: Call, count: int, cold: bool) -> list[float]:
        """Run and time `replay` `count` times; returns the seconds of each, once all are done.

        cold: the L2 cache is filled with other data before each sample; else it holds what one run
        of `replay` leaves. Raises what `replay` raises.
        """
        ...


class HostClock:
    """For calls that are done when they return; the caches are left as they are."""

    def now(self) -> float:
        return time.perf_counter()

    def prepare(self, call: Call) -> Prepared:
        call()
        return Prepared(call, "host")

    def sample(self, replay: Call, count: int, cold: bool) -> list[float]:
        samples = []
        for _ in range(count):
            start = time.perf_counter()
            replay()
            samples.append(time.perf_counter() - start)
        return samples


class CudaClock:
    """For calls that launch work on the current stream of the current GPU.

    Samples of method "graph" are free of launch costs on the host, which hide behind the read that
    fills the L2 cache, unless the graph has thousands of nodes. With method "stream" the time of
    calls of several kernels, or of kernels of few microseconds, includes the gaps while the host
    launches.
    """

    def __init__(self, device: torch.device) -> None:
        """Allocates what is read to fill the L2 cache: twice its size, `FLUSH_BYTES` at least.

        Raises ValueError if `device` is not the current GPU.
        """
        if device.index not in (None, torch.cuda.current_device()):
            raise ValueError(f"{device}: expected the current GPU; see torch.cuda.set_device")
        l2_bytes = torch.cuda.get_device_properties(device).L2_cache_size
        num_rows = -(-max(2 * l2_bytes, FLUSH_BYTES) // (4 * ROW))
        self._buffer = torch.ones(num_rows, ROW, dtype=torch.float32, device=device)
        self._sums = torch.empty(num_rows, dtype=torch.float32, device=device)
        self._events = [(self._new_event(), self._new_event()) for _ in range(BATCH)]
        self._failed_graphs: list[torch.cuda.CUDAGraph] = []

    def now(self) -> float:
        torch.cuda.synchronize()
        return time.perf_counter()

    def prepare(self, call: Call) -> Prepared:
        """Capture `call` in a CUDA graph, or else warn, with the reason, and take it as it is."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(CAPTURE_WARMUP_CALLS):
                call()
        torch.cuda.synchronize()
        try:
            return Prepared(self._capture(call, stream), "graph")
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            log.warning("No CUDA graph, so the time includes launch gaps: %s", reason)
        torch.cuda.synchronize()
        return Prepared(call, "stream")

    def sample(self, replay: Call, count: int, cold: bool) -> list[float]:
        samples: list[float] = []
        while len(samples) < count:
            events = self._events[: count - len(samples)]
            for start, end in events:
                self._fill_l2(replay, cold)
                start.record()
                replay()
                end.record()
            # Waiting once a batch keeps the host ahead of the device, and the queue of launches
            # from filling up.
            torch.cuda.synchronize()
            samples += [start.elapsed_time(end) * 1e-3 for start, end in events]
        return samples

    def _fill_l2(self, replay: Call, cold: bool) -> None:
        """Leave other data in the L2 cache or, unless cold, that of an untimed run.

        By reading: lines that were written would be written back during the sample, at its cost.
        When not cold the read still comes first, for the launches to hide behind.
        """
        read_rows(self._buffer, self._sums)
        if not cold:
            replay()

    def _capture(self, call: Call, stream: torch.cuda.Stream) -> Call:
        """The replay of a CUDA graph of `call`, which returns the answer of the capture.

        Raises if `call` cannot be captured, or the graph is empty.
        """
        graph = torch.cuda.CUDAGraph()
        try:
            # If a capture ends in an error, torch.cuda.graph leaves its stream the current one;
            # the outer context does not.
            with torch.cuda.stream(stream), warnings.catch_warnings():
                warnings.filterwarnings("error", message=".*CUDA Graph is empty")
                with torch.cuda.graph(graph, stream=stream):
                    answer = call()
        except Exception:
            # The allocator goes on pointing to a graph whose capture did not end, so that is kept,
            # without its memory.
            self._failed_graphs.append(graph)
            graph.reset()
            raise

        def replay() -> object:
            graph.replay()
            return answer

        return replay

    @staticmethod
    def _new_event() -> torch.cuda.Event:
        return torch.cuda.Event(enable_timing=True)


def clock_for(device: torch.device) -> Clock:
    """The clock for calls that work on `device`. Raises ValueError for a GPU not the current."""
    return CudaClock(device) if device.type == "cuda" else HostClock()


def read_rows(values: torch.Tensor, sums: torch.Tensor) -> None:
    """Read `values` [rows, ROW] and write next to nothing: each row's sum, to `sums` [rows]."""
    torch.sum(values, dim=1, out=sums)


def time_call(
    call: Call,
    clock: Clock,
    options: TimingConfig,
    check: Callable[[Call], None] | None = None,
) -> Timing:
    """Time `call` after a warm-up of `options.warmup_s`, and of one call at least.

    As many samples as fit `options.budget_s`, within min_samples and max_samples. After the last,
    `check` is called once, with what was timed: it runs that and raises if the answer is wrong; the
    answer of `call` says nothing of a graph that does less. Raises what `call` and `check` raise.
    """
    prepared = clock.prepare(call)
    estimate_s = _warm_up(prepared.replay, clock, options)
    count = int(options.budget_s / max(estimate_s, 1e-9))
    count = max(options.min_samples, min(count, options.max_samples))
    samples = clock.sample(prepared.replay, count, options.cold_l2)
    if check is not None:
        check(prepared.replay)
    p20, p50, p80 = (float(p) for p in np.percentile(samples, [20, 50, 80]))
    return Timing(p20, p50, p80, len(samples), prepared.method)


def _warm_up(replay: Call, clock: Clock, options: TimingConfig) -> float:
    """Sample until `options.warmup_s` have passed; returns the last samples' median in seconds.

    In batches that grow, to keep the device as busy as it will be when it counts.
    """
    start_s, count = clock.now(), 1
    while True:
        samples = clock.sample(replay, count, options.cold_l2)
        if clock.now() - start_s >= options.warmup_s:
            return float(np.median(samples))
        count = min(2 * count, BATCH)
