"""The generate app as its users launch it: experiments, errors, and what a row says.

In this process, with tiny models, whose prompts are random tokens.
"""

import csv
import functools
import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from hydra import compose, initialize_config_dir

from experiments import generate
from experiments.config import refuse_padded_numbers
from experiments.generate_config import (
    GenerateConfig,
    SharedDocumentConfig,
    to_generate_config,
)
from experiments.models import LoadedModel
from experiments.prompts import make_prompts
from experiments.ranges import ConfigError, InputError
from tests.engine_tools import tiny

torch.set_num_threads(1)

ROOT = Path(__file__).resolve().parent.parent
CONFIGS = ROOT / "configs"
TINY = ("model.name=tiny_llama", "cache.block_size=4", "sampling.max_tokens=4")
DOCUMENT = ("prompts.document_tokens=100", "prompts.tokens_between=40")
Launch = Callable[..., int]
Row = dict[str, str]


@pytest.fixture
def launch(launch_main: Launch) -> Launch:
    """Launches the app; see `launch_main`."""
    return functools.partial(launch_main, generate.main)


def rows_of(folder: Path) -> list[Row]:
    with (folder / "results.csv").open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.fixture
def hydra_configs() -> Iterator[None]:
    with initialize_config_dir(str(CONFIGS), version_base="1.3"):
        yield


def composed(*overrides: str) -> GenerateConfig:
    refuse_padded_numbers(overrides)
    return to_generate_config(compose("generate", overrides=list(overrides)))


def test_questions_about_one_document_skip_it_where_it_is_cached(
    launch: Launch, tmp_path: Path
) -> None:
    """Off, on and evicted in between: other work, the same texts, which are transformers'."""
    sweep = ("experiment=generate_shared_document", "hydra.sweep.dir=out", *TINY, *DOCUMENT)
    # 29 blocks hold a document with its question and answer, and not what comes between.
    assert launch(*sweep, "caching=disabled,enabled") == 0
    evicting = ("hydra.run.dir=evicting", "prompts=shared_document", *TINY, *DOCUMENT)
    assert launch(*evicting, "cache.num_gpu_blocks=30") == 0
    by_caching = {row["caching"]: row for row in rows_of(tmp_path / "out")}
    off, on = by_caching["disabled"], by_caching["enabled"]
    [evicted] = rows_of(tmp_path / "evicting")
    for row in (off, on, evicted):
        assert float(row["texts_equal_to_transformers"]) == 1
        assert row["requests"] == "7"
        assert row["prompts"] == "shared_document"
        assert float(row["ttft_second_question_s"]) > 0
    # Four prompts of 112 tokens and three of 40; of a hit all but the question is skipped.
    assert (off["prompt_tokens_computed"], off["prompt_tokens_skipped"]) == ("568", "0")
    assert int(on["prompt_tokens_skipped"]) == 3 * 100 + 2 * 36
    assert (on["evicted_blocks"], off["evicted_blocks"]) == ("0", "0")
    assert int(evicted["evicted_blocks"]) > 0
    assert 0 < int(evicted["prompt_tokens_skipped"]) < int(on["prompt_tokens_skipped"])
    report = (tmp_path / "out" / "report.html").read_text()
    assert "prompts shared_document, model tiny_llama" in report
    plots = {path.stem for path in (tmp_path / "out" / "plots").iterdir()}
    assert {"prompt_tokens_computed", "ttft_second_question_s", "occupancy"} <= plots


def test_samples_share_their_prompt_and_copy_what_they_write(
    launch: Launch, tmp_path: Path
) -> None:
    sweep = ("experiment=generate_many_samples", "hydra.sweep.dir=out", *TINY, "sampling.n=1,4")
    # 12 prompt tokens are 3 full blocks; nothing is copied where a block ends.
    assert launch(*sweep, "cache.block_size=4", "sampling.temperature=1.5") == 0
    one, four = rows_of(tmp_path / "out")
    assert (one["blocks_saved_at_peak"], one["copied_blocks"]) == ("0", "0")
    assert (four["blocks_saved_at_peak"], four["copied_blocks"]) == (str(2 * 3 * 3), "0")
    assert "texts_equal_to_transformers" not in one
    # 12 prompt tokens are a block and a half of 8: 3 of 4 samples copy the half one.
    sweep = ("experiment=generate_many_samples", "hydra.sweep.dir=out8", *TINY, "sampling.n=4,2")
    assert launch(*sweep, "cache.block_size=8", "sampling.temperature=1.5") == 0
    two, four = rows_of(tmp_path / "out8")
    assert (two["copied_blocks"], four["copied_blocks"]) == ("2", "6")


def test_a_single_run_says_what_the_model_said(launch: Launch, tmp_path: Path) -> None:
    assert launch("hydra.run.dir=out", *TINY, "prompts=random", "prompts.num_requests=5") == 0
    lines = [json.loads(line) for line in (tmp_path / "out" / "texts.jsonl").open()]
    assert len(lines) == 5
    assert {len(line["token_ids"][0]) for line in lines} == {4}
    [row] = rows_of(tmp_path / "out")
    assert row["output_tokens"] == "20"
    assert row["model"] == "tiny_llama"
    assert row["transformers"] not in ("", "absent")
    assert float(row["texts_equal_to_transformers"]) == 1


