"""Continuous batching in simulated time, over the real block manager.

A step computes one token of every decoding sequence and, within the token budget, chunks of
prompts. Running sequences come first; then swapped ones come back; then waiting requests are
admitted in order of arrival, as long as `can_allocate` says OK. Where decoding needs more blocks
than are left, the request that arrived last gives up its own, by recompute or by swap. The clock
advances by what `Roofline` says of each step; what the block manager did is real.

The token that a step samples is written in the next step, so a request for n output tokens takes a
prefill and n - 1 decode steps, and the KV of its last token is never computed.
"""

import bisect
import functools
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from time import perf_counter

import numpy as np
from tqdm import tqdm

from cache.block_manager import BlockSpaceManager
from cache.content_hash import ContentHasher
from cache.evictor import EvictorChoice, Future, make_evictor
from cache.interfaces import AllocStatus
from cache.sequence import Sequence, SequenceGroup, SequenceStatus

from .config import Preemption, ServeConfig
from .metrics import MetricsRecorder, RequestRecord, SimulationResult
from .ranges import InputError
from .references import block_hashes
from .requests import Request, Workload
from .roofline import Roofline, pool_size, tensor_parallel


def simulate(workload: Workload, config: ServeConfig, progress: bool = False) -> SimulationResult:
    """Serve a workload and return what was measured.

    Args:
        workload: requests in order of arrival.
        config: validated; see `ServeConfig`.
        progress: show a bar of finished requests, if this is a terminal.
    """
    return Simulator(workload, config).run(progress)


@dataclass(slots=True, eq=False)
class _Job:
    """What is scheduled as one: a request, or after a recompute one of its samples.

    While it decodes, `samples`, `rows`, `slots` and the sequences of `group` run in parallel.
    """

    request: Request
    samples: list[int]
    record: RequestRecord
    num_generated: int = 0
    """Output tokens that count to the prompt, because they were generated before a recompute."""
    num_computed_before: int = 0
    """Tokens whose KV was computed before a recompute."""
    was_preempted: bool = False
    group: SequenceGroup | None = None
    rows: list[int] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)
    swapped_generated: list[int] = field(default_factory=list)
    """Output tokens of each sample, while a decoding job is swapped out."""
    num_free_when_refused: int = -1
    """GPU blocks that were not enough; nobody asks again before there are more."""
    num_tokens: int = 0
    num_computed: int = 0
    """Of the num_tokens to prefill."""

    @property
    def is_decoding(self) -> bool:
        return bool(self.slots)

    @property
    def num_to_compute(self) -> int:
        return self.num_tokens - self.num_computed


class _Slots:
    """Arrays over decoding sequences; a slot is a sequence's place in them."""

    def __init__(self, max_num_seqs: int) -> None:
        self.rows = np.zeros(max_num_seqs, dtype=np.int64)
        self.num_generated = np.zeros(max_num_seqs, dtype=np.int64)
        self.num_output = np.zeros(max_num_seqs, dtype=np.int64)
        self.output_tokens = np.zeros((max_num_seqs, 256), dtype=np.int32)
        self._free = list(range(max_num_seqs - 1, -1, -1))

    def take(self, row: int, output_tokens: np.ndarray, num_generated: int) -> int:
        """Return the slot of a sequence that starts to decode."""
        slot = self._free.pop()
        self.rows[slot] = row
        self.num_generated[slot] = num_generated
        self.num_output[slot] = len(output_tokens)
        width = self.output_tokens.shape[1]
        if len(output_tokens) > width:
            wider = np.zeros((len(self.rows), 2 * len(output_tokens)), dtype=np.int32)
            wider[:, :width] = self.output_tokens
            self.output_tokens = wider
        self.output_tokens[slot, : len(output_tokens)] = output_tokens
        return slot

    def give_back(self, slots: list[int]) -> None:
        """Free the slots of sequences that no longer decode."""
        self._free += slots


