"""The KV of a prompt's tokens is equal to the last bit, hit or miss, with one fixed configuration.

Fixed is the shape of every matrix product: `fixed_shapes` computes a sequence alone, and a prompt
a block at a time from block boundaries on, where a hit ends too. Other sizes of chunk or batch
round otherwise, by about 1e-6.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch

from cache.sequence import Sequence
from experiments.config import Preemption
from experiments.decoding import SamplingParams
from experiments.engine import Engine
from tests.engine_tools import FAMILIES, Tokens, make_engine, random_prompt, run, tiny

PROMPT = random_prompt(22)
OTHERS = [random_prompt(length, seed=3) for length in (2, 9, 17)]
# It shares 3 full blocks and a part of the fourth.
RELATED = PROMPT[:14] + random_prompt(5, seed=4)
PARAMS = SamplingParams(6)


@contextmanager
def recorded_kv(engine: Engine, prompt: Tokens) -> Iterator[list[torch.Tensor]]:
    """The KV of the prompt's tokens whenever a sequence that starts with it is freed.

    Float32 [2 * num_layers, len(prompt), num_kv_heads, head_size] each.
    """
    recorded = []
    free_many = engine.manager.free_many

    def record(seqs: list[Sequence]) -> None:
        for seq in seqs:
            computed = seq.num_computed_tokens >= len(prompt)
            if computed and tuple(seq.token_ids[: len(prompt)].tolist()) == prompt:
                slots = engine.manager.get_slot_mapping(seq, 0, len(prompt))
                caches = engine.kv_cache.key_caches + engine.kv_cache.value_caches
                recorded.append(torch.stack([cache.flatten(0, 1)[slots] for cache in caches]))
        free_many(seqs)

    engine.manager.free_many = record
    try:
        yield recorded
    finally:
        del engine.manager.free_many


def kv_of(engine: Engine, prompts: list[Tokens], params: SamplingParams = PARAMS) -> torch.Tensor:
    """The KV of `PROMPT`, one of these, of which all copies must be equal."""
    with recorded_kv(engine, PROMPT) as recorded:
        run(engine, prompts, params)
    assert recorded
    for kv in recorded:
        assert torch.equal(kv, recorded[0])
    assert not recorded[0].isnan().any()
    return recorded[0]


@pytest.fixture(params=FAMILIES)
def name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def cold(name: str) -> torch.Tensor:
    return kv_of(make_engine(tiny(name), fixed_shapes=True, enable_caching=False), [PROMPT])


def test_a_hit_leaves_the_kv_of_a_miss(name: str, cold: torch.Tensor) -> None:
    engine = make_engine(tiny(name), fixed_shapes=True)
    run(engine, [RELATED], PARAMS)
    assert torch.equal(kv_of(engine, [PROMPT]), cold)
    assert engine.stats.prompt_tokens_skipped == 12
    assert torch.equal(kv_of(engine, [PROMPT]), cold)
    assert engine.stats.prompt_tokens_skipped == 12 + 20


def test_a_batch_leaves_the_kv_of_one_alone(name: str, cold: torch.Tensor) -> None:
    engine = make_engine(tiny(name), fixed_shapes=True)
    assert torch.equal(kv_of(engine, [*OTHERS, RELATED, PROMPT]), cold)


def test_eviction_leaves_the_kv_of_a_miss(name: str, cold: torch.Tensor) -> None:
    engine = make_engine(tiny(name), fixed_shapes=True, num_gpu_blocks=9)
    for prompt in (PROMPT, random_prompt(20, seed=5)):
        run(engine, [prompt], PARAMS)
    assert torch.equal(kv_of(engine, [PROMPT]), cold)
    assert engine.manager.get_stats().evictions > 0
    assert 0 < engine.stats.prompt_tokens_skipped < 20


@pytest.mark.parametrize("preemption", Preemption)
def test_preemption_leaves_the_kv_of_a_miss(
    name: str, cold: torch.Tensor, preemption: Preemption
) -> None:
    engine = make_engine(
        tiny(name),
        fixed_shapes=True,
        num_gpu_blocks=10,
        num_cpu_blocks=32,
        preemption=preemption,
    )
    # The last one is the one that is preempted.
    assert torch.equal(kv_of(engine, [random_prompt(13, seed=6), PROMPT]), cold)
    preempted = engine.stats.preemptions_recompute + engine.stats.preemptions_swap
    assert preempted > 0


def test_forks_leave_the_kv_of_one_alone(name: str, cold: torch.Tensor) -> None:
    engine = make_engine(tiny(name), fixed_shapes=True)
    params = SamplingParams(6, n=4, temperature=2.0)
    assert torch.equal(kv_of(engine, [PROMPT], params), cold)
    assert engine.stats.copied_blocks >= 3


def test_every_chunk_has_one_shape(name: str) -> None:
    """What the equality rests on: passes of one span each that end where a block does."""
    engine = make_engine(tiny(name), fixed_shapes=True)
    spans = []
    forward = engine.runner.forward
    engine.runner.forward = lambda batch: spans.append(batch) or forward(batch)
    run(engine, [*OTHERS, PROMPT], PARAMS)
    assert all(len(batch) == 1 for batch in spans)
    prompts = {len(prompt) for prompt in [*OTHERS, PROMPT]}
    for [span] in spans:
        assert span.count == 1 or span.start % 4 == 0
        assert span.end % 4 == 0 or span.count == 1 or span.end in prompts


def test_without_fixed_shapes_the_kv_is_equal_within_rounding(name: str) -> None:
    kv = [
        kv_of(make_engine(tiny(name), max_num_batched_tokens=budget), [PROMPT])
        for budget in (5, 64)
    ]
    np.testing.assert_allclose(*kv, rtol=1e-4, atol=1e-4)
