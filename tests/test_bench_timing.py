"""Timing on clocks and devices that are made up, so that nothing depends on how fast this runs."""

import logging
import types
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch

from experiments.bench import ceilings, timing
from experiments.bench.ceilings import Ceilings, measure_ceilings
from experiments.bench.config import TimingConfig
from experiments.bench.timing import BATCH, CudaClock, HostClock, Prepared, clock_for, time_call

CPU = torch.device("cpu")
ROW_BYTES = 4 * timing.ROW


class FakeClock:
    """Says that sample i of all takes `duration(i)` seconds, without running anything for it."""

    def __init__(self, duration: Callable[[int], float]) -> None:
        self.duration = duration
        self.time_s = 0.0
        self.num_samples = 0
        self.batches: list[tuple[int, bool]] = []

    def now(self) -> float:
        return self.time_s

    def prepare(self, call: Callable[[], object]) -> Prepared:
        call()
        return Prepared(call, "graph")

    def sample(self, replay: Callable[[], object], count: int, cold: bool) -> list[float]:
        self.batches.append((count, cold))
        start = self.num_samples
        self.num_samples += count
        samples = [self.duration(i) for i in range(start, self.num_samples)]
        self.time_s += sum(samples)
        return samples

    @property
    def timed(self) -> int:
        return self.batches[-1][0]

    @property
    def warmups(self) -> list[int]:
        return [count for count, _ in self.batches[:-1]]


def options(**changes: object) -> TimingConfig:
    return TimingConfig(**{"warmup_s": 0.0, "budget_s": 1.0, **changes})


def nothing() -> None:
    pass


# time_call


def test_without_warm_up_time_a_call_is_still_run_before_it_is_timed() -> None:
    clock = FakeClock(lambda i: 0.01)
    calls = []
    time_call(lambda: calls.append(clock.num_samples), clock, options(warmup_s=0.0))
    assert calls == [0]
    assert clock.warmups == [1]


@pytest.mark.parametrize("warmup_s", [0.5, 1.0, 3.0, 20.0])
def test_warm_up_lasts_as_long_as_asked_for_and_not_much_longer(warmup_s: float) -> None:
    clock = FakeClock(lambda i: 0.125)
    time_call(nothing, clock, options(warmup_s=warmup_s))
    assert warmup_s <= sum(clock.warmups) * 0.125 < 3 * warmup_s


def test_warm_up_batches_grow_up_to_the_bound() -> None:
    clock = FakeClock(lambda i: 0.125)
    time_call(nothing, clock, options(warmup_s=20.0))
    assert clock.warmups == [1, 2, 4, 8, 16, 32, BATCH, BATCH]


@pytest.mark.parametrize(
    ("duration_s", "count"),
    [(0.0, 100), (1e-6, 100), (1 / 101, 100), (1 / 64, 64), (0.3, 10), (7.0, 10)],
    ids=["zero", "tiny", "over-max", "fits", "under-min", "longer-than-budget"],
)
def test_samples_fit_the_budget_within_the_bounds(duration_s: float, count: int) -> None:
    clock = FakeClock(lambda i: duration_s)
    result = time_call(nothing, clock, options(budget_s=1.0, min_samples=10, max_samples=100))
    assert clock.timed == result.num_samples == count


def test_the_first_calls_which_may_compile_do_not_count_for_the_estimate() -> None:
    clock = FakeClock(lambda i: 5.0 if i < 1 else 1 / 64)
    time_call(nothing, clock, options(warmup_s=5.01, min_samples=3))
    assert clock.warmups == [1, 2]
    assert clock.timed == 64


def test_percentiles_are_those_of_the_timed_samples_only() -> None:
    """11 samples 0, 1, ... 10 in any order, after a warm-up sample of 100 s."""
    values = [100.0, 3.0, 10.0, 0.0, 7.0, 2.0, 9.0, 1.0, 8.0, 4.0, 6.0, 5.0]
    clock = FakeClock(values.__getitem__)
    result = time_call(nothing, clock, options(min_samples=11, max_samples=11))
    assert result == timing.Timing(2.0, 5.0, 8.0, 11, "graph")


