"""Traces and generators: what is shared, what is refused, and that nothing depends on luck."""

import gzip
import itertools
import json
from pathlib import Path

import numpy as np
import pytest

from experiments.config import (
    AzureConfig,
    ChatConfig,
    FewShotConfig,
    IndependentConfig,
    MooncakeConfig,
    WorkloadConfig,
)
from experiments.requests import Request, Segment, segment_token_ids
from experiments.workloads import make_workload

TRACES = Path(__file__).resolve().parent.parent.parent / "shared" / "traces"
CHAT = ChatConfig("chat", 200, 8.0, 3, 100, 3, 20, 30, 5.0)
FEW_SHOT = FewShotConfig("few_shot", 50, 8.0, 3, 4, 25, 10, 20)
INDEPENDENT = IndependentConfig("independent", 50, 8.0, 100, 20, [1, 4])
GENERATED = pytest.mark.parametrize(
    "config", [CHAT, FEW_SHOT, INDEPENDENT], ids=lambda config: config.name
)


def mooncake_line(timestamp: float, length: int, ids: list[int], output_length: int = 3) -> str:
    record = {
        "timestamp": timestamp,
        "input_length": length,
        "output_length": output_length,
        "hash_ids": ids,
    }
    return json.dumps(record) + "\n"


def mooncake(path: Path, *lines: str, **options: float) -> list[Request]:
    path.write_text("".join(lines))
    return list(make_workload(MooncakeConfig("mooncake", str(path), **options)))


def azure(path: Path, text: str) -> list[Request]:
    path.write_bytes(text.encode())
    return list(make_workload(AzureConfig("azure", str(path))))


# Tokens


def test_tokens_depend_on_seed_segment_and_offset_alone() -> None:
    whole = segment_token_ids((Segment(7, 100), Segment(9, 50)), seed=1)
    assert whole.dtype == np.int32
    assert whole.shape == (150,)
    assert np.array_equal(whole[100:], segment_token_ids((Segment(9, 50),), seed=1))
    assert np.array_equal(whole[:60], segment_token_ids((Segment(7, 60),), seed=1))
    assert not np.any(whole[:100] == segment_token_ids((Segment(8, 100),), seed=1))
    assert not np.any(whole == segment_token_ids((Segment(7, 100), Segment(9, 50)), seed=2))


def test_tokens_are_int32_and_spread_over_the_range() -> None:
    tokens = segment_token_ids((Segment(2**62 - 1, 200_000), Segment(-(2**62), 1)), seed=2**63 - 1)
    assert tokens.min() >= 0
    assert len(np.unique(tokens)) > 199_900
    assert np.histogram(tokens, bins=8, range=(0, 2**31))[0].min() > 24_000


def test_a_request_repeats_itself_and_keeps_no_tokens() -> None:
    request = Request(5, 0.0, num_prompt_tokens=30, num_output_tokens=8, num_samples=2)
    assert np.array_equal(request.prompt_token_ids(), request.prompt_token_ids())
    assert request.prompt_token_ids() is not request.prompt_token_ids()
    samples = [request.output_token_ids(0), request.output_token_ids(1)]
    others = Request(6, 0.0, num_prompt_tokens=30, num_output_tokens=8)
    runs = [request.prompt_token_ids()[:8], *samples, others.output_token_ids()]
    for one, other in itertools.combinations(runs, 2):
        assert not np.any(one == other)


# Mooncake


def test_mooncake_prompts_share_what_their_ids_share(tmp_path: Path) -> None:
    lines = (
        mooncake_line(100, 1030, [4, 5, 6]),
        mooncake_line(100, 1536, [4, 5, 7], 9),
        mooncake_line(350, 5, [8]),
    )
    first, second, third = mooncake(tmp_path / "trace.jsonl", *lines, rate_scale=2.0)
    assert [r.arrival_s for r in (first, second, third)] == pytest.approx([0.0, 0.0, 0.125])
    assert [r.num_prompt_tokens for r in (first, second, third)] == [1030, 1536, 5]
    assert second.num_output_tokens == 9
    one, other = first.prompt_token_ids(), second.prompt_token_ids()
    assert (len(one), len(other)) == (1030, 1536)
    assert np.array_equal(one[:1024], other[:1024])
    assert not np.any(one[1024:] == other[1024:1030])
    assert not np.any(one[:512] == one[512:1024])


