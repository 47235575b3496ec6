"""Continuous batching of a real model over the block manager.

A step grows the running requests by a token each, brings swapped ones back, admits waiting ones,
and computes all that in one forward pass: of a prompt only what is not cached. What the block
manager answers is carried out as it comes: copies and swaps before the pass, marks after it.

Requests are served in the order in which they came. When blocks run out, the last running request
gives up its own, by swap if there is room on the CPU, else to be recomputed; tokens that were
chosen are kept in either case.
"""

import bisect
import dataclasses
import time
from collections.abc import Iterable
from collections.abc import Sequence as ListOf
from typing import NamedTuple

import numpy as np
import torch
from tqdm import tqdm

from cache.block_manager import BlockSpaceManager
from cache.copy_on_write import CopyOnWriteTracker
from cache.interfaces import AllocStatus
from cache.sequence import Sequence, SequenceGroup, SequenceStatus
from kernels.kv_cache import KVCache

from .attention import OPS
from .config import Preemption
from .decoding import SamplingParams, start_decoding
from .engine_options import EngineOptions, EngineStats
from .jobs import Job, RequestOutput
from .model_runner import ModelRunner, Span
from .models import LoadedModel
from .ranges import InputError


class Engine:
    """Serves requests with a model whose KV lies in blocks.

    Attributes:
        manager, kv_cache: which blocks, and what is in them.
        stats: what happened so far.
        occupancy: after each step, (seconds since the first one began, blocks in use, evictable,
            free).
    """

    def __init__(self, loaded: LoadedModel, options: EngineOptions) -> None:
        config = loaded.model.config
        self.loaded = loaded
        self.options = options
        self.manager = BlockSpaceManager(
            options.block_size,
            options.num_gpu_blocks,
            options.num_cpu_blocks,
            options.watermark,
            enable_caching=options.enable_caching,
            evictor=options.evictor,
            hash_algorithm=options.hash_algorithm,
        )
        self.kv_cache = KVCache(
            config.num_hidden_layers,
            options.num_gpu_blocks,
            options.block_size,
            config.num_key_value_heads,
            loaded.head_size,
            loaded.model.dtype,
            loaded.model.device,
            num_host_blocks=options.num_cpu_blocks,
            use_kernels=OPS[options.kernels].is_triton,
        )
        self.runner = ModelRunner(loaded, self.manager, self.kv_cache, options.kernels)
        self.stats = EngineStats()
        self.occupancy: list[tuple[float, int, int, int]] = []
        self._waiting: list[Job] = []
        self._running: list[Job] = []
        self._swapped: list[Job] = []
        self._num_requests = 0
        self._num_seqs_made = 0
        self._start_s: float | None = None

    # -- requests

    def generate(
        self,
        prompts: Iterable[ListOf[int]],
        params: SamplingParams | None = None,
        progress: bool = False,
    ) -> list[RequestOutput]:
        """Add all prompts at once, run until they are finished; outputs are in their order.

        Raises InputError as `add_request` does, with none of them added, and ValueError while
        other requests are unfinished.
        """
        if self.has_unfinished():
            raise ValueError("other requests are unfinished: take steps until they are")
        self._waiting = [self._new_job(prompt, params) for prompt in prompts]
        outputs: list[RequestOutput] = []
        quiet = None if progress else True
        with tqdm(total=len(self._waiting), unit="request", disable=quiet) as bar:
            while self.has_unfinished():
                finished = self.step()
                outputs += finished
                bar.update(len(finished))
        return sorted(outputs, key=lambda output: output.request_id)

    def add_request(self, prompt: ListOf[int], params: SamplingParams | None = None) -> int:
        """Queue a prompt and return its request id, which counts up from 0.

        max_tokens is cut to what the model's context leaves.

        Raises InputError for an empty prompt, one that leaves no room in the context, one with
        tokens outside the vocabulary, or one that alone would not fit into the pool.
        """
        job = self._new_job(prompt, params)
        self._waiting.append(job)
        return job.request_id

    def has_unfinished(self) -> bool:
        """Whether any request is waiting, running or swapped out."""
        return bool(self._waiting or self._running or self._swapped)

    def _new_job(self, prompt: ListOf[int], params: SamplingParams | None) -> Job:
        params = params or SamplingParams()
        prompt = [int(token) for token in prompt]
        context_len = self.loaded.context_len
        vocab_size = self.loaded.model.config.vocab_size
        if not prompt:
            raise InputError("the prompt is empty: expected at least one token")
        if len(prompt) >= context_len:
            raise InputError(
                f"the prompt has {len(prompt)} tokens: expected fewer than the context of "
                f"{self.loaded.name}, which is {context_len}"
            )
        if min(prompt) < 0 or max(prompt) >= vocab_size:
            wrong = next(token for token in prompt if not 0 <= token < vocab_size)
            raise InputError(
                f"the prompt has token {wrong}: {self.loaded.name} knows 0 to {vocab_size - 1}"
            )
        max_tokens = min(params.max_tokens, context_len - len(prompt))
        params = dataclasses.replace(params, max_tokens=max_tokens)
        self._require_room(len(prompt), params)
        self._num_requests += 1
        return Job(
            self._num_requests - 1, prompt, params, start_decoding(params), time.perf_counter()
        )

    def _require_room(self, num_prompt_tokens: int, params: SamplingParams) -> None:
        """Raise InputError unless the request, alone, can be served to its end."""
        block_size, manager = self.options.block_size, self.manager
        if params.width > self.options.max_num_seqs:
            raise InputError(
                f"the request needs {params.width} sequences: expected at most "
                f"max_num_seqs={self.options.max_num_seqs}"
            )
        # The last token is never written. Several sequences share the prompt's full blocks.
        num_slots = num_prompt_tokens + params.max_tokens - 1 + self.options.num_lookahead_slots
        num_shared = num_prompt_tokens // block_size if params.width > 1 else 0
        needed = num_shared + params.width * (-(-num_slots // block_size) - num_shared)
        admitted = -(-(num_prompt_tokens + self.options.num_lookahead_slots) // block_size)
        needed = max(needed, admitted + manager.watermark_blocks)
        if needed > manager.get_num_total_gpu_blocks():
            raise InputError(
                f"a prompt of {num_prompt_tokens} tokens with {params.width} x "
                f"{params.max_tokens} new ones needs {needed} blocks of {block_size} tokens: the "
                f"pool has {manager.get_num_total_gpu_blocks()}"
            )

    # -- one step

    def step(self) -> list[RequestOutput]:
        """Schedule and compute one step; returns the requests that it finished."""
        if self._start_s is None:
            self._start_s = time.perf_counter()
        plan = _StepPlan(self.options.max_num_batched_tokens)
        has_preempted = self._continue_running(plan)
        if not has_preempted:
            self._swap_in(plan)
            self._admit(plan)
        assert plan.work or has_preempted or not self.has_unfinished(), "no request can go on"
        self._make_copies(plan)
        self._compute(plan)
        self._record_occupancy()
        self.stats.num_steps += 1
        finished = []
        for job in dict.fromkeys(work.job for work in plan.work):
            if len(job.logits) == len(job.seqs):
                finished += self._advance(job)
        return finished

    def _continue_running(self, plan: "_StepPlan") -> bool:
        """Schedule the running jobs, preempting from the end; says whether any was."""
        has_preempted = False
        for job in list(self._running):
            if job not in self._running:
                continue
            self._feed(job)
            while not self.manager.can_append_slots(job.group, self.options.num_lookahead_slots):
                victim = self._running.pop()
                self._preempt(victim, plan)
                has_preempted = True
                if victim is job:
                    break
            else:
                self._schedule(job, plan)
        return has_preempted

    def _feed(self, job: Job) -> None:
        """Tell the sequences of a forked job of the tokens that this step computes."""
        if not job.is_forked:
            return
        for index, seq in enumerate(job.seqs):
            target = job.target(index)
            end = self._chunk_end(job, seq.num_computed_tokens, len(target))
            seq.append_token_ids(target[seq.num_tokens : end])

    def _chunk_end(self, job: Job, start: int, end: int) -> int:
        """Where a chunk from `start` ends that is to reach `end`."""
        if not self.options.fixed_shapes:
            return min(end, start + self.options.max_num_batched_tokens)
        if start >= len(job.prompt):
            return min(end, start + 1)
        size = self.options.block_size
        return min(len(job.prompt), (start // size + 1) * size, end)

    def _schedule(self, job: Job, plan: "_StepPlan") -> None:
        """Take the slots of a job that has room, and plan what its sequences compute."""
        for seq in job.seqs:
            pairs = self.manager.append_slots(seq, self.options.num_lookahead_slots)
            plan.copies.record(pairs[:, 0], pairs[:, 1])
        for index, seq in enumerate(job.seqs):
            start = seq.num_computed_tokens
            # A token that was appended is computed in this step: others may share its block.
            end = seq.num_tokens
            if not job.is_forked:
                end = self._chunk_end(job, start, end)
                if end > start + plan.budget:
                    end = start if self.options.fixed_shapes else start + plan.budget
            if end > start:
                plan.add(job, index, Span(seq, start, end - start))

    def _make_copies(self, plan: "_StepPlan") -> None:
        """Make the copies that are due, before the model writes or a swap takes their blocks.

        A block may be copied away, given up and taken by a swap within one step.
        """
        self.stats.copied_blocks += len(plan.copies)
        self.kv_cache.apply(copies=plan.copies.drain())

    def _compute(self, plan: "_StepPlan") -> None:
        """Run the model over the plan's spans, and note what is computed."""
        if not plan.work:
            return
        if self.options.fixed_shapes:
            # Longest first: who shares a block that fills in this step reads it afterwards.
            plan.work.sort(key=lambda work: -work.span.count)
            logits = torch.cat([self.runner.forward([work.span]) for work in plan.work])
        else:
            logits = self.runner.forward([work.span for work in plan.work])
        rows = self.manager.rows_of([work.span.seq for work in plan.work])
        ends = np.array([work.span.end for work in plan.work], dtype=np.int64)
        self.manager.mark_blocks_as_computed_batch(rows, ends)
        for (job, index, span), row in zip(plan.work, logits, strict=True):
            span.seq.num_computed_tokens = span.end
            if span.end == len(job.target(index)):
                job.logits[index] = row
            num_prompt = min(max(len(job.prompt) - span.start, 0), span.count)
            self.stats.prompt_tokens_computed += num_prompt
            self.stats.generated_tokens_computed += span.count - num_prompt

    def _record_occupancy(self) -> None:
        state = self.manager.get_gpu_occupancy()
        now = time.perf_counter() - self._start_s
        self.occupancy.append((now, state.num_in_use, state.num_evictable, state.num_free))
        if state.num_in_use > self.stats.peak_blocks_in_use:
            rows = self.manager.rows_of([seq for job in self._running for seq in job.seqs])
            self.stats.peak_blocks_in_use = state.num_in_use
            num_blocks = self.manager.tables.num_blocks[rows]
            self.stats.unshared_blocks_at_peak = int(num_blocks.sum())

    # -- admission

    def _admit(self, plan: "_StepPlan") -> None:
        while self._waiting and not self._swapped and plan.budget > 0:
            job = self._waiting[0]
            if job.params.width > self._num_free_seats():
                return
            if job.group is None:
                job.prefix = job.common_prefix()
                job.group = SequenceGroup(job.request_id, [self._new_sequence(job.prefix)])
            status = self.manager.can_allocate(job.group, self.options.num_lookahead_slots)
            # One that has grown may be refused for the watermark alone: in an idle pool it may run.
            if status is not AllocStatus.OK and self._running:
                return
            self.manager.allocate(job.group, self.options.num_lookahead_slots)
            self._waiting.pop(0)
            seq = job.seqs[0]
            seq.status = SequenceStatus.RUNNING
            seq.num_computed_tokens = self.manager.get_num_cached_tokens(seq)
            self.stats.prompt_tokens_skipped += min(seq.num_computed_tokens, len(job.prompt))
            if job.num_cached_tokens is None:
                job.num_cached_tokens = seq.num_computed_tokens
            self._enter(job)
            self._schedule(job, plan)

    def _num_free_seats(self) -> int:
        return self.options.max_num_seqs - sum(job.params.width for job in self._running)

    def _enter(self, job: Job) -> None:
        bisect.insort(self._running, job, key=lambda job: job.request_id)

    def _new_sequence(self, token_ids: ListOf[int]) -> Sequence:
        self._num_seqs_made += 1
        return Sequence(self._num_seqs_made, token_ids)

    # -- what the logits lead to

    def _advance(self, job: Job) -> list[RequestOutput]:
        """Choose the next tokens of a job whose sequences all have logits, or fork its paths."""
        logits = torch.stack([job.logits[index] for index in range(len(job.seqs))])
        job.logits = {}
        if not job.is_forked and len(job.decoding.live) > 1:
            # Recomputed: the tokens after the common prefix were chosen before.
            self._follow(job, [0] * len(job.decoding.live))
            return []
        branches = job.decoding.advance(logits)
        if job.first_token_s is None:
            job.first_token_s = time.perf_counter()
        self._follow(job, [branch.parent for branch in branches])
        return [] if branches else [self._finish(job)]

    def _follow(self, job: Job, parents: list[int]) -> None:
        """Give each live path a sequence: its parent's, or a fork of it; free those without one."""
        old, new, seen = job.seqs, [], set()
        for parent in parents:
            seq = old[parent]
            if parent in seen:
                self._num_seqs_made += 1
                child = seq.fork(self._num_seqs_made)
                self.manager.fork(seq, child)
                seq = child
            seen.add(parent)
            new.append(seq)
        ended = [seq for index, seq in enumerate(old) if index not in seen]
        self._free(ended)
        job.group.seqs = new
        job.is_forked = True

    def _finish(self, job: Job) -> RequestOutput:
        self._running.remove(job)
        now = time.perf_counter()
        completions = job.decoding.completions()
        output = RequestOutput(
            job.request_id,
            completions,
            len(job.prompt),
            job.num_cached_tokens,
            job.first_token_s - job.arrival_s,
            now - job.arrival_s,
        )
        self.stats.output_tokens += sum(len(c.token_ids) for c in completions)
        return output

    def _free(self, seqs: list[Sequence]) -> None:
        for seq in seqs:
            self.manager.access_all_blocks_in_seq(seq, self.stats.num_steps)
            seq.status = SequenceStatus.FINISHED
        if seqs:
            self.manager.free_many(seqs)

    # -- preemption

    def _preempt(self, job: Job, plan: "_StepPlan") -> None:
        """Take all GPU blocks from a job that is off the running ones already."""
        by_swap = self.options.preemption is Preemption.swap
        if by_swap and self.manager.can_swap_out(job.group):
            pairs = self.manager.swap_out(job.group)
            self._make_copies(plan)
            self.kv_cache.apply(swap_out=pairs)
            self.stats.swapped_out_blocks += len(pairs)
            self.stats.preemptions_swap += 1
            bisect.insort(self._swapped, job, key=lambda job: job.request_id)
            return
        self._free(job.seqs)
        job.group, job.is_forked, job.logits = None, False, {}
        self.stats.preemptions_recompute += 1
        bisect.insort(self._waiting, job, key=lambda job: job.request_id)

    def _swap_in(self, plan: "_StepPlan") -> None:
        while self._swapped and self._swapped[0].params.width <= self._num_free_seats():
            job = self._swapped[0]
            self._feed(job)
            status = self.manager.can_swap_in(job.group, self.options.num_lookahead_slots)
            if status is not AllocStatus.OK and self._running:
                return
            pairs = self.manager.swap_in(job.group)
            self._make_copies(plan)
            self.kv_cache.apply(swap_in=pairs)
            self.stats.swapped_in_blocks += len(pairs)
            self._enter(self._swapped.pop(0))
            self._schedule(job, plan)


class _Work(NamedTuple):
    """What one sequence of a job computes in a step."""

    job: Job
    index: int
    """Of the sequence in the job."""
    span: Span


class _StepPlan:
    """What one step moves and computes."""

    def __init__(self, budget: int) -> None:
        self.budget = budget
        """Tokens that may still be scheduled."""
        self.work: list[_Work] = []
        # Sequences are appended one by one: their copies must make sense all at once.
        self.copies = CopyOnWriteTracker()

    def add(self, job: Job, index: int, span: Span) -> None:
        self.work.append(_Work(job, index, span))
        self.budget = max(0, self.budget - span.count)