@pytest.mark.parametrize("cold", [True, False])
def test_warm_up_and_samples_find_the_cache_as_configured(cold: bool) -> None:
    clock = FakeClock(lambda i: 0.25)
    time_call(nothing, clock, options(warmup_s=1.0, cold_l2=cold))
    assert {seen for _, seen in clock.batches} == {cold}


def test_what_the_call_raises_is_raised() -> None:
    def fail() -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        time_call(fail, HostClock(), options())


def test_the_check_follows_the_last_sample_and_gets_what_was_timed() -> None:
    clock = FakeClock(lambda i: 0.25)
    answer, seen = object(), []

    def check(replay: timing.Call) -> None:
        seen.append((replay(), clock.num_samples))

    result = time_call(lambda: answer, clock, options(warmup_s=1.0), check)
    assert seen == [(answer, sum(clock.warmups) + result.num_samples)]


def test_what_the_check_raises_is_raised() -> None:
    def refuse(replay: timing.Call) -> None:
        raise ArithmeticError("wrong answer")

    clock = FakeClock(lambda i: 0.25)
    with pytest.raises(ArithmeticError, match="wrong answer"):
        time_call(nothing, clock, options(), refuse)


# HostClock


def test_the_host_clock_runs_every_sample() -> None:
    calls = []
    clock = HostClock()
    prepared = clock.prepare(lambda: calls.append(0))
    assert len(calls) == 1
    samples = clock.sample(prepared.replay, 7, cold=True)
    assert len(calls) == 8
    assert len(samples) == 7
    assert min(samples) >= 0


def test_the_host_clock_times_a_real_call() -> None:
    calls = []
    config = options(warmup_s=0.001, budget_s=0.001, min_samples=5, max_samples=9)
    result = time_call(lambda: calls.append(np.arange(1000).sum()), HostClock(), config)
    assert result.method == "host"
    assert 5 <= result.num_samples <= 9
    assert 0 < result.p20_s <= result.p50_s <= result.p80_s
    assert len(calls) >= 2 + result.num_samples


def test_what_the_host_clock_times_returns_the_answer() -> None:
    answers = []

    def call() -> object:
        answers.append(object())
        return answers[-1]

    prepared = HostClock().prepare(call)
    assert prepared.replay() is answers[-1]
    assert len(answers) == 2


def test_a_cpu_is_timed_on_the_host() -> None:
    assert isinstance(clock_for(CPU), HostClock)


# CudaClock on a device that writes down what it is asked to do


class FakeStream:
    def __init__(self, cuda: "FakeCuda", name: str) -> None:
        self.cuda, self.name = cuda, name

    def wait_stream(self, other: "FakeStream") -> None:
        self.cuda.trace.append(f"{self.name} waits for {other.name}")


class FakeEvent:
    """Elapsed times count up: 1 ms, 2 ms, ..."""

    def __init__(self, cuda: "FakeCuda", enable_timing: bool) -> None:
        assert enable_timing
        self.cuda = cuda
        self.pending = False

    def record(self) -> None:
        assert not self.pending, "recorded anew before it was read"
        self.pending = True
        self.cuda.log("event")

    def elapsed_time(self, end: "FakeEvent") -> float:
        assert self.cuda.trace[-1] == "synchronize"
        assert self.pending
        assert end.pending
        self.pending = end.pending = False
        self.cuda.num_elapsed += 1
        return float(self.cuda.num_elapsed)


class FakeGraph:
    def __init__(self, cuda: "FakeCuda") -> None:
        self.cuda = cuda
        self.num_resets = 0

    def reset(self) -> None:
        self.num_resets += 1

    def replay(self) -> None:
        self.cuda.log("replay")