def test_a_trace_may_be_cut_short_and_read_again(tmp_path: Path) -> None:
    lines = [mooncake_line(i, 600, [i, i + 1]) for i in range(5)]
    (tmp_path / "trace.jsonl.gz").write_bytes(gzip.compress("".join(lines).encode()))
    config = MooncakeConfig("mooncake", str(tmp_path / "trace.jsonl.gz"), num_requests=3)
    workload = make_workload(config)
    assert len(workload) == workload.num_requests == 3
    assert list(workload) == list(workload)
    assert [request.request_id for request in workload] == [0, 1, 2]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "not a JSON object"),
        ("[1]", "not a JSON object"),
        ('{"timestamp": 2}', "no 'input_length'"),
        (mooncake_line(2, 513, [1]), "input_length 513 needs 2 hash_ids of 512 tokens, got 1"),
        (mooncake_line(2, 512, [1, 2]), "input_length 512 needs 1 hash_ids"),
        (mooncake_line(2, 0, []), "input_length must be a number of tokens >= 1, got 0"),
        (mooncake_line(2, 5, [1], 0), "output_length must be a number of tokens >= 1, got 0"),
        (mooncake_line(2, 5.5, [1]), "input_length must be a number of tokens >= 1, got 5.5"),
        (mooncake_line(2, 5, [-1]), "hash_ids must be a list of numbers >= 0"),
        (mooncake_line(2, 5, [1.5]), "hash_ids must be a list of numbers >= 0"),
        (mooncake_line(2, 5, "1"), "hash_ids must be a list of numbers >= 0"),
        (mooncake_line("2", 5, [1]), "timestamp must be a number of milliseconds"),
        (mooncake_line(float("nan"), 5, [1]), "timestamp must be a number of milliseconds"),
        (mooncake_line(0.5, 5, [1]), "timestamp goes back by 0.0005 s"),
    ],
)
def test_a_malformed_mooncake_line_is_named(tmp_path: Path, line: str, message: str) -> None:
    """The trace is refused when it is opened, not when the simulation comes to the line."""
    with pytest.raises(ValueError, match=r"trace\.jsonl:3: ") as caught:
        mooncake(tmp_path / "trace.jsonl", mooncake_line(1, 5, [1]), "\n", line)
    assert message in str(caught.value)


def test_a_truncated_gz_is_an_error_that_names_it(tmp_path: Path) -> None:
    lines = "".join(mooncake_line(i, 600, [3 * i, 7 * i]) for i in range(3000))
    path = tmp_path / "trace.jsonl.gz"
    path.write_bytes(gzip.compress(lines.encode())[:-2000])
    with pytest.raises(ValueError, match=r"trace\.jsonl\.gz:\d+: cannot be read on"):
        make_workload(MooncakeConfig("mooncake", str(path)))


@pytest.mark.parametrize("content", [b"no gzip", b"\xff\xfe{", b"\x1f\x8b\x08\x00 damaged stream"])
def test_what_is_no_trace_is_an_error_that_names_it(tmp_path: Path, content: bytes) -> None:
    for name in ("trace.jsonl", "trace.jsonl.gz"):
        path = tmp_path / name
        path.write_bytes(content)
        with pytest.raises(ValueError, match=rf"{name}:1: "):
            make_workload(MooncakeConfig("mooncake", str(path)))


def test_a_missing_trace_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=rf"workload\.path=a\.csv: no such file.*{tmp_path.name}"):
        make_workload(AzureConfig("azure", "a.csv"))


def test_an_empty_trace_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no request in this trace"):
        mooncake(tmp_path / "trace.jsonl", "\n")
    with pytest.raises(ValueError, match="no request in this trace"):
        azure(tmp_path / "trace.csv", "TIMESTAMP,ContextTokens,GeneratedTokens\n")


# Azure


def test_azure_requests_share_nothing(tmp_path: Path) -> None:
    """Seven fractional digits, Windows line ends, and no line end after the last line."""
    first, second = azure(
        tmp_path / "trace.csv",
        "TIMESTAMP,ContextTokens,GeneratedTokens\r\n"
        "2023-11-16 23:59:59.6805900,374,44\r\n"
        "2023-11-17 00:00:00.9951690,374,109",
    )
    assert first.arrival_s == 0
    assert second.arrival_s == pytest.approx(1.314579, abs=1e-6)
    assert (second.num_prompt_tokens, second.num_output_tokens) == (374, 109)
    assert not np.any(first.prompt_token_ids() == second.prompt_token_ids())


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("2023-11-16 18:15:46.6805900,374", "expected 3 columns"),
        ("yesterday,374,44", "TIMESTAMP is not a date and time: 'yesterday'"),
        ("2023-11-16 18:15:50.0000000,-5,44", "ContextTokens must be a number of tokens >= 1"),
        ("2023-11-16 18:15:50.0000000,5,0", "GeneratedTokens must be a number of tokens >= 1"),
        ("2023-11-16 18:15:50.0000000,5,4x", "GeneratedTokens must be a number of tokens >= 1"),
        ("2023-11-16 18:15:45.6805900,5,4", "timestamp goes back by 1 s"),
    ],
)
def test_a_malformed_azure_line_is_named(tmp_path: Path, line: str, message: str) -> None:
    good = "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,374,44\n"
    with pytest.raises(ValueError, match=r"trace\.csv:3: ") as caught:
        azure(tmp_path / "trace.csv", good + line)
    assert message in str(caught.value)


def test_an_azure_file_without_its_header_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"trace\.csv:1: expected the header TIMESTAMP"):
        azure(tmp_path / "trace.csv", "2023-11-16 18:15:46.6805900,374,44\n")


# Generators


