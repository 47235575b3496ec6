"""What replay hits: published values, both pools alike, the optimum, and what is refused."""

import dataclasses
import functools
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cache.content_hash import ContentHasher
from cache.evictor import POLICIES, Future, make_evictor, make_policy
from experiments.cache_models import KeyPool, Outcome, TokenPool, replay_blocks, replay_flat
from experiments.config import (
    UNBOUNDED,
    AzureConfig,
    CacheModel,
    ChatConfig,
    EvictorConfig,
    EvictorName,
    FewShotConfig,
    GpuConfig,
    IndependentConfig,
    ModelConfig,
    MooncakeConfig,
    ReplayCacheConfig,
    ReplayConfig,
    WorkloadConfig,
)
from experiments.ranges import ConfigError, InputError
from experiments.references import References, block_hashes, make_references
from experiments.replayer import Replay
from experiments.roofline import Roofline
from experiments.workloads import make_workload

TRACES = Path(__file__).resolve().parent.parent.parent / "shared" / "traces"
MOONCAKE = TRACES / "mooncake_conversation.jsonl.gz"
needs_mooncake = pytest.mark.skipif(not MOONCAKE.exists(), reason=f"needs {MOONCAKE}")
NAMES = sorted(POLICIES)
every_policy = pytest.mark.parametrize("name", NAMES)
MODEL = ModelConfig("tiny", 2, 64, 128, 4, 2, 16, 1000)
GPU = GpuConfig("small", "sm_80", 1e12, 1e11, 8e9, 1e11, 1e10, 1e10)
BLOCK = 512


