"""One trace through one cache, and what is measured of it.

What several points of a sweep have in common is computed once a process. So it lives here and not
in the app: launchers that send the app's own functions to other processes send them anew each time.
"""

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import TypeVar

import numpy as np
from tqdm import tqdm

from cache.content_hash import ContentHasher
from cache.evictor import Future, make_evictor, make_policy

from .cache_models import KeyPool, Outcome, TokenPool, replay_blocks, replay_flat
from .config import AUTO, UNBOUNDED, CacheConfig, CacheModel, EvictorName, ReplayConfig, ServeConfig
from .references import References, block_hashes, make_references
from .roofline import Roofline, kv_bytes_per_token, pool_size
from .workloads import make_workload

MAX_KEPT_TRACES = 2
MAX_KEPT_HITS = 256


class Replay:
    """One trace through one cache."""

    def __init__(self, config: ReplayConfig) -> None:
        self.config = config
        start = perf_counter()
        block_size, seed = config.cache.block_size, config.seed
        # A sweep reads its trace once.
        self._trace_key = f"{config.workload}, {_modified(config)}, {block_size}, {seed}"
        self.references = _once(
            _references,
            self._trace_key,
            lambda: make_references(make_workload(config.workload, seed), block_size, seed),
        )
        self._load_wall_s = perf_counter() - start
        # What the roofline and the size of a pool need of the configuration of `serve`.
        cache = CacheConfig(block_size=config.cache.block_size, num_gpu_blocks=AUTO)
        self._serving = ServeConfig(cache=cache, model=config.model, gpu=config.gpu)
        self._roofline = Roofline(self._serving)
        self.capacity = self._capacity()

    def _capacity(self) -> int:
        """Blocks of the cache."""
        wanted = self.config.cache.num_gpu_blocks
        if wanted == AUTO:
            return pool_size(self._serving).num_gpu_blocks
        if wanted == UNBOUNDED:
            # A block for each content, and one for each partly filled end of a prompt.
            references = self.references
            return len(np.unique(references.prefix_keys)) + len(references.requests)
        return wanted

    def run(self, progress: bool = False) -> Outcome:
        """Replay the trace."""
        cache, references = self.config.cache, self.references
        policy = self.config.evictor.name.value
        bar = tqdm(
            total=len(references.requests),
            desc="requests",
            unit="req",
            leave=False,
            disable=None if progress else True,
        )
        with bar:
            if cache.model is CacheModel.flat:
                uses = ([key] for key in references.content_keys.tolist())
                future = Future(uses) if policy == EvictorName.belady else None
                evictor = make_policy(policy, self.capacity, cache.block_size, future)
                return replay_flat(references, evictor, future, bar.update)
            future = self._future() if policy == EvictorName.belady else None
            if cache.from_tokens:
                make = functools.partial(make_evictor, policy, future=future)
                pool = TokenPool(
                    references, self.capacity, make, self._hasher(), cache.reuse_uncached_first
                )
            else:
                evictor = make_policy(policy, self.capacity, cache.block_size, future)
                pool = KeyPool(references, evictor, cache.reuse_uncached_first)
            seconds = self._seconds if cache.overlap else None
            return replay_blocks(references, pool, self.capacity, seconds, future, bar.update)

    def _hasher(self) -> ContentHasher:
        return ContentHasher(self.config.cache.block_size, self.config.seed)

    def _future(self) -> Future:
        """The uses of every full block, by what the pool calls it."""
        references = self.references
        if self.config.cache.from_tokens:
            hasher = self._hasher()
            return Future(block_hashes(r, hasher).tolist() for r in references.requests)
        keys, starts = references.prefix_keys.tolist(), references.starts.tolist()
        full = references.num_full_blocks.tolist()
        return Future(keys[s : s + n] for s, n in zip(starts, full, strict=False))

    def _seconds(self, index: int, num_hit_tokens: int) -> tuple[float, float]:
        """How long a prompt takes to compute, and how long its request holds its blocks.

        By the roofline of `serve`, in steps of its own: the prompt in one step, each further
        output token in another, with the prompt as context.
        """
        request = self.references.requests[index]
        context = np.array([request.num_prompt_tokens])
        prefill = self._roofline.step_seconds(context - num_hit_tokens, context)
        decode = self._roofline.step_seconds(np.ones(1, dtype=np.int64), context)
        return prefill, prefill + decode * (request.num_output_tokens - 1)

    def metrics(self, progress: bool = False) -> dict[str, float | int]:
        """Replay the trace and say what came of it; each number is defined here."""
        start = perf_counter()
        outcome = self.run(progress)
        wall_s = perf_counter() - start
        references = self.references
        num_tokens, num_blocks = references.num_tokens, references.num_blocks
        hit_tokens, hit_blocks = int(outcome.hit_tokens.sum()), int(outcome.hit_blocks.sum())
        all_tokens, all_blocks = int(num_tokens.sum()), int(num_blocks.sum())
        if self.config.cache.model is CacheModel.flat:
            unbounded_blocks = int(references.repeats.sum())
            unbounded_tokens = int(references.block_tokens[references.repeats].sum())
        else:
            unbounded_blocks = int(references.unbounded_hits.sum())
            unbounded_tokens = unbounded_blocks * references.block_size
        prefill = self._roofline.prefill_seconds
        saved_s = prefill(num_tokens, num_tokens) - prefill(
            num_tokens - outcome.hit_tokens, num_tokens
        )
        reuse = references.reuse
        return {
            # Prompt tokens that need not be computed, over all prompt tokens.
            "token_hit_rate": hit_tokens / all_tokens,
            # Blocks of them, over all blocks that prompts refer to, partly filled ones included;
            # those of refused requests too.
            "block_hit_rate": hit_blocks / all_blocks,
            # The mean over requests of a request's token hit rate.
            "mean_request_token_hit_rate": float((outcome.hit_tokens / num_tokens).mean()),
            # Hit blocks over those of Belady's policy in a cache of the same model and size. In
            # `flat` that is the optimum; in `blocks` others may do better.
            "share_of_belady": _ratio(hit_blocks, self._belady_hits(hit_blocks)),
            # The same two rates for a cache without a bound.
            "unbounded_token_hit_rate": unbounded_tokens / all_tokens,
            "unbounded_block_hit_rate": unbounded_blocks / all_blocks,
            # Tokens that a cache without a bound hits with blocks of one token, but not with
            # blocks of this size, over all prompt tokens: lost to partly filled blocks.
            "token_hit_rate_lost_to_block_size": (
                int(references.shared_tokens.sum())
                - int(references.unbounded_hits.sum()) * references.block_size
            )
            / all_tokens,
            # Cached blocks behind the first missing one of their prompt, over all blocks: lost to
            # chain breaks in `blocks`, hits in `flat`.
            "block_hit_rate_behind_chain_breaks": int(outcome.late_blocks.sum()) / all_blocks,
            "inserted_blocks": outcome.num_insertions,
            "evicted_blocks": outcome.num_evictions,
            # Inserted blocks that were not found again before they were evicted or the trace ended.
            "never_hit_blocks": outcome.num_insertions - outcome.num_reused,
            # Requests of more blocks than the cache has.
            "requests_refused": outcome.num_refused,
            # KV that was not computed anew, over all layers.
            "saved_kv_bytes": hit_tokens * kv_bytes_per_token(self.config.model),
            # Prefill time of all prompts less that of what was not hit, each in a step of its own.
            "saved_gpu_s": float(saved_s.sum()),
            "saved_gpu_share": float(saved_s.sum() / prefill(num_tokens, num_tokens).sum()),
            # Different blocks, and time, between two references to one content.
            **_percentiles("reuse_distance", reuse.distances, "blocks"),
            **_percentiles("reuse_time", reuse.times_s, "s"),
            "requests": len(references.requests),
            "block_references": all_blocks,
            "num_gpu_blocks": self.capacity,
            "load_wall_s": self._load_wall_s,
            "replay_wall_s": wall_s,
        }

    def _belady_hits(self, own: int) -> int:
        """Hit blocks of Belady's policy; a sweep computes them once for each cache."""
        config = self.config
        if config.evictor.name is EvictorName.belady:
            return own
        belady = dataclasses.replace(
            config,
            evictor=dataclasses.replace(config.evictor, name=EvictorName.belady),
            # With tokens it hits the same.
            cache=dataclasses.replace(config.cache, from_tokens=False),
        )
        return _once(
            _belady_hits,
            f"{belady}, {self._trace_key}",
            lambda: int(Replay(belady).run().hit_blocks.sum()),
        )


_references: dict[str, References] = {}
_belady_hits: dict[str, int] = {}
T = TypeVar("T")


def _once(known: dict[str, T], key: str, make: Callable[[], T]) -> T:
    """What `make` returned for this key before, in this process. A few of them are kept."""
    if key not in known:
        limit = MAX_KEPT_TRACES if known is _references else MAX_KEPT_HITS
        if len(known) >= limit:
            del known[next(iter(known))]
        known[key] = make()
    return known[key]


def _modified(config: ReplayConfig) -> int | None:
    """When a workload's file was written last, in nanoseconds."""
    path = Path(getattr(config.workload, "path", "")).expanduser()
    return path.stat().st_mtime_ns if path.is_file() else None


def _percentiles(name: str, values: np.ndarray, unit: str) -> dict[str, float]:
    """Percentiles with linear interpolation, named like reuse_time_p50_s; NaN without values."""
    percents = (50, 90)
    found = np.percentile(values, percents) if len(values) else [float("nan")] * len(percents)
    return {f"{name}_p{p}_{unit}": float(v) for p, v in zip(percents, found, strict=True)}


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else float("nan")