@GENERATED
def test_a_generator_is_seeded_ordered_and_can_be_iterated_again(config: WorkloadConfig) -> None:
    workload = make_workload(config, seed=3)
    requests = list(workload)
    assert len(requests) == len(workload) == config.num_requests
    assert requests == list(workload) == list(make_workload(config, seed=3))
    assert [r.arrival_s for r in requests] != [r.arrival_s for r in make_workload(config, seed=4)]
    assert [r.request_id for r in requests] == list(range(config.num_requests))
    arrivals = [r.arrival_s for r in requests]
    assert arrivals == sorted(arrivals)
    assert min(r.num_output_tokens for r in requests) >= 1
    assert all(len(r.prompt_token_ids()) == r.num_prompt_tokens for r in requests)


@pytest.mark.parametrize(
    ("config", "prompt_tokens"),
    [(FEW_SHOT, 110), (INDEPENDENT, 100)],
    ids=["few_shot", "independent"],
)
def test_rates_and_mean_lengths_are_as_configured(
    config: FewShotConfig | IndependentConfig, prompt_tokens: float
) -> None:
    many = type(config)(**{**vars(config), "num_requests": 4000})
    requests = list(make_workload(many))
    assert 4000 / requests[-1].arrival_s == pytest.approx(8.0, rel=0.05)
    assert np.mean([r.num_prompt_tokens for r in requests]) == pytest.approx(
        prompt_tokens, rel=0.05
    )
    assert np.mean([r.num_output_tokens for r in requests]) == pytest.approx(20, rel=0.05)


def test_a_chat_turn_repeats_what_was_said_before() -> None:
    """Its prompt starts with the prompt of the turn before and the answer to it."""
    requests = list(make_workload(CHAT))
    by_system_and_user = {r.segments[:2]: [] for r in requests}
    for request in requests:
        by_system_and_user[request.segments[:2]].append(request)
    followed = 0
    for turns in by_system_and_user.values():
        assert [len(turn.segments) for turn in turns] == [2, 4, 6][: len(turns)]
        for before, after in itertools.pairwise(turns):
            said = np.concatenate([before.prompt_token_ids(), before.output_token_ids()])
            assert np.array_equal(after.prompt_token_ids()[: len(said)], said)
            assert after.num_prompt_tokens > len(said)
            followed += 1
    assert followed > 100
    systems = {tuple(request.prompt_token_ids()[:100]) for request in requests}
    assert len(systems) == 3


def test_the_tenant_of_a_conversation_salts_all_its_turns() -> None:
    config = ChatConfig(**{**vars(CHAT), "num_tenants": 2})
    requests = list(make_workload(config))
    assert {r.extra_key for r in requests} == {("tenant", "0"), ("tenant", "1")}
    conversations = {r.segments[:2]: r.extra_key for r in requests}
    assert all(conversations[r.segments[:2]] == r.extra_key for r in requests)
    assert {r.extra_key for r in make_workload(CHAT)} == {None}


def test_few_shot_prompts_share_their_examples_only() -> None:
    requests = list(make_workload(FEW_SHOT))
    assert len({tuple(r.prompt_token_ids()[:100]) for r in requests}) == 3
    assert len({tuple(r.prompt_token_ids()[100:]) for r in requests}) == 50


def test_parallel_samples_are_drawn_from_the_given_counts() -> None:
    requests = list(make_workload(INDEPENDENT))
    assert {r.num_samples for r in requests} == {1, 4}
    assert len({tuple(r.prompt_token_ids()[:1]) for r in requests}) == 50


# Recorded traces


@pytest.mark.skipif(not TRACES.is_dir(), reason="needs the real traces in ../shared/traces")
def test_the_mooncake_conversation_trace() -> None:
    """The counts that ../shared/traces/README.md states, and sharing of all that ids share."""
    config = MooncakeConfig("mooncake", str(TRACES / "mooncake_conversation.jsonl.gz"))
    workload = make_workload(config)
    assert len(workload) == 12_031
    ids, references, first_tokens, output_tokens = set(), 0, {}, 0
    for request in workload:
        ids.update(segment.id for segment in request.segments)
        references += len(request.segments)
        output_tokens += request.num_output_tokens
        tokens = request.prompt_token_ids()
        for segment, token in zip(request.segments, tokens[::512].tolist(), strict=True):
            assert first_tokens.setdefault(segment.id, token) == token
    assert (len(ids), references, output_tokens) == (182_790, 288_500, 4_122_048)
    # Birthday odds over 2^31 tokens leave about 8 chance pairs among 182,790 first tokens.
    assert len(set(first_tokens.values())) > 182_750


@pytest.mark.skipif(not TRACES.is_dir(), reason="needs the real traces in ../shared/traces")
def test_the_azure_conversation_trace() -> None:
    config = AzureConfig("azure", str(TRACES / "azure_2023_conversation.csv.gz"))
    workload = make_workload(config)
    *_, last = workload
    assert len(workload) == 19_366
    assert (last.num_prompt_tokens, last.num_output_tokens) == (197, 183)