class FakeCuda:
    """In place of `torch.cuda`: writes down, in `trace`, what is launched and on which stream.

    Like torch, `graph` makes its stream the current one and, when a capture fails, leaves it so.
    """

    def __init__(self, l2_bytes: int = 2**20, fault: str | None = None) -> None:
        self.trace: list[str] = []
        self.fault = fault
        self.num_elapsed = 0
        self.default = self.current = FakeStream(self, "default")
        self.properties = types.SimpleNamespace(L2_cache_size=l2_bytes)

    def log(self, what: str) -> None:
        self.trace.append(f"{what} on {self.current.name}")

    def launch(self) -> None:
        """A call of the user's."""
        if self.fault == "call" and "capture" in self.trace and "failed" not in self.trace:
            raise RuntimeError("operation not permitted when stream is capturing")
        self.log("call")

    def Stream(self) -> FakeStream:
        return FakeStream(self, "side")

    def Event(self, enable_timing: bool = False) -> FakeEvent:
        return FakeEvent(self, enable_timing)

    def CUDAGraph(self) -> FakeGraph:
        return FakeGraph(self)

    def current_stream(self) -> FakeStream:
        return self.current

    def current_device(self) -> int:
        return 0

    def get_device_properties(self, device: torch.device) -> types.SimpleNamespace:
        return self.properties

    def synchronize(self) -> None:
        self.trace.append("synchronize")

    @contextmanager
    def stream(self, stream: FakeStream) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    @contextmanager
    def graph(self, graph: FakeGraph, stream: FakeStream) -> Iterator[None]:
        before, self.current = self.current, stream
        self.trace.append("capture")
        try:
            yield
        except RuntimeError:
            self.trace.append("failed")
            raise RuntimeError("capture was invalidated") from None
        if self.fault == "empty":
            warnings.warn("The CUDA Graph is empty. This usually means ...", stacklevel=2)
        if self.fault == "end":
            raise RuntimeError("out of memory")
        self.current = before
        self.trace.append("captured")


@pytest.fixture
def make_clock(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[CudaClock, FakeCuda]]:
    """A CudaClock on a fake device, whose trace starts after the clock was made."""

    def make(**changes: object) -> tuple[CudaClock, FakeCuda]:
        cuda = FakeCuda(**changes)
        monkeypatch.setattr(timing, "torch", FakeTorch(cuda))
        monkeypatch.setattr(timing, "read_rows", lambda values, sums: cuda.log("flush"))
        monkeypatch.setattr(timing, "FLUSH_BYTES", 3 * ROW_BYTES)
        return CudaClock(CPU), cuda

    return make


class FakeTorch:
    """torch with another `cuda`, for one module only."""

    def __init__(self, cuda: FakeCuda) -> None:
        self.cuda = cuda

    def __getattr__(self, name: str) -> object:
        return getattr(torch, name)


MakeClock = Callable[..., tuple[CudaClock, FakeCuda]]
COLD_SAMPLE = ["flush on default", "event on default", "replay on default", "event on default"]


def test_a_call_is_warmed_up_on_a_side_stream_before_it_is_captured(make_clock: MakeClock) -> None:
    clock, cuda = make_clock()
    prepared = clock.prepare(cuda.launch)
    assert prepared.method == "graph"
    assert cuda.trace == [
        "side waits for default",
        "call on side",
        "call on side",
        "call on side",
        "synchronize",
        "capture",
        "call on side",
        "captured",
    ]
    assert cuda.current is cuda.default


def test_the_cache_is_filled_before_each_cold_sample(make_clock: MakeClock) -> None:
    """And nothing waits between the samples: on the host, too, a launch takes its time."""
    clock, cuda = make_clock()
    prepared = clock.prepare(cuda.launch)
    cuda.trace.clear()
    samples = clock.sample(prepared.replay, 3, cold=True)
    assert cuda.trace == [*COLD_SAMPLE * 3, "synchronize"]
    assert samples == pytest.approx([0.001, 0.002, 0.003])


def test_a_warm_sample_follows_an_untimed_replay(make_clock: MakeClock) -> None:
    clock, cuda = make_clock()
    prepared = clock.prepare(cuda.launch)
    cuda.trace.clear()
    clock.sample(prepared.replay, 2, cold=False)
    warm_sample = [COLD_SAMPLE[0], "replay on default", *COLD_SAMPLE[1:]]
    assert cuda.trace == [*warm_sample * 2, "synchronize"]


