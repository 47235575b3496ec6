"""The engine's tokens are those of transformers' own `generate`, whatever the blocks went through.

Plain-torch kernels and tiny models of all families; see test_engine_triton for the kernels.
"""

import numpy as np
import pytest

from cache.evictor import POLICIES
from experiments.config import Preemption
from experiments.decoding import SamplingParams
from experiments.models import LoadedModel, generate_with_transformers, load_model
from experiments.ranges import InputError
from kernels import copy_blocks
from kernels.kv_cache import KVCache
from tests.engine_tools import (
    FAMILIES,
    NUM_TOKENS,
    Tokens,
    all_texts,
    expected,
    first_texts,
    make_engine,
    random_prompt,
    run,
    tiny,
)

PROMPTS = [random_prompt(length) for length in (1, 3, 4, 5, 16, 23, 40)]
LONG = random_prompt(40)


@pytest.fixture(params=FAMILIES)
def name(request: pytest.FixtureRequest) -> str:
    return request.param


def greedy(name: str, prompts: list[Tokens]) -> list[list[int]]:
    return [expected(name, prompt) for prompt in prompts]


# -- equal tokens


@pytest.mark.parametrize("caching", [False, True], ids=["off", "on"])
def test_a_batch_gives_the_tokens_of_transformers(name: str, caching: bool) -> None:
    engine = make_engine(tiny(name), enable_caching=caching)
    assert first_texts(run(engine, PROMPTS)) == greedy(name, PROMPTS)
    assert engine.stats.prompt_tokens_computed == sum(map(len, PROMPTS))
    # Of each text the last token is chosen and not computed.
    assert engine.stats.generated_tokens_computed == len(PROMPTS) * (NUM_TOKENS - 1)