@pytest.mark.parametrize(
    "overrides",
    [
        ("sampling.n=3",),
        ("sampling.beam_width=3",),
        ("cache.num_gpu_blocks=24", "prompts.num_requests=12"),
        ("cache.num_gpu_blocks=24", "prompts.num_requests=12", "engine.preemption=swap"),
        ("caching=disabled", "engine.max_num_batched_tokens=7"),
        ("engine.fixed_shapes=true", "engine.num_lookahead_slots=3"),
        ("model.name=tiny_gemma2", "sampling.ignore_stop_tokens=true"),
        ("kernels=triton", "prompts.num_requests=2", "prompts.max_tokens=10"),
    ],
    ids=" ".join,
)
def test_every_way_gives_the_texts_of_transformers(
    launch: Launch, tmp_path: Path, overrides: tuple[str, ...]
) -> None:
    few = ("prompts=random", "prompts.num_requests=4", "prompts.shared_tokens=10")
    assert launch("hydra.run.dir=out", *TINY, *few, *overrides) == 0
    [row] = rows_of(tmp_path / "out")
    assert float(row["texts_equal_to_transformers"]) == 1
    if "cache.num_gpu_blocks=24" in overrides:
        assert int(row["preemptions_recompute"]) + int(row["preemptions_swap"]) > 0


def test_texts_that_differ_are_counted(
    launch: Launch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The check can fail: here the engine is told that every text is one token longer."""
    expected = generate._expected
    monkeypatch.setattr(
        generate, "_expected", lambda *args: [text[:-1] for text in expected(*args)]
    )
    assert launch("hydra.run.dir=out", *TINY, "prompts=random", "prompts.num_requests=2") == 0
    assert float(rows_of(tmp_path / "out")[0]["texts_equal_to_transformers"]) == 0


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("model.name=gpt5",), "expected one of smollm2, tiny_llama"),
        (("cache.num_gpu_blocks=2",), "the pool has 2"),
        (("prompts=random", "prompts.min_tokens=300", "prompts.max_tokens=300"), "the context of"),
        (("prompts=shared_document", "prompts.document_tokens=300"), "the context of"),
        (("cache.sliding_window=8",), "cache.sliding_window=8: expected null"),
        (("engine.preemption=swap", "cache.num_cpu_blocks=0"), "cache.num_cpu_blocks=0"),
        (("sampling.beam_width=2", "sampling.n=2"), "sampling.beam_width=2: expected"),
        (("sampling.max_tokens=0",), "sampling.max_tokens=0: expected a number >= 1"),
        (("cache.block_size=016",), "without leading zeros"),
        (("prompts.texts=[]",), "prompts.texts=[]: expected at least one"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_a_mistake_is_a_failed_row_with_a_message(
    launch: Launch, tmp_path: Path, overrides: tuple[str, ...], message: str
) -> None:
    assert launch("hydra.run.dir=out", *TINY, *overrides) == 1
    [row] = rows_of(tmp_path / "out")
    assert row["status"] == "failed"
    assert message in row["message"]


def test_an_unknown_key_is_refused_while_composing(
    launch: Launch, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    assert launch("hydra.run.dir=out", *TINY, "sampling.temprature=1") == 1
    assert "sampling.temprature" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.usefixtures("hydra_configs")
@pytest.mark.parametrize("group", ["caching", "prompts", "cache", "evictor"])
def test_every_shipped_config_composes_and_is_valid(group: str) -> None:
    for path in sorted((CONFIGS / group).iterdir()):
        if path.stem == "belady":
            continue
        config = composed(f"{group}={path.stem}")
        if group in ("prompts", "evictor"):
            assert getattr(config, group).name == path.stem


@pytest.mark.usefixtures("hydra_configs")
def test_defaults_of_the_schema_and_of_the_files_agree() -> None:
    """A GenerateConfig made in code means the same as the default files."""
    config = composed()
    for name in ("model", "kernels", "cache", "evictor", "engine", "sampling", "verify"):
        assert getattr(config, name) == getattr(GenerateConfig(), name)


def test_a_document_that_is_missing_or_too_short_is_named() -> None:
    class Letters:
        """A tokenizer: a token a letter."""

        def __call__(self, text: str) -> "Letters":
            self.input_ids = [ord(letter) % 128 for letter in text]
            return self

    loaded = LoadedModel("letters", tiny("tiny_llama").model, Letters())
    config = SharedDocumentConfig("doc", path="LICENSE", document_tokens=50, questions=["a", "b"])
    turns = make_prompts(config, loaded, seed=0).turns
    assert [turn.kind for turn in turns] == ["question", "question"]
    assert turns[0].token_ids[:50] == turns[1].token_ids[:50]
    assert turns[0].token_ids[50:] != turns[1].token_ids[50:]
    config.document_tokens = 10**6
    with pytest.raises(InputError, match=r"LICENSE has \d+ tokens: expected at least 1000000"):
        make_prompts(config, loaded, seed=0)
    config.path = "no/such/file"
    with pytest.raises(InputError, match="no/such/file: there is no such file"):
        make_prompts(config, loaded, seed=0)


@pytest.mark.usefixtures("hydra_configs")
def test_evictors_that_need_the_future_are_refused() -> None:
    """What can't be known in a running engine is said before a model is loaded."""
    with pytest.raises(ConfigError, match=r"evictor.name=belady"):
        composed("evictor=belady")