@pytest.mark.parametrize("count", [0, 1, BATCH, BATCH + 1, 3 * BATCH - 1])
def test_samples_are_waited_for_in_batches(make_clock: MakeClock, count: int) -> None:
    clock, cuda = make_clock()
    prepared = clock.prepare(cuda.launch)
    cuda.trace.clear()
    samples = clock.sample(prepared.replay, count, cold=True)
    assert samples == pytest.approx([i / 1000 for i in range(1, count + 1)])
    runs = " ".join(cuda.trace).split("synchronize")
    sizes = [run.count("replay") for run in runs[:-1]]
    assert sizes == [BATCH] * (count // BATCH) + [count % BATCH] * (count % BATCH > 0)
    assert runs[-1] == ""


class Answer:
    """What a call returns: anything that can be told from its like."""


def test_a_graph_is_checked_by_the_answer_of_its_capture(make_clock: MakeClock) -> None:
    """By one more replay, once the device is done; the call itself could answer rightly while its
    graph does less."""
    clock, cuda = make_clock()
    answers, seen = [], []

    def call() -> Answer:
        cuda.launch()
        answers.append(Answer())
        return answers[-1]

    def check(replay: timing.Call) -> None:
        assert cuda.trace[-1] == "synchronize"
        seen.append(replay())

    time_call(call, clock, options(min_samples=3, max_samples=3), check)
    assert cuda.num_elapsed == 1 + 3
    assert cuda.trace[-1] == "replay on default"
    assert len(answers) == timing.CAPTURE_WARMUP_CALLS + 1
    assert seen == answers[-1:]


def test_without_a_graph_each_run_returns_its_own_answer(make_clock: MakeClock) -> None:
    clock, _ = make_clock(fault="end")
    answers = []

    def call() -> Answer:
        answers.append(Answer())
        return answers[-1]

    prepared = clock.prepare(call)
    assert prepared.method == "stream"
    count = len(answers)
    assert prepared.replay() is answers[-1]
    assert len(answers) == count + 1


def test_a_graph_and_its_answer_live_as_long_as_the_replay(
    make_clock: MakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And no longer: they hold memory that the next call needs."""
    clock, cuda = make_clock()
    alive = weakref.WeakSet()

    def new(made: object) -> object:
        alive.add(made)
        return made

    monkeypatch.setattr(cuda, "CUDAGraph", lambda: new(FakeGraph(cuda)))
    replay = clock.prepare(lambda: new(Answer())).replay
    assert {type(kept) for kept in alive} == {FakeGraph, Answer}
    assert len(alive) == 2
    del replay
    assert len(alive) == 0


@pytest.mark.parametrize("fault", ["call", "end", "empty"])
def test_what_cannot_be_captured_is_launched_instead(
    make_clock: MakeClock, fault: str, caplog: pytest.LogCaptureFixture
) -> None:
    """On the stream of before, whatever the failed capture left; an empty graph would take 0 s."""
    clock, cuda = make_clock(fault=fault)
    with caplog.at_level(logging.WARNING):
        prepared = clock.prepare(cuda.launch)
    assert prepared.method == "stream"
    reason = {"call": "invalidated", "end": "out of memory", "empty": "is empty"}[fault]
    assert [reason in record.getMessage() for record in caplog.records] == [True]
    assert cuda.current is cuda.default
    assert cuda.trace[-1] == "synchronize"
    assert [graph.num_resets for graph in clock._failed_graphs] == [1]
    clock.sample(prepared.replay, 1, cold=True)
    assert cuda.trace[-5:] == [
        "flush on default",
        "event on default",
        "call on default",
        "event on default",
        "synchronize",
    ]


def test_a_call_that_fails_before_capture_is_not_measured(make_clock: MakeClock) -> None:
    clock, cuda = make_clock()

    def fail() -> None:
        raise ValueError("wrong shape")

    with pytest.raises(ValueError, match="wrong shape"):
        clock.prepare(fail)
    assert cuda.current is cuda.default


@pytest.mark.parametrize(
    ("l2_bytes", "num_rows"), [(0, 3), (ROW_BYTES, 3), (2 * ROW_BYTES, 4), (2 * ROW_BYTES + 1, 5)]
)
def test_twice_the_cache_is_read(make_clock: MakeClock, l2_bytes: int, num_rows: int) -> None:
    clock, _ = make_clock(l2_bytes=l2_bytes)
    assert clock._buffer.shape == (num_rows, timing.ROW)
    assert clock._buffer.numel() * clock._buffer.itemsize >= 2 * l2_bytes
    assert clock._sums.shape == (num_rows,)


def test_reading_rows_reads_all_and_keeps_what_it_reads() -> None:
    values = torch.rand(3, timing.ROW)
    before, sums = values.clone(), torch.full((3,), torch.nan)
    where = sums.data_ptr()
    timing.read_rows(values, sums)
    assert torch.equal(values, before)
    assert torch.allclose(sums, values.sum(dim=1))
    assert sums.data_ptr() == where


def test_the_clock_waits_before_it_tells_the_time(make_clock: MakeClock) -> None:
    clock, cuda = make_clock()
    clock.now()
    assert cuda.trace == ["synchronize"]


def test_another_gpu_than_the_current_is_refused(make_clock: MakeClock) -> None:
    make_clock()
    with pytest.raises(ValueError, match="cuda:1: expected the current GPU"):
        clock_for(torch.device("cuda:1"))


def test_a_call_is_timed_on_the_fake_device(make_clock: MakeClock) -> None:
    clock, cuda = make_clock()
    result = time_call(cuda.launch, clock, options(min_samples=3, max_samples=3))
    assert result.method == "graph"
    assert result.p50_s == pytest.approx(0.003)


# Ceilings

ALL_BYTES = 8 * ROW_BYTES


def measure(
    clock: timing.Clock, dtype: torch.dtype = torch.float32, num_bytes: int = ALL_BYTES
) -> Ceilings:
    config = options(min_samples=3, max_samples=3)
    return measure_ceilings(CPU, dtype, clock, config, num_bytes, matrix_size=16)


@pytest.mark.parametrize("num_bytes", [ALL_BYTES, ALL_BYTES + 1])
def test_rates_are_bytes_over_time(num_bytes: int) -> None:
    """Of those bytes that are moved: whole rows."""
    result = measure(FakeClock(lambda i: 0.5), num_bytes=num_bytes)
    assert result == Ceilings(
        copy_bytes_per_s=4 * ALL_BYTES,
        read_bytes_per_s=2 * ALL_BYTES,
        matrix_flops_per_s=4 * 16**3,
        to_host_bytes_per_s=ALL_BYTES / 2,
        from_host_bytes_per_s=ALL_BYTES / 2,
        empty_call_s=0.5,
    )


READS = ["row sums", "float32 products", "bfloat16 products"]


@pytest.mark.parametrize("fastest", READS)
def test_of_the_ways_to_read_the_fastest_counts(
    fastest: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Rows were only summed once, below what memory can do: kernels that read lay above it."""
    # Of 4 samples each, the first of them to warm up: copies to and from the host, then a copy.
    first = 4 * (3 + READS.index(fastest))
    clock = FakeClock(lambda i: 0.25 if first <= i < first + 4 else 0.5)
    with caplog.at_level(logging.INFO):
        result = measure(clock)
    assert result.read_bytes_per_s == 4 * ALL_BYTES
    assert result.copy_bytes_per_s == 4 * ALL_BYTES
    assert result.matrix_flops_per_s == 4 * 16**3
    assert [f"by {fastest}" in record.getMessage() for record in caplog.records] == [True]


def test_what_is_read_is_of_ordinary_numbers_in_both_dtypes() -> None:
    values = ceilings._random(ALL_BYTES, CPU)
    assert values.dtype == torch.float32
    assert values.shape == (8, timing.ROW)
    for seen in (values, values.view(torch.bfloat16)):
        assert 0 <= seen.min() < 0.01
        assert 0.99 < seen.max() <= 1
        assert len(seen.unique()) > 100


def test_only_the_empty_call_is_as_cold_as_what_it_is_held_against() -> None:
    clock = FakeClock(lambda i: 0.5)
    measure(clock)
    colds = [cold for _, cold in clock.batches]
    assert colds == [False] * (len(colds) - 2) + [True] * 2


@pytest.mark.parametrize(("copy", "read", "memory"), [(1.0, 2.0, 2.0), (3.0, 2.0, 3.0)])
def test_memory_is_as_fast_as_the_faster_of_both(copy: float, read: float, memory: float) -> None:
    assert Ceilings(copy, read, 0.0, 0.0, 0.0, 0.0).memory_bytes_per_s == memory


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_ceilings_of_a_cpu_are_measured(dtype: torch.dtype) -> None:
    result = measure(HostClock(), dtype)
    assert min(vars(result).values()) > 0


def test_tf32_is_off_while_matrices_are_multiplied_and_then_as_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen = []
    matmul = torch.matmul

    def watched(*args: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        seen.append(torch.backends.cuda.matmul.allow_tf32)
        return matmul(*args, out=out)

    monkeypatch.setattr(torch, "matmul", watched)
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = True
    try:
        measure(FakeClock(lambda i: 0.5))
        assert torch.backends.cuda.matmul.allow_tf32 is True
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before
    assert seen == [False, False]


def to_tf32(values: torch.Tensor) -> torch.Tensor:
    """Rounded to 10 bits of mantissa."""
    return ((values.view(torch.int32) + 2**12) & -(2**13)).view(torch.float32)


def test_the_tolerance_of_fp32_matrices_excludes_tf32() -> None:
    torch.manual_seed(0)
    a, b = torch.randn(16, 512), torch.randn(512, 512)
    exact = a.double() @ b.double()
    tolerance = ceilings._matmul_tolerance(512, torch.float32)
    assert ((a @ b).double() - exact).abs().max() < tolerance / 2
    rounded = to_tf32(a).double() @ to_tf32(b).double()
    assert (rounded - exact).abs().max() > 2 * tolerance


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("left_out", ["columns", "row"])
def test_products_that_leave_out_a_part_are_not_timed(
    monkeypatch: pytest.MonkeyPatch, left_out: str, dtype: torch.dtype
) -> None:
    """The last row, or a thirtieth of each: memory would seem faster than it is."""
    mv = torch.mv

    def spoiled(matrix: torch.Tensor, vector: torch.Tensor, out: torch.Tensor) -> None:
        if matrix.dtype != dtype:
            mv(matrix, vector, out=out)
        elif left_out == "row":
            mv(matrix[:-1], vector, out=out[:-1])
        else:
            start = len(vector) // 30
            mv(matrix[:, start:], vector[start:], out=out)

    monkeypatch.setattr(torch, "mv", spoiled)
    name = str(dtype).removeprefix("torch.")
    with pytest.raises(RuntimeError, match=f"read by {name} products: wrong answer"):
        measure(FakeClock(lambda i: 0.5))


@pytest.mark.parametrize("what", ["copy", "read by row sums", "matmul"])
def test_wrong_answers_are_not_timed(monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    def spoiled(*args: torch.Tensor, out: torch.Tensor) -> None:
        out.fill_(1.0)

    if what == "copy":
        monkeypatch.setattr(torch.Tensor, "copy_", lambda self, source, non_blocking: self)
    elif what == "read by row sums":
        monkeypatch.setattr(ceilings, "read_rows", lambda values, sums: sums.fill_(1.0))
    else:
        monkeypatch.setattr(torch, "matmul", spoiled)
    with pytest.raises(RuntimeError, match=f"{what}: wrong answer"):
        measure(FakeClock(lambda i: 0.5))
