"""Seeded generators: conversations, few-shot prompts, and prompts that share nothing."""

import heapq
import itertools
import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from .requests import Request, Segment, Workload

LENGTH_SIGMA = 0.6
"""Of the normal distribution whose exponential the lengths are."""


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
