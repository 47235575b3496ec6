"""Does a real model give the same tokens with the cache on, off, evicted, forked and swapped?

    python -m experiments.generate
    python -m experiments.generate experiment=generate_shared_document
    python -m experiments.generate model.name=tiny_gemma2 kernels=triton

Each run answers its prompts with a transformer whose keys and values lie in the paged cache (see
`engine`), compares the texts with those of transformers' own `generate`, and leaves results.csv,
plots and report.html, as `experiments.serve` does; texts.jsonl has what the model said.
"""

import dataclasses
import functools
import json
import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING

import hydra
import numpy as np
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from .config import AUTO, Preemption, refuse_padded_numbers
from .generate_config import DeviceName, GenerateConfig, register, to_generate_config
from .ranges import InputError
from .results import Measurement, run_point

if TYPE_CHECKING:
    from .decoding import SamplingParams
    from .engine import Engine
    from .jobs import RequestOutput
    from .models import LoadedModel
    from .prompts import Prompts

CONFIGS = str(Path(__file__).resolve().parent.parent / "configs")

log = logging.getLogger(__name__)

register()


@hydra.main(config_path=CONFIGS, config_name="generate", version_base="1.3")
def main(composed: DictConfig) -> None:
    """Run one point of a sweep, or a single run."""
    run_point(composed, measure)


def measure(composed: DictConfig) -> Measurement:
    """Validate the configuration, load its model and answer its prompts."""
    refuse_padded_numbers(HydraConfig.get().overrides.task)
    config = to_generate_config(composed)
    return Generation(config).run(Path(HydraConfig.get().runtime.output_dir))


def choose_device(wanted: DeviceName) -> str:
    """The device's name for torch; without a GPU, Triton's kernels are set up to be interpreted.

    Must come before the first import of Triton, also by transformers: it reads that setting then.
    Raises InputError where a GPU is asked for and there is none.
    """
    import torch

    has_gpu = torch.cuda.is_available()
    if not has_gpu:
        os.environ.setdefault("TRITON_INTERPRET", "1")
    if wanted is DeviceName.cuda and not has_gpu:
        raise InputError("model.device=cuda: there is no GPU here")
    return "cuda" if has_gpu and wanted is not DeviceName.cpu else "cpu"


@functools.lru_cache(maxsize=1)
def _load(name: str, device: str, dtype: str, seed: int) -> "LoadedModel":
    """`models.load_model`, once for all points of a sweep."""
    import torch

    from .models import load_model

    return load_model(name, device, getattr(torch, dtype), seed)


@functools.lru_cache(maxsize=1024)
def _expected(loaded: "LoadedModel", prompt: tuple[int, ...], params: "SamplingParams") -> list:
    """The texts of transformers' `generate`, once for all points of a sweep."""
    from .models import generate_with_transformers

    options = {}
    if params.beam_width is not None:
        options["num_beams"] = options["num_return_sequences"] = params.beam_width
        options["length_penalty"] = params.length_penalty
    texts = generate_with_transformers(
        loaded, list(prompt), params.max_tokens, params.stop_token_ids, **options
    )
    return texts * params.n