def test_a_warm_cache_skips_prompts_and_changes_no_token(name: str) -> None:
    engine = make_engine(tiny(name))
    run(engine, PROMPTS)
    computed = engine.stats.prompt_tokens_computed
    outputs = run(engine, PROMPTS)
    assert first_texts(outputs) == greedy(name, PROMPTS)
    # All full blocks, but the last token is always computed.
    cached = [(len(prompt) - 1) // 4 * 4 for prompt in PROMPTS]
    assert [output.num_cached_tokens for output in outputs] == cached
    assert engine.stats.prompt_tokens_skipped == sum(cached)
    again = engine.stats.prompt_tokens_computed - computed
    assert again == sum(map(len, PROMPTS)) - sum(cached)


def test_a_conversation_finds_its_own_answers_cached(name: str) -> None:
    engine = make_engine(tiny(name))
    turn = LONG + tuple(first_texts(run(engine, [LONG]))[0]) + random_prompt(6, seed=1)
    output = run(engine, [turn])[0]
    assert output.completions[0].token_ids == expected(name, turn)
    # The last token of the answer has no KV yet: 47 tokens are cached, in 11 full blocks.
    assert output.num_cached_tokens == 44


def test_an_evicted_prompt_is_computed_again(name: str) -> None:
    # 12 blocks hold one request of 48 tokens; the other one evicts the first.
    engine = make_engine(tiny(name), num_gpu_blocks=12)
    other = random_prompt(40, seed=1)
    outputs = [run(engine, [prompt])[0] for prompt in (LONG, other, LONG)]
    assert first_texts(outputs) == greedy(name, [LONG, other, LONG])
    assert engine.manager.get_stats().evictions > 0
    assert outputs[2].num_cached_tokens == 0


def test_a_partly_evicted_prompt_keeps_its_start(name: str) -> None:
    engine = make_engine(tiny(name), num_gpu_blocks=14)
    outputs = [run(engine, [prompt])[0] for prompt in (LONG, random_prompt(20, seed=1), LONG)]
    assert outputs[2].completions[0].token_ids == expected(name, LONG)
    assert engine.manager.get_stats().evictions > 0
    assert 0 < outputs[2].num_cached_tokens < 36


@pytest.mark.parametrize("evictor", sorted(POLICIES.keys() - {"belady"}))
def test_every_eviction_policy_leaves_the_tokens_alone(evictor: str) -> None:
    engine = make_engine(tiny("tiny_llama"), num_gpu_blocks=14, evictor=evictor)
    prompts = [LONG, random_prompt(20, seed=1), LONG[:20], LONG, random_prompt(30, seed=2), LONG]
    outputs = [run(engine, [prompt])[0] for prompt in prompts]
    assert first_texts(outputs) == greedy("tiny_llama", prompts)
    assert engine.manager.get_stats().evictions > 0


@pytest.mark.parametrize("caching", [False, True], ids=["off", "on"])
@pytest.mark.parametrize("preemption", Preemption)
def test_preempted_requests_lose_no_token(name: str, caching: bool, preemption: Preemption) -> None:
    engine = make_engine(
        tiny(name),
        num_gpu_blocks=14,
        num_cpu_blocks=32 if preemption is Preemption.swap else 0,
        preemption=preemption,
        enable_caching=caching,
    )
    prompts = [random_prompt(14, seed) for seed in range(5)]
    assert first_texts(run(engine, prompts)) == greedy(name, prompts)
    stats = engine.stats
    if preemption is Preemption.swap:
        assert stats.preemptions_swap > 0
        assert stats.swapped_out_blocks >= stats.swapped_in_blocks > 0
        assert stats.preemptions_recompute == 0
    else:
        assert stats.preemptions_recompute > 0


def test_without_room_on_the_cpu_a_swap_becomes_a_recompute() -> None:
    engine = make_engine(
        tiny("tiny_llama"), num_gpu_blocks=14, num_cpu_blocks=1, preemption=Preemption.swap
    )
    prompts = [random_prompt(14, seed) for seed in range(5)]
    assert first_texts(run(engine, prompts)) == greedy("tiny_llama", prompts)
    assert engine.stats.preemptions_recompute > 0


def test_forks_share_blocks_and_copy_what_they_write(name: str) -> None:
    engine = make_engine(tiny(name))
    prompt = random_prompt(22)
    texts = all_texts(run(engine, [prompt], SamplingParams(NUM_TOKENS, n=4)))
    assert texts == [[expected(name, prompt)] * 4]
    # Block 5 has two of the prompt's tokens: all but the last to write it take a copy.
    assert engine.stats.copied_blocks >= 3
    assert engine.stats.peak_blocks_in_use < engine.stats.unshared_blocks_at_peak


@pytest.mark.parametrize("preemption", Preemption)
def test_forks_survive_preemption(name: str, preemption: Preemption) -> None:
    prompts = [random_prompt(10, seed) for seed in range(4)]
    engine = make_engine(
        tiny(name), num_gpu_blocks=18, num_cpu_blocks=64, preemption=preemption, watermark=0.05
    )
    texts = all_texts(run(engine, prompts, SamplingParams(NUM_TOKENS, n=4)))
    assert texts == [[expected(name, prompt)] * 4 for prompt in prompts]
    assert engine.stats.preemptions_recompute + engine.stats.preemptions_swap > 0


@pytest.mark.parametrize("budget", [1, 3, 7])
def test_prompts_are_computed_in_chunks_of_any_size(name: str, budget: int) -> None:
    engine = make_engine(tiny(name), max_num_batched_tokens=budget)
    prompts = [*PROMPTS, LONG]
    assert first_texts(run(engine, prompts)) == greedy(name, prompts)


def test_requests_join_and_leave_the_batch(name: str) -> None:
    engine = make_engine(tiny(name), max_num_seqs=3)
    outputs = []
    ids = [engine.add_request(prompt, SamplingParams(NUM_TOKENS)) for prompt in PROMPTS[:4]]
    for prompt in PROMPTS[4:]:
        outputs += engine.step()
        ids.append(engine.add_request(prompt, SamplingParams(NUM_TOKENS)))
    while engine.has_unfinished():
        outputs += engine.step()
    texts = {output.request_id: output.completions[0].token_ids for output in outputs}
    assert [texts[request_id] for request_id in ids] == greedy(name, PROMPTS)


def test_lookahead_slots_are_taken_and_change_no_token(name: str) -> None:
    plain, ahead = (make_engine(tiny(name), num_lookahead_slots=n) for n in (0, 5))
    assert first_texts(run(ahead, PROMPTS)) == first_texts(run(plain, PROMPTS))
    assert ahead.stats.peak_blocks_in_use > plain.stats.peak_blocks_in_use


def test_a_stop_token_ends_a_text(name: str) -> None:
    text = expected(name, LONG)
    stop = text[3]
    params = SamplingParams(NUM_TOKENS, stop_token_ids=(stop,))
    assert first_texts(run(make_engine(tiny(name)), [LONG], params)) == [
        text[: text.index(stop) + 1]
    ]


# -- beams and samples


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"enable_caching": False},
        {"num_gpu_blocks": 16},
        {"num_gpu_blocks": 16, "num_cpu_blocks": 64, "preemption": Preemption.swap},
        {"max_num_batched_tokens": 2},
    ],
    ids=["on", "off", "recomputed", "swapped", "chunked"],
)
def test_beam_search_gives_the_beams_of_transformers(name: str, options: dict) -> None:
    prompts = [random_prompt(length) for length in (5, 9, 12)]
    engine = make_engine(tiny(name), **options)
    texts = all_texts(run(engine, prompts, SamplingParams(NUM_TOKENS, beam_width=3)))
    for prompt, beams in zip(prompts, texts, strict=True):
        assert beams == generate_with_transformers(
            tiny(name), list(prompt), NUM_TOKENS, num_beams=3, num_return_sequences=3
        )
    if "num_gpu_blocks" in options:
        assert engine.stats.preemptions_recompute + engine.stats.preemptions_swap > 0