def write_trace(path: Path, requests: list[tuple[float, int, list[int]]]) -> Path:
    """A Mooncake trace of (seconds, prompt tokens, ids)."""
    lines = [
        {"timestamp": 1000 * at, "input_length": length, "output_length": 40, "hash_ids": ids}
        for at, length, ids in requests
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def small_trace(path: Path, num_requests: int = 400) -> Path:
    """Conversations that go on, on a few system prompts; every prompt ends in a partial block."""
    rng = np.random.default_rng(5)
    chats: list[list[int]] = []
    requests, next_id = [], 10
    for i in range(num_requests):
        if not chats or rng.random() < 0.3:
            system = int(rng.integers(4))
            chats.append([system] if system else [0, 4, 5])
        chat = chats[-1 - min(int(rng.geometric(0.25)), len(chats) - 1)]
        for _ in range(int(rng.integers(1, 6))):
            chat.append(next_id)
            next_id += 1
        length = BLOCK * len(chat) - int(rng.integers(0, BLOCK))
        requests.append((0.5 * i, length, list(chat)))
        if length % BLOCK:
            # The next turn fills the block, so that its id is another one.
            chat.pop()
    return write_trace(path, requests)


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_trace(tmp_path_factory.mktemp("trace") / "small.jsonl")


@pytest.fixture(scope="module")
def references(trace: Path) -> References:
    return read(trace)


@functools.cache
def read(path: Path, block_size: int = BLOCK) -> References:
    return make_references(make_workload(MooncakeConfig("mooncake", str(path))), block_size)


def flat(references: References, name: str, capacity: int) -> Outcome:
    keys = references.content_keys.tolist()
    future = Future([key] for key in keys) if name == "belady" else None
    policy = make_policy(name, capacity, references.block_size, future)
    return replay_flat(references, policy, future)


def config(path: Path, **cache: object) -> ReplayConfig:
    return ReplayConfig(
        cache=ReplayCacheConfig(**cache),
        workload=MooncakeConfig("mooncake", str(path)),
        model=MODEL,
        gpu=GPU,
    )


def rate(path: Path, name: str, **cache: object) -> float:
    replay = Replay(config(path, **cache))
    replay.config.evictor = EvictorConfig(EvictorName(name))
    return replay.run().hit_blocks.sum() / len(replay.references.content_keys)


# -- values that others have measured


@needs_mooncake
@pytest.mark.parametrize(
    ("name", "rates"),
    [
        ("lru", [0.0445, 0.2112, 0.3257, 0.3664]),
        ("fifo", [0.0435, 0.1865, 0.3021, 0.3664]),
        ("lfu", [0.0481, 0.1318, 0.2759, 0.3664]),
        ("belady", [0.1906, 0.3664, 0.3664, 0.3664]),
    ],
)
def test_single_objects_reproduce_the_published_rates(name: str, rates: list[float]) -> None:
    for capacity, expected in zip((1_000, 10_000, 30_000, UNBOUNDED), rates, strict=True):
        found = rate(MOONCAKE, name, model=CacheModel.flat, num_gpu_blocks=capacity)
        assert found == pytest.approx(expected, abs=5e-5), capacity


@needs_mooncake
def test_blocks_reproduce_the_published_rates() -> None:
    """To 4 digits, with freed blocks in the order of eviction; the other way is higher."""
    published = {1_000: 0.0445, 10_000: 0.2113, 30_000: 0.3253, UNBOUNDED: 0.3660}
    for capacity, expected in published.items():
        assert rate(MOONCAKE, "lru", num_gpu_blocks=capacity) == pytest.approx(expected, abs=5e-5)
    uncached_first = {1_000: 0.0450, 10_000: 0.2149, 30_000: 0.3305, UNBOUNDED: 0.3660}
    for capacity, expected in uncached_first.items():
        found = rate(MOONCAKE, "lru", num_gpu_blocks=capacity, reuse_uncached_first=True)
        assert found == pytest.approx(expected, abs=5e-5)


@needs_mooncake
def test_the_whole_trace_without_a_bound() -> None:
    metrics = Replay(config(MOONCAKE, num_gpu_blocks=UNBOUNDED)).metrics()
    assert metrics["token_hit_rate"] == pytest.approx(0.3734, abs=5e-5)
    assert metrics["unbounded_token_hit_rate"] == metrics["token_hit_rate"]
    assert metrics["unbounded_block_hit_rate"] == metrics["block_hit_rate"]
    assert (metrics["requests"], metrics["block_references"]) == (12_031, 288_500)
    assert metrics["evicted_blocks"] == metrics["requests_refused"] == 0


@needs_mooncake
def test_the_real_allocator_reproduces_the_published_rate() -> None:
    references = read(MOONCAKE)
    hasher = ContentHasher(BLOCK, 0)
    pool = TokenPool(references, 10_000, "lru", hasher, reuse_uncached_first=False)
    outcome = replay_blocks(references, pool, 10_000)
    assert outcome.hit_blocks.sum() / 288_500 == pytest.approx(0.2113, abs=5e-5)
    pool.allocator.check_integrity()


@pytest.mark.parametrize(
    ("name", "capacity", "as_objects", "as_blocks"),
    [
        ("lru", 40, 0.4095, 0.4579),
        ("lru", 150, 0.6481, 0.6481),
        ("fifo", 40, 0.3689, 0.3165),
        ("lfu", 150, 0.3365, 0.4431),
        ("belady", 40, 0.6062, 0.5767),
    ],
)
def test_the_small_trace_is_pinned(
    trace: Path, name: str, capacity: int, as_objects: float, as_blocks: float
) -> None:
    """Other tests say why; this one says that nothing has changed."""
    for model, expected in [(CacheModel.flat, as_objects), (CacheModel.blocks, as_blocks)]:
        found = rate(trace, name, model=model, num_gpu_blocks=capacity)
        assert found == pytest.approx(expected, abs=5e-5), model


# -- the models


def list_pool(references: References, capacity: int, uncached_first: bool) -> list[int]:
    """Hits of each request under LRU: a plain list from the first to leave to the last."""
    order: list[object] = []
    free, hits = capacity, []
    for i, request in enumerate(references.requests):
        ids = [segment.id for segment in request.segments]
        num_full = request.num_prompt_tokens // BLOCK
        chain = [tuple(ids[: depth + 1]) for depth in range(num_full)]
        if len(ids) > capacity:
            hits.append(0)
            continue
        run = 0
        while run < num_full and chain[run] in order:
            run += 1
        hits.append(min(run, (request.num_prompt_tokens - 1) // BLOCK))
        found = [key for key in chain if key in order]
        order = [key for key in order if key not in found]
        for _ in range(len(ids) - len(found)):
            if free:
                free -= 1
            else:
                order.pop(0)
        if len(ids) > num_full:
            if uncached_first:
                free += 1
            else:
                order.append(("partial", i))
        order += chain[::-1]
    return hits


@pytest.mark.parametrize("uncached_first", [True, False], ids=["uncached-first", "in-order"])
@pytest.mark.parametrize("capacity", [24, 40, 150, 1000])
def test_lru_in_blocks_is_a_list(
    references: References, capacity: int, uncached_first: bool
) -> None:
    """Guards the rules by an independent few lines: pinning, order of release, tails, refusals."""
    policy = make_policy("lru", capacity, BLOCK)
    outcome = replay_blocks(references, KeyPool(references, policy, uncached_first), capacity)
    assert outcome.hit_blocks.tolist() == list_pool(references, capacity, uncached_first)
    assert outcome.hit_blocks.sum() > 20


@every_policy
@pytest.mark.parametrize("overlap", [False, True], ids=["serial", "overlap"])
@pytest.mark.parametrize("uncached_first", [True, False], ids=["uncached-first", "in-order"])
def test_keys_and_tokens_hit_the_same(
    references: References, name: str, uncached_first: bool, overlap: bool
) -> None:
    """The real allocator with tokens, and the same rules on dicts, in each request and count."""
    capacity, hasher = 60, ContentHasher(BLOCK, 3)
    # Policies that hash keys need the same ones.
    hashes = [block_hashes(request, hasher) for request in references.requests]
    keys = references.prefix_keys.copy()
    for start, found in zip(references.starts, hashes, strict=False):
        keys[start : start + len(found)] = found
    future = Future(found.tolist() for found in hashes)
    evictor = functools.partial(make_evictor, name, future=future)
    token_pool = TokenPool(references, capacity, evictor, hasher, uncached_first)
    policy = make_policy(name, capacity, BLOCK, future)
    key_pool = KeyPool(dataclasses.replace(references, prefix_keys=keys), policy, uncached_first)
    seconds = (lambda index, hit: (0.2, 0.3 + index % 3)) if overlap else None
    one = replay_blocks(references, token_pool, capacity, seconds, future)
    other = replay_blocks(references, key_pool, capacity, seconds, future)
    token_pool.allocator.check_integrity()
    for field in dataclasses.fields(Outcome):
        assert np.array_equal(getattr(one, field.name), getattr(other, field.name)), field.name
    assert one.num_evictions > 100
    assert one.hit_blocks.sum() > 100


@settings(max_examples=300, deadline=None)
@given(
    uses=st.lists(st.integers(0, 14), min_size=1, max_size=150),
    capacity=st.integers(1, 12),
)
def test_belady_is_never_beaten_by_single_objects(uses: list[int], capacity: int) -> None:
    references = objects(uses)
    best = flat(references, "belady", capacity).hit_blocks.sum()
    for name in NAMES:
        assert flat(references, name, capacity).hit_blocks.sum() <= best, name


@settings(max_examples=60, deadline=None)
@given(uses=st.lists(st.integers(0, 6), min_size=1, max_size=11), capacity=st.integers(1, 4))
def test_belady_is_the_best_of_all_choices(uses: list[int], capacity: int) -> None:
    """Every possible sequence of victims, tried out."""

    @functools.cache
    def most(i: int, cached: frozenset[int]) -> int:
        if i == len(uses):
            return 0
        if uses[i] in cached:
            return 1 + most(i + 1, cached)
        if len(cached) < capacity:
            return most(i + 1, cached | {uses[i]})
        return max(most(i + 1, (cached - {victim}) | {uses[i]}) for victim in cached)

    assert flat(objects(uses), "belady", capacity).hit_blocks.sum() == most(0, frozenset())


def objects(uses: list[int]) -> References:
    """One request with these keys."""
    keys = np.array(uses, dtype=np.int64)
    starts = np.array([0, len(keys)])
    return References([None], 1, np.array([len(keys)]), starts, keys, keys)


@every_policy
def test_a_cache_that_never_fills_hits_what_one_without_a_bound_hits(
    references: References, name: str
) -> None:
    outcome = flat(references, name, references.repeats.size)
    assert outcome.num_evictions == 0
    assert np.array_equal(
        outcome.hit_blocks, np.add.reduceat(references.repeats.astype(int), references.starts[:-1])
    )


def test_overlapping_requests_hold_their_blocks(tmp_path: Path) -> None:
    """By hand, 2 blocks: the second waits until the first ends, at 10 s; the last one shares."""
    path = write_trace(
        tmp_path / "t.jsonl",
        [(0, 1024, [1, 2]), (1, 1024, [3, 4]), (2, 1025, [1, 2, 5]), (30, 1024, [3, 4])],
    )
    references = read(path)
    started = []

    def seconds(index: int, num_hit_tokens: int) -> tuple[float, float]:
        started.append((index, num_hit_tokens))
        return 1.0, 10.0

    pool = KeyPool(references, make_policy("lru", 2, BLOCK))
    outcome = replay_blocks(references, pool, 2, seconds)
    assert started == [(0, 0), (1, 0), (3, 512)]
    assert outcome.num_refused == 1, "three blocks never fit two"
    # With room for all, the second prompt shares what is computed, and only that.
    for delay, shared in [(0.5, 0), (2.0, 1)]:
        path = write_trace(tmp_path / f"{delay}.jsonl", [(0, 1024, [1, 2]), (delay, 1024, [1, 2])])
        pool = KeyPool(read(path), make_policy("lru", 9, BLOCK))
        outcome = replay_blocks(read(path), pool, 9, lambda index, hit: (1.0, 10.0))
        assert outcome.hit_blocks.tolist() == [0, shared]


# -- references


def test_blocks_of_every_size_follow_from_ids(trace: Path) -> None:
    """As the tokens of the prompts say: equal keys are equal prefixes, and no others."""
    for block_size in (128, 512, 1024):
        references = read(trace, block_size)
        by_tokens: dict[int, bytes] = {}
        for i, request in enumerate(references.requests):
            tokens = request.prompt_token_ids()
            assert references.num_full_blocks[i] == len(tokens) // block_size
            for depth in range(references.num_full_blocks[i]):
                key = int(references.prefix_keys[references.starts[i] + depth])
                prefix = hash(tokens[: (depth + 1) * block_size].tobytes())
                assert by_tokens.setdefault(key, prefix) == prefix
        assert len(by_tokens) == len(set(by_tokens.values()))
    assert references.block_tokens.sum() == references.num_tokens.sum()


def test_equal_ids_behind_different_prefixes_are_different_blocks(tmp_path: Path) -> None:
    path = write_trace(tmp_path / "t.jsonl", [(0, 1024, [1, 2]), (1, 1536, [3, 2, 4])])
    references = read(path)
    assert references.repeats.tolist() == [False, False, False, True, False]
    pool = KeyPool(references, make_policy("lru", 9, BLOCK))
    outcome = replay_blocks(references, pool, 9)
    assert outcome.hit_blocks.tolist() == [0, 0]
    assert outcome.late_blocks.tolist() == [0, 0]


def test_what_a_cache_without_a_bound_hits(trace: Path) -> None:
    """Block by block and token by token, against sets of prefixes."""
    for block_size in (256, 512, 1024):
        references = read(trace, block_size)
        blocks: set[bytes] = set()
        for i, request in enumerate(references.requests):
            tokens = request.prompt_token_ids()
            prefixes = [
                hash(tokens[:end].tobytes())
                for end in range(block_size, len(tokens) + 1, block_size)
            ]
            run = 0
            while run < len(prefixes) and prefixes[run] in blocks:
                run += 1
            assert references.unbounded_hits[i] == min(run, (len(tokens) - 1) // block_size)
            blocks.update(prefixes)
    shared = references.shared_tokens
    seen: list[np.ndarray] = []
    for i, request in enumerate(references.requests[:120]):
        tokens = request.prompt_token_ids()
        longest = 0
        for other in seen:
            length = min(len(other), len(tokens))
            differ = np.flatnonzero(other[:length] != tokens[:length])
            longest = max(longest, int(differ[0]) if len(differ) else length)
        assert shared[i] == min(longest, len(tokens) - 1)
        seen.append(tokens)


@settings(max_examples=100, deadline=None)
@given(uses=st.lists(st.integers(0, 9), min_size=1, max_size=70))
def test_reuse_distances_count_different_keys_in_between(uses: list[int]) -> None:
    requests = [type("R", (), {"arrival_s": 3.0})()]
    references = dataclasses.replace(objects(uses), requests=requests)
    expected = []
    for i, use in enumerate(uses):
        if use in uses[:i]:
            previous = max(j for j in range(i) if uses[j] == use)
            expected.append(len(set(uses[previous + 1 : i])))
    assert references.reuse.distances.tolist() == expected
    assert references.reuse.times_s.tolist() == [0.0] * len(expected)


def test_lru_hits_what_was_used_within_its_capacity(references: References) -> None:
    distances = references.reuse.distances
    for capacity in (10, 50, 200):
        hits = flat(references, "lru", capacity).hit_blocks.sum()
        assert hits == np.count_nonzero(distances < capacity)


# -- metrics


def test_metrics_by_hand(tmp_path: Path) -> None:
    """Two prompts of three blocks, the last one of 76 tokens; two ids in common."""
    path = write_trace(tmp_path / "t.jsonl", [(0, 1100, [1, 2, 3]), (4, 1100, [1, 2, 9])])
    replay = Replay(config(path, num_gpu_blocks=10))
    metrics = replay.metrics()
    assert metrics["token_hit_rate"] == pytest.approx(1024 / 2200)
    assert metrics["block_hit_rate"] == pytest.approx(2 / 6)
    assert metrics["mean_request_token_hit_rate"] == pytest.approx(1024 / 1100 / 2)
    assert metrics["share_of_belady"] == 1
    assert metrics["token_hit_rate_lost_to_block_size"] == 0
    assert metrics["inserted_blocks"] == 2
    assert metrics["never_hit_blocks"] == metrics["evicted_blocks"] == 0
    # Keys and values, 2 layers, 2 heads of 16, 2 bytes each.
    assert metrics["saved_kv_bytes"] == 1024 * 2 * 2 * 2 * 16 * 2
    roofline = Roofline(replay._serving)
    seconds = [
        roofline.step_seconds(np.array([query]), np.array([1100])) for query in (1100, 1100 - 1024)
    ]
    assert metrics["saved_gpu_s"] == pytest.approx(seconds[0] - seconds[1])
    assert metrics["saved_gpu_share"] == pytest.approx(1 - sum(seconds) / (2 * seconds[0]))
    assert metrics["reuse_time_p50_s"] == 4.0
    assert metrics["reuse_distance_p50_blocks"] == 2.0
    # With blocks of 1,024 the same; with 2,048 nothing is full, and 1,024 tokens are lost.
    lost = Replay(config(path, num_gpu_blocks=10, block_size=2048)).metrics()
    assert lost["token_hit_rate"] == 0
    assert lost["token_hit_rate_lost_to_block_size"] == pytest.approx(1024 / 2200)


def test_what_is_cached_behind_a_missing_block_is_lost(tmp_path: Path) -> None:
    """FIFO over 3 blocks: [1 2 3] loses 1 to [9], so 2 and 3 are there but of no use."""
    path = write_trace(
        tmp_path / "t.jsonl", [(0, 1536, [1, 2, 3]), (1, 512, [9]), (2, 1536, [1, 2, 3])]
    )
    for model, hits, behind in [(CacheModel.flat, 0, 0), (CacheModel.blocks, 2, 0)]:
        replay = Replay(config(path, num_gpu_blocks=3, model=model))
        replay.config.evictor = EvictorConfig(EvictorName.fifo)
        outcome = replay.run()
        assert (outcome.hit_blocks.sum(), outcome.late_blocks.sum()) == (hits, behind), model
    references = read(path)
    pool = KeyPool(references, PrefixFirst(3), True)
    outcome = replay_blocks(references, pool, 3)
    assert (outcome.hit_blocks.sum(), outcome.late_blocks.sum()) == (0, 2)


class PrefixFirst(type(make_policy("fifo", 1))):
    """The worst order for chains: the first block of a chain goes first."""

    def evict(self, incoming: int | None = None) -> int:
        return self._queue.popitem(last=True)[0]


# -- refusals


def test_a_cache_smaller_than_a_request_refuses_and_counts_it(trace: Path) -> None:
    metrics = Replay(config(trace, num_gpu_blocks=8)).metrics()
    longest = read(trace).num_blocks
    assert metrics["requests_refused"] == np.count_nonzero(longest > 8) > 0
    as_objects = Replay(config(trace, num_gpu_blocks=8, model=CacheModel.flat)).metrics()
    assert as_objects["requests_refused"] == 0
    nothing_fits = Replay(config(trace, num_gpu_blocks=1)).metrics()
    assert nothing_fits["block_hit_rate"] == 0
    assert np.isnan(nothing_fits["share_of_belady"])


@pytest.mark.parametrize(
    "workload",
    [IndependentConfig("no_sharing", 5, 8.0, 100, 20), AzureConfig("azure", "azure.csv")],
    ids=["generated", "azure"],
)
def test_a_trace_without_hash_ids_is_refused(
    workload: WorkloadConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "azure.csv").write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,374,44\n"
    )
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match=rf"{workload.name}: its requests carry no hash ids"):
        make_references(make_workload(workload), BLOCK)


def test_a_block_size_that_ids_cannot_be_divided_into_is_refused(trace: Path) -> None:
    with pytest.raises(ConfigError, match="block_size=96: expected a divisor or a multiple of 512"):
        read(trace, 96)


@pytest.mark.parametrize(
    "workload",
    [
        ChatConfig("chat", 120, 8.0, 3, 100, 3, 20, 30, 5.0, num_tenants=2),
        FewShotConfig("few_shot", 60, 8.0, 3, 4, 25, 10, 20),
    ],
    ids=lambda workload: workload.name,
)
def test_generated_workloads_are_hashed(workload: WorkloadConfig) -> None:
    """Shared prompts of any length, with tenants kept apart; with tokens it is the same."""
    found = []
    for from_tokens in (False, True):
        replay = Replay(
            ReplayConfig(
                ReplayCacheConfig(block_size=16, num_gpu_blocks=300, from_tokens=from_tokens),
                workload=workload,
                model=MODEL,
                gpu=GPU,
            )
        )
        metrics = replay.metrics()
        found.append({k: v for k, v in metrics.items() if "wall" not in k})
    assert found[0] == found[1]
    assert 0.1 < found[0]["token_hit_rate"] <= found[0]["unbounded_token_hit_rate"]
    assert 0 < found[0]["token_hit_rate_lost_to_block_size"] < 0.2
