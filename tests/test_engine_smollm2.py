"""SmolLM2-135M-Instruct, real weights, plain-torch kernels: its greedy tokens are transformers'.

All in one process (`--dist loadgroup`), because reading the weights takes longer than a test.
"""

import functools

import pytest
import torch

from experiments.config import Preemption
from experiments.decoding import SamplingParams
from experiments.engine import Engine
from experiments.models import LoadedModel, generate_with_transformers, load_model
from tests.engine_tools import all_texts, first_texts, make_engine, run
from tests.test_engine_kv import recorded_kv

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("smollm2")]

NUM_TOKENS = 8
TEXTS = (
    "The capital of France is",
    "Once upon a time, in a village by the sea, there lived",
    "def fibonacci(n):",
    "<|im_start|>user\nName three colours of the rainbow.<|im_end|>\n<|im_start|>assistant\n",
)


@pytest.fixture(scope="module")
def smollm2() -> LoadedModel:
    return load_model("smollm2")


@pytest.fixture(scope="module")
def prompts(smollm2: LoadedModel) -> list[tuple[int, ...]]:
    return [tuple(smollm2.tokenizer(text).input_ids) for text in TEXTS]


@pytest.fixture(scope="module")
def expected(smollm2: LoadedModel, prompts: list[tuple[int, ...]]) -> list[list[int]]:
    stops = smollm2.stop_token_ids
    return [generate_with_transformers(smollm2, list(p), NUM_TOKENS, stops)[0] for p in prompts]


@pytest.fixture
def params(smollm2: LoadedModel) -> SamplingParams:
    return SamplingParams(NUM_TOKENS, stop_token_ids=smollm2.stop_token_ids)


@pytest.fixture
def engine_of(smollm2: LoadedModel) -> functools.partial[Engine]:
    return functools.partial(make_engine, smollm2)


def test_the_capital_of_france_is_paris(smollm2, prompts, params, engine_of) -> None:
    [text] = first_texts(run(engine_of(), prompts[:1], params))
    assert smollm2.tokenizer.decode(text).startswith(" Paris.")


@pytest.mark.parametrize("caching", [False, True], ids=["off", "on"])
def test_a_batch_of_unrelated_prompts(prompts, expected, params, engine_of, caching) -> None:
    engine = engine_of(enable_caching=caching)
    assert first_texts(run(engine, prompts, params)) == expected


def test_a_warm_cache(prompts, expected, params, engine_of) -> None:
    engine = engine_of()
    for _ in range(2):
        assert [first_texts(run(engine, [p], params))[0] for p in prompts] == expected
    assert engine.stats.prompt_tokens_skipped == sum((len(p) - 1) // 4 * 4 for p in prompts)


def test_forced_eviction(prompts, expected, params, engine_of) -> None:
    engine = engine_of(num_gpu_blocks=8)
    for _ in range(2):
        assert [first_texts(run(engine, [p], params))[0] for p in prompts] == expected
    assert engine.manager.get_stats().evictions > 0


@pytest.mark.parametrize("preemption", Preemption)
def test_preemption(prompts, expected, params, engine_of, preemption) -> None:
    engine = engine_of(num_gpu_blocks=11, num_cpu_blocks=32, preemption=preemption)
    assert first_texts(run(engine, prompts, params)) == expected
    counts = engine.stats
    if preemption is Preemption.swap:
        assert counts.preemptions_swap > 0
        assert counts.swapped_in_blocks > 0
    else:
        assert counts.preemptions_recompute > 0


def test_four_forks(prompts, expected, engine_of, smollm2) -> None:
    engine = engine_of()
    params = SamplingParams(NUM_TOKENS, n=4, stop_token_ids=smollm2.stop_token_ids)
    assert all_texts(run(engine, prompts[:2], params)) == [[text] * 4 for text in expected[:2]]
    assert engine.stats.copied_blocks > 0


def test_a_hit_leaves_the_kv_of_a_miss(prompts, params, engine_of) -> None:
    prompt = prompts[3]
    engine = engine_of(fixed_shapes=True)
    with recorded_kv(engine, prompt) as recorded:
        for _ in range(2):
            run(engine, [prompt], SamplingParams(1))
    miss, hit = recorded
    assert engine.stats.prompt_tokens_skipped >= 12
    assert torch.equal(hit, miss)
