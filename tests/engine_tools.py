"""What the tests of the engine share: tiny models, prompts, and engines over poisoned caches."""

import functools

import numpy as np
import torch

from experiments.decoding import SamplingParams
from experiments.engine import Engine
from experiments.engine_options import EngineOptions
from experiments.jobs import RequestOutput
from experiments.models import LoadedModel, generate_with_transformers, load_model

torch.set_num_threads(1)

FAMILIES = ("tiny_llama", "tiny_qwen3", "tiny_gemma2", "tiny_gpt_oss")
VOCAB = 128
NUM_TOKENS = 8

Tokens = tuple[int, ...]


@functools.cache
def tiny(name: str) -> LoadedModel:
    return load_model(name)


def random_prompt(length: int, seed: int = 0) -> Tokens:
    return tuple(np.random.default_rng((length, seed)).integers(0, VOCAB, length).tolist())


@functools.cache
def expected(name: str, prompt: Tokens, max_tokens: int = NUM_TOKENS) -> list[int]:
    """The greedy tokens of transformers."""
    return generate_with_transformers(tiny(name), list(prompt), max_tokens)[0]


def make_engine(loaded: LoadedModel, **options: object) -> Engine:
    """An engine with small blocks, whose cache holds NaN wherever nothing was written yet."""
    engine = Engine(loaded, EngineOptions(**({"block_size": 4, "num_gpu_blocks": 96} | options)))
    cache = engine.kv_cache
    for part in (cache.key_caches, cache.value_caches):
        for tensor in part:
            tensor.fill_(float("nan"))
    return engine


def run(
    engine: Engine, prompts: list[Tokens], params: SamplingParams | None = None
) -> list[RequestOutput]:
    """Run all prompts together, checking the block manager after each step."""
    params = params or SamplingParams(NUM_TOKENS)
    ids = [engine.add_request(prompt, params) for prompt in prompts]
    outputs: dict[int, RequestOutput] = {}
    while engine.has_unfinished():
        outputs |= {output.request_id: output for output in engine.step()}
        engine.manager.check_integrity()
    assert_nothing_is_left(engine)
    return [outputs[request_id] for request_id in ids]


def assert_nothing_is_left(engine: Engine) -> None:
    engine.manager.check_integrity()
    assert engine.manager.get_num_free_gpu_blocks() == engine.options.num_gpu_blocks
    assert engine.manager.get_num_free_cpu_blocks() == engine.options.num_cpu_blocks


def first_texts(outputs: list[RequestOutput]) -> list[list[int]]:
    return [output.completions[0].token_ids for output in outputs]


def all_texts(outputs: list[RequestOutput]) -> list[list[list[int]]]:
    return [[text.token_ids for text in output.completions] for output in outputs]