class Simulator:
    """One run of one workload. `run` may be called once."""

    def __init__(self, workload: Workload, config: ServeConfig) -> None:
        cache, self._scheduler = config.cache, config.scheduler
        size = pool_size(config)
        self._future: Future | None = None
        evictor: EvictorChoice = config.evictor.name.value
        if evictor == "belady" and cache.enable_caching:
            # An upper bound to compare with: it knows which prompts are still to come.
            hasher = ContentHasher(cache.block_size, config.seed, cache.hash_algorithm.value)
            self._future = Future(block_hashes(request, hasher).tolist() for request in workload)
            evictor = functools.partial(make_evictor, evictor, future=self._future)
        try:
            self.manager = BlockSpaceManager(
                cache.block_size,
                size.num_gpu_blocks,
                size.num_cpu_blocks,
                cache.watermark,
                cache.sliding_window,
                cache.enable_caching,
                evictor=evictor,
                hash_seed=config.seed,
                hash_algorithm=cache.hash_algorithm.value,
            )
        except ValueError as error:
            raise InputError(str(error)) from None
        self.metrics = MetricsRecorder(self.manager, tensor_parallel(config.model, config.gpu))
        self._roofline = Roofline(config)
        self._workload = workload
        self._now = 0.0
        self._next_seq_id = 0
        self._waiting: deque[_Job] = deque()
        self._swapped: deque[_Job] = deque()
        self._running: list[_Job] = []  # in order of arrival
        self._num_seats = self._scheduler.max_num_seqs
        self._slots = _Slots(self._scheduler.max_num_seqs)
        self._decoding = _NO_SLOTS  # the slots of all running jobs, in their order
        self._prefilling: list[_Job] = []  # the running jobs without slots
        self._running_changed = False
        self._num_moved_blocks = 0  # over PCIe, in this step

    def run(self, progress: bool = False) -> SimulationResult:
        """Serve every request to its end, or refuse it."""
        start = perf_counter()
        arrivals = iter(self._workload)
        upcoming = next(arrivals, None)
        bar = tqdm(
            total=self._workload.num_requests,
            desc="requests",
            unit="req",
            leave=False,
            disable=None if progress else True,
        )
        with bar:
            while upcoming or self._waiting or self._swapped or self._running:
                upcoming = self._take_arrivals(arrivals, upcoming)
                self._step()
                bar.update(self.metrics.num_ended - bar.n)
        return self.metrics.result(self._now, perf_counter() - start)

    def _take_arrivals(
        self, arrivals: Iterator[Request], upcoming: Request | None
    ) -> Request | None:
        """Queue what has arrived; where nothing else is to do, wait for the next request."""
        ignore = self._scheduler.ignore_arrivals
        if upcoming and not (self._waiting or self._swapped or self._running or ignore):
            self._now = max(self._now, upcoming.arrival_s)
        while upcoming and (ignore or upcoming.arrival_s <= self._now):
            if self._can_ever_finish(upcoming):
                record = RequestRecord(0.0 if ignore else upcoming.arrival_s, upcoming.num_samples)
                self._waiting.append(_Job(upcoming, list(range(upcoming.num_samples)), record))
            else:
                self.metrics.refused()
            upcoming = next(arrivals, None)
        return upcoming

    def _can_ever_finish(self, request: Request) -> bool:
        """Whether the request, alone, would be admitted and served to its end."""
        block_size = self.manager.block_size
        total = self.manager.get_num_total_gpu_blocks()
        num_admitted = -(-request.num_prompt_tokens // block_size)
        # The last output token is never written. Samples share the full blocks of the prompt.
        num_slots = request.num_prompt_tokens + request.num_output_tokens - 1
        num_shared = request.num_prompt_tokens // block_size if request.num_samples > 1 else 0
        num_own = -(-num_slots // block_size) - num_shared
        return (
            request.num_samples <= self._scheduler.max_num_seqs
            and num_shared + request.num_samples * num_own <= total
            and total - num_admitted >= self.manager.watermark_blocks
        )

    # -- one step

    def _step(self) -> None:
        """Schedule and compute one step; without anything to compute, preempt or swap only."""
        self._num_moved_blocks = 0
        chunks: list[tuple[_Job, int]] = []
        decoding, num_copies = _NO_SLOTS, 0
        budget = self._scheduler.max_num_batched_tokens
        if self._scheduler.chunked_prefill:
            has_preempted = self._make_room_to_decode()
            decoding, num_copies = self._append()
            budget = self._continue_prefills(budget - len(decoding), chunks)
            if not has_preempted:
                self._admit(budget, chunks)
        else:
            # Whole prompts, in steps of their own, go first.
            self._admit(budget, chunks)
            if not chunks:
                self._make_room_to_decode()
                decoding, num_copies = self._append()
        self._compute(decoding, chunks, num_copies)

    def _compute(
        self, decoding: np.ndarray, chunks: list[tuple[_Job, int]], num_copies: int
    ) -> None:
        """Let the clock run for what was scheduled, and take note of what it computed."""
        rows = self._slots.rows[decoding]
        context_lens = self.manager.tables.seq_lens[rows].astype(np.int64)
        query_lens = np.ones(len(rows), dtype=np.int64)
        if chunks:
            for job, count in chunks:
                job.num_computed += count
            rows = _extended(rows, [job.rows[0] for job, _ in chunks])
            context_lens = _extended(context_lens, [job.num_computed for job, _ in chunks])
            query_lens = _extended(query_lens, [count for _, count in chunks])
        seconds = self._roofline.swap_seconds(self._num_moved_blocks)
        if len(rows):
            seconds += self._roofline.step_seconds(query_lens, context_lens)
            seconds += self._roofline.copy_seconds(num_copies)
        self.metrics.step(self._now, seconds, self._rows_in_use())
        self._now += seconds
        self.manager.mark_blocks_as_computed_batch(rows, context_lens)
        self._finish_decodes(decoding)
        for job, _ in chunks:
            if not job.num_to_compute:
                self._finish_prefill(job)

    def _rows_in_use(self) -> np.ndarray:
        self._refresh()
        rows = self._slots.rows[self._decoding]
        return _extended(rows, [job.rows[0] for job in self._prefilling])

    # -- admission and prefill

    def _admit(self, budget: int, chunks: list[tuple[_Job, int]]) -> None:
        """Bring back swapped jobs, then admit waiting ones, in order, while there is room."""
        while self._swapped and len(self._swapped[0].samples) <= self._num_seats:
            if not self._swap_in():
                break
        while not self._swapped and self._waiting and budget > 0:
            job = self._waiting[0]
            if len(job.samples) > self._num_seats or not self._can_start(job):
                return
            count = job.num_tokens - self.manager.get_num_cached_tokens(job.group.seqs[0])
            if self._scheduler.chunked_prefill:
                count = min(count, budget)
            elif count > budget and chunks:
                return
            self._start(self._waiting.popleft())
            chunks.append((job, count))
            budget -= count

    def _can_start(self, job: _Job) -> bool:
        if job.group is None:
            self._make_group(job)
        num_free = self.manager.get_num_free_gpu_blocks()
        if self._running and num_free <= job.num_free_when_refused:
            return False
        status = self.manager.can_allocate(job.group)
        job.num_free_when_refused = -1 if status is AllocStatus.OK else num_free
        if status is AllocStatus.NEVER and job.was_preempted:
            # It has grown, and only the watermark says no: once the pool is idle it may start.
            return not self._running
        return status is AllocStatus.OK

    def _make_group(self, job: _Job) -> None:
        tokens = job.request.prompt_token_ids()
        if job.num_generated:
            output = job.request.output_token_ids(job.samples[0])
            tokens = np.concatenate([tokens, output[: job.num_generated]])
        seq = Sequence(self._new_seq_id(), tokens, job.request.extra_key)
        job.group = SequenceGroup(job.request.request_id, [seq], job.record.arrival_s)
        job.num_tokens = len(tokens)

    def _new_seq_id(self) -> int:
        self._next_seq_id += 1
        return self._next_seq_id

    def _start(self, job: _Job) -> None:
        seq = job.group.seqs[0]
        if self._future is not None:
            self._future.now = max(self._future.now, job.request.request_id)
        self.manager.allocate(job.group)
        seq.status = SequenceStatus.RUNNING
        job.rows = self.manager.rows_of([seq]).tolist()
        job.num_computed = self.manager.get_num_cached_tokens(seq)
        self._enter(job)
        if job.was_preempted:
            self.metrics.resumed(job.num_computed_before, job.num_computed)
        else:
            self.metrics.admitted(job.num_tokens, job.num_computed)

    def _enter(self, job: _Job) -> None:
        bisect.insort(self._running, job, key=lambda job: job.request.request_id)
        self._running_changed = True
        self._num_seats -= len(job.samples)

    def _continue_prefills(self, budget: int, chunks: list[tuple[_Job, int]]) -> int:
        """Schedule the next chunks of prompts in work; returns what is left of the budget."""
        for job in self._prefilling:
            if budget > 0:
                count = min(budget, job.num_to_compute)
                chunks.append((job, count))
                budget -= count
        return budget

    def _finish_prefill(self, job: _Job) -> None:
        """Fork the samples, note the token that the prefill gave them, and let them decode."""
        parent = job.group.seqs[0]
        children = [parent.fork(self._new_seq_id()) for _ in job.samples[1:]]
        if children:
            job.rows += self.manager.fork_many(parent, children).tolist()
        for child in children:
            job.group.add(child)
        if job.record.first_token_s is None:
            job.record.first_token_s = self._now
        self.metrics.num_output_tokens += len(job.samples)
        self._start_decoding(job, [job.num_generated + 1] * len(job.samples))
        self._end_finished(job)

    # -- decoding

    def _start_decoding(self, job: _Job, num_generated: list[int]) -> None:
        job.slots = [
            self._slots.take(row, job.request.output_token_ids(sample), count)
            for sample, row, count in zip(job.samples, job.rows, num_generated, strict=True)
        ]
        self._running_changed = True

    def _stop_decoding(self, job: _Job) -> None:
        self._slots.give_back(job.slots)
        job.slots = []
        self._running_changed = True

    def _make_room_to_decode(self) -> bool:
        """Preempt until every decoding sequence can grow by a token; says whether any was."""
        has_preempted = False
        while True:
            self._refresh()
            rows = self._slots.rows[self._decoding]
            num_taken = self.manager.num_blocks_taken_by_append(rows)
            if num_taken <= self.manager.get_num_free_gpu_blocks():
                return has_preempted
            self._preempt(self._running.pop())
            has_preempted = True

    def _append(self) -> tuple[np.ndarray, int]:
        """Write the last token of every decoding sequence; returns their slots, and copies made."""
        slots = self._decoding
        if not len(slots):
            return slots, 0
        tokens = self._slots.output_tokens[slots, self._slots.num_generated[slots] - 1]
        return slots, len(self.manager.append_slots_batch(self._slots.rows[slots], tokens))

    def _refresh(self) -> None:
        """Bring `_decoding` and `_prefilling` up to date with the running jobs."""
        if self._running_changed:
            slots = [slot for job in self._running for slot in job.slots]
            self._decoding = np.array(slots, dtype=np.int64)
            self._prefilling = [job for job in self._running if not job.is_decoding]
            self._running_changed = False

    def _finish_decodes(self, decoding: np.ndarray) -> None:
        """Note the tokens that a step sampled, and end the sequences that have all of theirs."""
        self._slots.num_generated[decoding] += 1
        self.metrics.num_output_tokens += len(decoding)
        done = self._slots.num_generated[decoding] == self._slots.num_output[decoding]
        if np.count_nonzero(done):
            ended = set(decoding[done].tolist())
            for job in [job for job in self._running if not ended.isdisjoint(job.slots)]:
                self._end_finished(job)

    def _end_finished(self, job: _Job) -> None:
        """Free the sequences of a decoding job that have all their tokens, and maybe the job."""
        num_generated = self._slots.num_generated[job.slots].tolist()
        num_output = job.request.num_output_tokens
        ended = [i for i, count in enumerate(num_generated) if count == num_output]
        if not ended:
            return
        self._free([job.group.seqs[i] for i in ended])
        self._slots.give_back([job.slots[i] for i in ended])
        for i in reversed(ended):
            for parallel in (job.samples, job.rows, job.slots, job.group.seqs):
                del parallel[i]
            self.metrics.sample_finished(job.record, self._now, num_output)
        self._num_seats += len(ended)
        self._running_changed = True
        if not job.samples:
            self._running.remove(job)

    def _free(self, seqs: list[Sequence]) -> None:
        for seq in seqs:
            self.manager.access_all_blocks_in_seq(seq, self._now)
            seq.status = SequenceStatus.FINISHED
        self.manager.free_many(seqs)

    # -- preemption

    def _preempt(self, job: _Job) -> None:
        """Take all GPU blocks from a job that is off the running ones already."""
        self._num_seats += len(job.samples)
        by_swap = self._scheduler.preemption is Preemption.swap
        if by_swap and self.manager.can_swap_out(job.group):
            self._swap_out(job)
        else:
            self._recompute(job)

    def _swap_out(self, job: _Job) -> None:
        for seq in job.group.seqs:
            self.manager.access_all_blocks_in_seq(seq, self._now)
        # Sequences are told of their tokens only here, where the manager must know what is missing.
        for seq, slot in zip(job.group.seqs, job.slots, strict=False):
            have = seq.num_tokens - job.request.num_prompt_tokens
            tokens = self._slots.output_tokens[slot, have : self._slots.num_generated[slot]]
            seq.append_token_ids(tokens)
        num_moved = len(self.manager.swap_out(job.group))
        self._num_moved_blocks += num_moved
        self.metrics.swapped_out(num_moved)
        job.swapped_generated = self._slots.num_generated[job.slots].tolist()
        self._stop_decoding(job)
        self._swapped.appendleft(job)

    def _swap_in(self) -> bool:
        """Bring the first swapped job back if it can come and grow; says whether it did."""
        job = self._swapped[0]
        status = self.manager.can_swap_in(job.group)
        if status is not AllocStatus.OK and self._running:
            return False
        num_moved = len(self.manager.swap_in(self._swapped.popleft().group))
        self._num_moved_blocks += num_moved
        self.metrics.swapped_in(num_moved)
        self._enter(job)
        if job.swapped_generated:
            self._start_decoding(job, job.swapped_generated)
            job.swapped_generated = []
        return True

    def _recompute(self, job: _Job) -> None:
        """Free all blocks; each sample then waits by itself, before all that never ran."""
        if job.is_decoding:
            num_generated = self._slots.num_generated[job.slots].tolist()
            num_computed = self.manager.tables.seq_lens[job.rows].tolist()
            parts = list(zip(([s] for s in job.samples), num_generated, num_computed, strict=True))
        else:
            parts = [(job.samples, job.num_generated, job.num_computed)]
        self._free(job.group.seqs)
        self._stop_decoding(job)
        for samples, generated, computed in reversed(parts):
            self._waiting.appendleft(
                _Job(job.request, samples, job.record, generated, computed, was_preempted=True)
            )
        self.metrics.recompute_preemptions += 1


def _extended(array: np.ndarray, more: list[int]) -> np.ndarray:
    return np.concatenate([array, np.array(more, dtype=np.int64)]) if more else array


_NO_SLOTS = np.zeros(0, dtype=np.int64)
