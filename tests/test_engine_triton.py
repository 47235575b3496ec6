"""The engine with the Triton kernels: tokens and logits of all families, and options that matter.

In the interpreter where there is no GPU, so texts are short.
"""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch

from experiments.config import Preemption
from experiments.decoding import SamplingParams
from experiments.engine import Engine
from experiments.models import LoadedModel, load_model
from tests.engine_tools import (
    FAMILIES,
    all_texts,
    expected,
    first_texts,
    make_engine,
    random_prompt,
    run,
    tiny,
)

NUM_TOKENS = 4
PROMPTS = [random_prompt(length) for length in (1, 8, 19)]
PARAMS = SamplingParams(NUM_TOKENS)
WINDOW = 8


@contextmanager
def recorded_logits(engine: Engine) -> Iterator[list[torch.Tensor]]:
    """The logits of every forward pass, [num_spans, vocab_size] each."""
    recorded = []
    forward = engine.runner.forward

    def record(spans: list) -> torch.Tensor:
        recorded.append(forward(spans))
        return recorded[-1]

    engine.runner.forward = record
    try:
        yield recorded
    finally:
        del engine.runner.forward


@torch.inference_mode()
def logits_of_transformers(
    loaded: LoadedModel, text: list[int], dtype: torch.dtype
) -> torch.Tensor:
    """With eager attention and without a cache, [len(text), vocab_size]."""
    model = copy.deepcopy(loaded.model).to(dtype)
    model.set_attn_implementation("eager")
    if hasattr(model.config, "num_local_experts"):
        # The default for experts knows no float64.
        model.set_experts_implementation("eager")
    return model(torch.tensor([text]), use_cache=False).logits[0]


def check_logits(loaded: LoadedModel, ours: LoadedModel, kernels: str) -> None:
    """Run `ours` by the engine; its logits are to be those of `loaded` in transformers.

    The error against float64 may be twice that of transformers' own float32.
    """
    prompt = PROMPTS[-1]
    engine = make_engine(ours, kernels=kernels)
    with recorded_logits(engine) as recorded:
        texts = first_texts(run(engine, [prompt], PARAMS))
    assert texts == [expected(loaded.name, prompt, NUM_TOKENS)]
    logits = torch.cat(recorded)
    text = [*prompt, *texts[0][:-1]]
    exact = logits_of_transformers(loaded, text, torch.float64)[-NUM_TOKENS:]
    eager = logits_of_transformers(loaded, text, torch.float32)[-NUM_TOKENS:]
    budget = 2 * (eager - exact).abs().max()
    error = (logits - exact).abs().max()
    assert error <= budget, f"error {error:.2e}, budget {budget:.2e}"


@pytest.mark.parametrize("name", FAMILIES)
def test_tokens_are_those_of_transformers(name: str) -> None:
    engine = make_engine(tiny(name), kernels="triton")
    texts = [expected(name, prompt, NUM_TOKENS) for prompt in PROMPTS]
    assert first_texts(run(engine, PROMPTS, PARAMS)) == texts
    warm = run(engine, PROMPTS, PARAMS)
    assert first_texts(warm) == texts
    assert [output.num_cached_tokens for output in warm] == [0, 4, 16]


@pytest.mark.parametrize("kernels", ["torch", "triton"])
@pytest.mark.parametrize("name", FAMILIES)
def test_logits_are_those_of_transformers(name: str, kernels: str) -> None:
    check_logits(tiny(name), tiny(name), kernels)


def test_forks_swaps_and_recomputes_move_the_right_blocks() -> None:
    prompts = [random_prompt(6, seed) for seed in range(3)]
    for preemption in Preemption:
        engine = make_engine(
            tiny("tiny_gemma2"),
            kernels="triton",
            num_gpu_blocks=8,
            num_cpu_blocks=16,
            preemption=preemption,
        )
        texts = all_texts(run(engine, prompts, SamplingParams(NUM_TOKENS, n=2)))
        assert texts == [[expected("tiny_gemma2", p, NUM_TOKENS)] * 2 for p in prompts]
        assert engine.stats.copied_blocks > 0
        assert engine.stats.preemptions_recompute + engine.stats.preemptions_swap > 0


def layers(loaded: LoadedModel) -> list[torch.nn.Module]:
    return [layer.self_attn for layer in loaded.model.model.layers]


def set_window(window: int | None) -> Callable[[LoadedModel], None]:
    def change(loaded: LoadedModel) -> None:
        sliding = [layer for layer in layers(loaded) if layer.sliding_window is not None]
        assert [layer.sliding_window for layer in sliding] == [WINDOW]
        sliding[0].sliding_window = window

    return change


def set_softcap(softcap: float | None) -> Callable[[LoadedModel], None]:
    def change(loaded: LoadedModel) -> None:
        for layer in layers(loaded):
            assert layer.attn_logit_softcapping == 5.0
            layer.attn_logit_softcapping = softcap

    return change


def shift_sinks(shift: float) -> Callable[[LoadedModel], None]:
    def change(loaded: LoadedModel) -> None:
        for layer in layers(loaded):
            layer.sinks.data += shift

    return change


@pytest.mark.parametrize("kernels", ["torch", "triton"])
@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("tiny_gemma2", set_window(WINDOW - 1)),
        ("tiny_gemma2", set_window(WINDOW + 1)),
        ("tiny_gemma2", set_window(None)),
        ("tiny_gemma2", set_softcap(5.01)),
        ("tiny_gemma2", set_softcap(None)),
        ("tiny_gpt_oss", set_window(WINDOW - 1)),
        ("tiny_gpt_oss", set_window(None)),
        ("tiny_gpt_oss", shift_sinks(0.01)),
        ("tiny_gpt_oss", shift_sinks(-100.0)),
    ],
    ids=[
        "gemma2-window7",
        "gemma2-window9",
        "gemma2-no_window",
        "gemma2-softcap5.01",
        "gemma2-no_softcap",
        "gpt_oss-window7",
        "gpt_oss-no_window",
        "gpt_oss-sinks+0.01",
        "gpt_oss-no_sinks",
    ],
)
def test_a_wrong_window_softcap_or_sink_is_seen(
    name: str, change: Callable[[LoadedModel], None], kernels: str
) -> None:
    """The check above is red when one number of our attention is off by a little."""
    wrong = load_model(name)
    change(wrong)
    with pytest.raises(AssertionError):
        check_logits(tiny(name), wrong, kernels)