@pytest.mark.parametrize("length_penalty", [0.0, 0.5, 1.0])
def test_beams_end_at_stop_tokens_as_those_of_transformers(length_penalty: float) -> None:
    loaded, prompt = tiny("tiny_llama"), list(random_prompt(9))
    ends = 0
    for stop in range(0, 128, 8):
        beams = generate_with_transformers(
            loaded,
            prompt,
            NUM_TOKENS,
            (stop,),
            num_beams=3,
            num_return_sequences=3,
            length_penalty=length_penalty,
        )
        params = SamplingParams(
            NUM_TOKENS, beam_width=3, length_penalty=length_penalty, stop_token_ids=(stop,)
        )
        assert all_texts(run(make_engine(loaded), [tuple(prompt)], params)) == [beams]
        ends += sum(beam[-1] == stop for beam in beams)
    assert ends > 0


def test_samples_depend_on_seed_and_number_alone() -> None:
    prompts = [random_prompt(10, seed) for seed in range(4)]
    params = SamplingParams(NUM_TOKENS, n=3, temperature=1.5, top_k=20, seed=7)
    alone = [
        all_texts(run(make_engine(tiny("tiny_llama"), enable_caching=False), [prompt], params))[0]
        for prompt in prompts
    ]
    assert all(len(set(map(tuple, texts))) == 3 for texts in alone)
    for options in (
        {},
        {"num_gpu_blocks": 14},
        {"num_gpu_blocks": 14, "num_cpu_blocks": 64, "preemption": Preemption.swap},
    ):
        engine = make_engine(tiny("tiny_llama"), **options)
        assert all_texts(run(engine, prompts, params)) == alone
    other = SamplingParams(NUM_TOKENS, n=3, temperature=1.5, top_k=20, seed=8)
    assert all_texts(run(make_engine(tiny("tiny_llama")), prompts, other)) != alone


def test_a_cold_sample_is_the_greedy_one() -> None:
    engine = make_engine(tiny("tiny_llama"))
    params = SamplingParams(NUM_TOKENS, n=2, temperature=1.0, top_k=1)
    assert all_texts(run(engine, [LONG], params)) == [[expected("tiny_llama", LONG)] * 2]


# -- many requests


