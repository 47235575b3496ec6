"""Which prompts `generate` runs, as token ids, and which of them wait for others."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from .generate_config import PromptsConfig, RandomPromptsConfig, SharedDocumentConfig, TextsConfig
from .models import LoadedModel
from .ranges import InputError

REPOSITORY = Path(__file__).resolve().parent.parent
RANDOM_TEXT_TOKENS = 12


@dataclass(frozen=True)
class Turn:
    """A prompt, and what it is in its workload."""

    kind: str
    """"question", "between" or "text"."""
    token_ids: list[int]


@dataclass(frozen=True)
class Prompts:
    """The turns of a workload."""

    turns: list[Turn]
    one_by_one: bool
    """Whether each turn starts when the one before has ended; else all start at once."""


def make_prompts(config: PromptsConfig, loaded: LoadedModel, seed: int) -> Prompts:
    """The prompts that `config` describes, for the model's tokenizer, or random without one.

    Raises InputError for a document that is missing or too short.
    """
    rng = np.random.default_rng(seed)
    match config:
        case TextsConfig():
            texts = [_encode(text, loaded, rng) for text in config.texts]
            return Prompts([Turn("text", ids) for ids in texts], one_by_one=False)
        case SharedDocumentConfig():
            return Prompts(_shared_document(config, loaded, rng), one_by_one=True)
        case RandomPromptsConfig():
            shared = _random_tokens(config.shared_tokens, loaded, rng)
            lengths = rng.integers(
                config.min_tokens, config.max_tokens, config.num_requests, endpoint=True
            )
            drawn = [_random_tokens(int(length), loaded, rng) for length in lengths]
            turns = [Turn("text", (shared[: len(ids) // 2] + ids)[: len(ids)]) for ids in drawn]
            return Prompts(turns, one_by_one=False)
    raise ValueError(f"no prompts are made from {type(config).__name__}")


def _shared_document(
    config: SharedDocumentConfig, loaded: LoadedModel, rng: np.random.Generator
) -> list[Turn]:
    needed = config.document_tokens + config.tokens_between
    if loaded.tokenizer is None:
        text = _random_tokens(needed, loaded, rng)
    else:
        path = REPOSITORY / config.path
        if not path.is_file():
            raise InputError(f"prompts.path={config.path}: there is no such file")
        text = loaded.tokenizer(path.read_text(encoding="utf-8")).input_ids
    if len(text) < needed:
        raise InputError(
            f"prompts.path={config.path} has {len(text)} tokens: expected at least {needed}, "
            "prompts.document_tokens and prompts.tokens_between together"
        )
    document = text[: config.document_tokens]
    turns = []
    for number, question in enumerate(config.questions):
        if number and config.tokens_between:
            turns.append(Turn("between", text[-config.tokens_between :]))
        asked = _encode(f"\n\nQuestion: {question}\nAnswer:", loaded, rng)
        turns.append(Turn("question", document + asked))
    return turns


def _encode(text: str, loaded: LoadedModel, rng: np.random.Generator) -> list[int]:
    if loaded.tokenizer is None:
        return _random_tokens(RANDOM_TEXT_TOKENS, loaded, rng)
    return loaded.tokenizer(text).input_ids


def _random_tokens(count: int, loaded: LoadedModel, rng: np.random.Generator) -> list[int]:
    return rng.integers(0, loaded.model.config.vocab_size, count).tolist()
