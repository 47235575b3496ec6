"""Random engines and requests: whatever is configured, texts are those of one request alone.

Unwritten KV is NaN, so that a block that is read before it was written, or after it was given to
another, shows in the texts.
"""

from dataclasses import replace

import numpy as np
import pytest

from experiments.config import Preemption
from experiments.decoding import SamplingParams
from experiments.engine import Engine
from experiments.ranges import InputError
from tests.engine_tools import (
    FAMILIES,
    Tokens,
    all_texts,
    assert_nothing_is_left,
    make_engine,
    random_prompt,
    run,
    tiny,
)

# In 208 a block is swapped in, given up for a cached one and swapped in for another in one step.
SEEDS = (*range(24), 208)
MAX_STEPS = 2000


def draw_params(rng: np.random.Generator) -> SamplingParams:
    params = SamplingParams(max_tokens=int(rng.integers(1, 10)), seed=int(rng.integers(100)))
    match rng.integers(4):
        case 0:
            return params
        case 1:
            return replace(params, n=int(rng.integers(2, 5)))
        case 2:
            return replace(params, n=int(rng.integers(1, 5)), temperature=1.0, top_k=4)
        case _:
            stop = tuple(rng.integers(0, 128, 20).tolist())
            return replace(params, beam_width=int(rng.integers(1, 4)), stop_token_ids=stop)


def draw_requests(rng: np.random.Generator) -> list[tuple[Tokens, SamplingParams]]:
    """Prompts that share their starts with one another, and some of them everything."""
    stem = random_prompt(24, seed=int(rng.integers(5)))
    requests = []
    for _ in range(8):
        own = random_prompt(int(rng.integers(1, 14)), seed=int(rng.integers(3)))
        requests.append((stem[: int(rng.integers(0, 25))] + own, draw_params(rng)))
    return requests


def draw_engine(rng: np.random.Generator, name: str) -> Engine:
    block_size = int(rng.choice([1, 3, 4, 8, 16]))
    fixed_shapes = bool(rng.random() < 0.25)
    return make_engine(
        tiny(name),
        block_size=block_size,
        num_gpu_blocks=int(rng.integers(40, 160)) // block_size + 4,
        num_cpu_blocks=int(rng.integers(0, 100)) // block_size,
        watermark=float(rng.choice([0.0, 0.1])),
        enable_caching=bool(rng.random() < 0.75),
        evictor=str(rng.choice(["lru", "fifo"])),
        preemption=Preemption(rng.choice(list(Preemption))),
        max_num_seqs=int(rng.integers(4, 16)),
        max_num_batched_tokens=block_size if fixed_shapes else int(rng.integers(1, 40)),
        num_lookahead_slots=int(rng.choice([0, 0, 3])),
        fixed_shapes=fixed_shapes,
    )


@pytest.mark.parametrize("seed", SEEDS)
def test_texts_are_those_of_one_request_alone(seed: int) -> None:
    rng = np.random.default_rng(seed)
    name = FAMILIES[seed % len(FAMILIES)]
    engine = draw_engine(rng, name)
    requests = draw_requests(rng)
    texts, outputs = {}, {}
    waiting = list(requests)
    for _ in range(MAX_STEPS):
        # Requests come while others are in work.
        while waiting and rng.random() < 0.3:
            prompt, params = waiting.pop()
            try:
                request_id = engine.add_request(prompt, params)
            except InputError as error:
                if "the pool has" not in str(error):
                    raise
                continue
            alone = make_engine(tiny(name), enable_caching=False, num_gpu_blocks=200)
            texts[request_id] = all_texts(run(alone, [prompt], params))[0]
        outputs |= {output.request_id: output for output in engine.step()}
        engine.manager.check_integrity()
        if not waiting and not engine.has_unfinished():
            break
    assert {i: all_texts([output])[0] for i, output in outputs.items()} == texts
    assert texts
    assert_nothing_is_left(engine)