def test_two_hundred_requests_pass_through_a_pool_for_a_tenth_of_them() -> None:
    rng = np.random.default_rng(0)
    loaded = tiny("tiny_llama")
    shared = random_prompt(24, seed=9)
    prompts, params = [], []
    for index in range(200):
        own = random_prompt(int(rng.integers(1, 40)), seed=100 + index)
        prompts.append(shared[: int(rng.integers(0, 25))] + own)
        params.append(SamplingParams(int(rng.integers(1, 16))))
    needed = [
        -(-(len(p) + one.max_tokens - 1) // 4) for p, one in zip(prompts, params, strict=True)
    ]
    alone = make_engine(loaded, enable_caching=False)
    texts = [
        first_texts(alone.generate([p], one))[0] for p, one in zip(prompts, params, strict=True)
    ]
    for options in (
        {"preemption": Preemption.recompute},
        {"preemption": Preemption.swap, "num_cpu_blocks": sum(needed) // 20},
    ):
        engine = make_engine(loaded, num_gpu_blocks=sum(needed) // 10, **options)
        ids = [engine.add_request(p, one) for p, one in zip(prompts, params, strict=True)]
        outputs = {}
        while engine.has_unfinished():
            outputs |= {output.request_id: output for output in engine.step()}
            engine.manager.check_integrity()
        assert first_texts([outputs[i] for i in ids]) == texts
        assert engine.manager.get_num_free_gpu_blocks() == sum(needed) // 10
        assert engine.stats.preemptions_recompute + engine.stats.preemptions_swap > 0
        assert engine.stats.prompt_tokens_skipped > 0
        assert engine.manager.get_stats().evictions > 0


# -- what is refused


@pytest.mark.parametrize(
    ("prompt", "params", "message"),
    [
        ((), {}, "the prompt is empty"),
        (random_prompt(256), {}, "256 tokens: expected fewer than the context of tiny_llama"),
        ((1, 128), {}, "token 128: tiny_llama knows 0 to 127"),
        ((1, -1), {}, "token -1: tiny_llama"),
        (random_prompt(33), {}, r"needs 10 blocks of 4 tokens: the pool has 8"),
        (random_prompt(20), {"n": 4}, r"needs 13 blocks of 4 tokens: the pool has 8"),
        ((1,), {"n": 5}, "5 sequences: expected at most max_num_seqs=4"),
    ],
)
def test_what_cannot_be_served_is_refused_at_once(
    prompt: Tokens, params: dict, message: str
) -> None:
    engine = make_engine(tiny("tiny_llama"), num_gpu_blocks=8, max_num_seqs=4)
    with pytest.raises(InputError, match=message):
        engine.add_request(prompt, SamplingParams(NUM_TOKENS, **params))
    assert not engine.has_unfinished()


def test_what_just_fits_is_served() -> None:
    # 25 prompt tokens and 7 that are written fill 8 blocks.
    engine = make_engine(tiny("tiny_llama"), num_gpu_blocks=8)
    prompt = random_prompt(25)
    assert first_texts(run(engine, [prompt])) == [expected("tiny_llama", prompt)]
    with pytest.raises(InputError, match="needs 9 blocks"):
        engine.add_request(random_prompt(26), SamplingParams(NUM_TOKENS))


def test_a_text_ends_where_the_context_does() -> None:
    output = run(make_engine(tiny("tiny_llama")), [random_prompt(252)], SamplingParams(100))[0]
    assert len(output.completions[0].token_ids) == 4


@pytest.mark.parametrize(
    "params",
    [
        {"max_tokens": 0},
        {"n": 0},
        {"beam_width": 0},
        {"temperature": -0.1},
        {"temperature": float("nan")},
        {"top_k": 0},
        {"beam_width": 2, "n": 2},
        {"beam_width": 2, "temperature": 1.0},
    ],
    ids=str,
)
def test_bad_sampling_parameters_are_refused(params: dict) -> None:
    with pytest.raises(InputError, match=str(next(iter(params.values())))):
        SamplingParams(**params)


def test_bad_engine_options_are_refused() -> None:
    for options, message in (
        ({"kernels": "cuda"}, "kernels='cuda': expected one of torch, triton"),
        ({"max_num_seqs": 0}, "max_num_seqs=0"),
        ({"max_num_batched_tokens": 0}, "max_num_batched_tokens=0"),
        ({"num_lookahead_slots": -1}, "num_lookahead_slots=-1"),
        ({"fixed_shapes": True, "max_num_batched_tokens": 3}, "at least block_size=4"),
    ):
        with pytest.raises(InputError, match=message):
            make_engine(tiny("tiny_llama"), **options)


def test_an_unknown_model_is_refused_with_the_known_ones() -> None:
    with pytest.raises(InputError, match=r"model.name='gpt5': expected one of smollm2, tiny_llama"):
        load_model("gpt5")


def test_plain_torch_moves_blocks_without_a_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """kernels=torch is for machines without Triton's interpreter: no copy may be launched."""

    def refuse(*arguments: object, **options: object) -> None:
        raise AssertionError("a kernel was launched")

    monkeypatch.setattr(copy_blocks, "launch", refuse)
    engine = make_engine(
        tiny("tiny_llama"), num_gpu_blocks=18, num_cpu_blocks=64, preemption=Preemption.swap
    )
    run(engine, [random_prompt(10, seed) for seed in range(4)], SamplingParams(NUM_TOKENS, n=4))
    assert engine.stats.copied_blocks > 0
    assert engine.stats.swapped_in_blocks > 0
    with pytest.raises(AssertionError, match="a kernel was launched"):
        KVCache(1, 2, 4, 1, 16, use_kernels=True).apply(copies=[(0, 1)])


def test_one_model_serves_two_engines() -> None:
    loaded: LoadedModel = tiny("tiny_llama")
    first, second = make_engine(loaded), make_engine(loaded, block_size=8, num_gpu_blocks=40)
    assert first_texts(run(first, PROMPTS)) == first_texts(run(second, PROMPTS))