class Generation:
    """One point: a model, an engine and prompts."""

    def __init__(self, config: GenerateConfig) -> None:
        device = choose_device(config.model.device)
        from .decoding import SamplingParams
        from .prompts import make_prompts

        self.config = config
        self.loaded = _load(config.model.name, device, config.model.dtype.value, config.seed)
        self.prompts: Prompts = make_prompts(config.prompts, self.loaded, config.seed)
        sampling = config.sampling
        self.params = SamplingParams(
            sampling.max_tokens,
            sampling.n,
            sampling.temperature,
            sampling.top_k,
            sampling.beam_width,
            sampling.length_penalty,
            () if sampling.ignore_stop_tokens else self.loaded.stop_token_ids,
            config.seed,
        )

    def run(self, output_dir: Path) -> Measurement:
        """Answer all prompts; write texts.jsonl into `output_dir`."""
        num_gpu_blocks = self._num_gpu_blocks()
        # What happens at the first use alone is no part of a time.
        first = self.prompts.turns[0].token_ids[:1]
        self._make_engine(num_gpu_blocks).generate([first], dataclasses.replace(self.params, n=1))
        engine = self._make_engine(num_gpu_blocks)
        outputs = self._answer(engine)
        self._write_texts(outputs, output_dir)
        metrics = self._metrics(engine, outputs)
        if self.config.verify and self.params.temperature == 0:
            metrics["texts_equal_to_transformers"] = self._share_of_equal_texts(outputs)
        series = np.array(engine.occupancy, dtype=np.float64).reshape(-1, 4).T
        names = ("time_s", "in_use_blocks", "cached_blocks", "free_blocks")
        return Measurement(metrics, dict(zip(names, series, strict=True)))

    def _make_engine(self, num_gpu_blocks: int) -> "Engine":
        from .engine import Engine
        from .engine_options import EngineOptions

        cache, engine = self.config.cache, self.config.engine
        num_cpu_blocks = cache.num_cpu_blocks
        if num_cpu_blocks == AUTO:
            by_swap = engine.preemption is Preemption.swap
            num_cpu_blocks = num_gpu_blocks if by_swap else 0
        options = EngineOptions(
            block_size=cache.block_size,
            num_gpu_blocks=num_gpu_blocks,
            num_cpu_blocks=num_cpu_blocks,
            watermark=cache.watermark,
            enable_caching=cache.enable_caching,
            evictor=self.config.evictor.name.value,
            hash_algorithm=cache.hash_algorithm.value,
            kernels=self.config.kernels.value,
            preemption=engine.preemption,
            max_num_seqs=engine.max_num_seqs,
            max_num_batched_tokens=engine.max_num_batched_tokens,
            num_lookahead_slots=engine.num_lookahead_slots,
            fixed_shapes=engine.fixed_shapes,
        )
        return Engine(self.loaded, options)

    def _num_gpu_blocks(self) -> int:
        """As configured; auto: so many that nothing is ever evicted or preempted."""
        cache, params = self.config.cache, self.params
        if cache.num_gpu_blocks != AUTO:
            return cache.num_gpu_blocks
        slots = params.max_tokens + self.config.engine.num_lookahead_slots
        lengths = [len(turn.token_ids) + slots for turn in self.prompts.turns]
        needed = sum(params.width * -(-length // cache.block_size) for length in lengths)
        # Beside the watermark, which is a share of the pool.
        return int(needed / (1 - cache.watermark)) + 1

    def _answer(self, engine: "Engine") -> list["RequestOutput"]:
        texts = [turn.token_ids for turn in self.prompts.turns]
        if not self.prompts.one_by_one:
            return engine.generate(texts, self.params, progress=True)
        return [engine.generate([text], self.params)[0] for text in texts]

    def _metrics(self, engine: "Engine", outputs: list["RequestOutput"]) -> dict[str, float | int]:
        stats, turns = engine.stats, self.prompts.turns
        total_s = engine.occupancy[-1][0]
        prompt_tokens = sum(output.num_prompt_tokens for output in outputs)
        cached_tokens = sum(output.num_cached_tokens for output in outputs)
        metrics: dict[str, float | int] = {
            # Tokens chosen, of all texts, from the first step's begin to the last one's end.
            "output_tokens_per_s": stats.output_tokens / total_s,
            **self._times_to_first_token(outputs),
            # Tokens of prompts whose KV was computed, also again; and those found computed.
            "prompt_tokens_computed": stats.prompt_tokens_computed,
            "prompt_tokens_skipped": stats.prompt_tokens_skipped,
            # Skipped prompt tokens over all prompt tokens, at first admission.
            "token_hit_rate": cached_tokens / prompt_tokens,
            "output_tokens": stats.output_tokens,
            "evicted_blocks": engine.manager.get_stats().evictions,
            # Copied because a shared block was written.
            "copied_blocks": stats.copied_blocks,
            "swapped_out_blocks": stats.swapped_out_blocks,
            "swapped_in_blocks": stats.swapped_in_blocks,
            "preemptions_recompute": stats.preemptions_recompute,
            "preemptions_swap": stats.preemptions_swap,
            # When most blocks were in use: how many, and how many more it would have been if no
            # two sequences had shared one.
            "peak_blocks_in_use": stats.peak_blocks_in_use,
            "blocks_saved_at_peak": stats.unshared_blocks_at_peak - stats.peak_blocks_in_use,
            "num_gpu_blocks": engine.options.num_gpu_blocks,
            "requests": len(turns),
            "steps": stats.num_steps,
        }
        return metrics

    def _times_to_first_token(self, outputs: list["RequestOutput"]) -> dict[str, float]:
        """From when a request could start to its first token."""
        asked = [
            output.ttft_s
            for turn, output in zip(self.prompts.turns, outputs, strict=True)
            if turn.kind == "question"
        ]
        if len(asked) < 2:
            return {"ttft_p50_s": float(np.median([output.ttft_s for output in outputs]))}
        return {
            "ttft_first_question_s": asked[0],
            "ttft_second_question_s": asked[1],
            "ttft_later_questions_p50_s": float(np.median(asked[1:])),
        }

    def _share_of_equal_texts(self, outputs: list["RequestOutput"]) -> float:
        """The share of texts that are, token for token, those of transformers."""
        equal = num_texts = 0
        for turn, output in zip(self.prompts.turns, outputs, strict=True):
            expected = _expected(self.loaded, tuple(turn.token_ids), self.params)
            texts = [completion.token_ids for completion in output.completions]
            equal += sum(map(list.__eq__, texts, expected))
            num_texts += len(texts)
        if equal < num_texts:
            log.warning("%d of %d texts differ from transformers'", num_texts - equal, num_texts)
        return equal / num_texts

    def _write_texts(self, outputs: list["RequestOutput"], output_dir: Path) -> None:
        tokenizer = self.loaded.tokenizer
        with (output_dir / "texts.jsonl").open("w", encoding="utf-8") as file:
            for turn, output in zip(self.prompts.turns, outputs, strict=True):
                ids = [completion.token_ids for completion in output.completions]
                line = {"kind": turn.kind, "prompt_token_ids": turn.token_ids, "token_ids": ids}
                if tokenizer is not None:
                    line["prompt"] = tokenizer.decode(turn.token_ids)
                    line["texts"] = [tokenizer.decode(text) for text in ids]
                    for text in line["texts"]:
                        log.info("%r -> %r", line["prompt"][-60:], text)
                file.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
