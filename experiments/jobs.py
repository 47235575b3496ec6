"""A request on its way through the engine, and what became of it."""

from dataclasses import dataclass, field

import torch

from cache.sequence import Sequence, SequenceGroup

from .decoding import Completion, Decoding, SamplingParams


@dataclass(frozen=True)
class RequestOutput:
    """What became of a request."""

    request_id: int
    completions: list[Completion]
    num_prompt_tokens: int
    num_cached_tokens: int
    """Prompt tokens that were found computed when it was first admitted."""
    ttft_s: float
    """From the moment it was added to its first token."""
    e2e_s: float
    """From the moment it was added to its last token."""


@dataclass(eq=False)
class Job:
    """A request in the engine.

    While `is_forked`, there is one sequence a live path; before, one for what all of them start
    with, `prefix`. A sequence holds the tokens that are computed or being computed.
    """

    request_id: int
    prompt: list[int]
    params: SamplingParams
    decoding: Decoding
    arrival_s: float
    group: SequenceGroup | None = None
    prefix: list[int] = field(default_factory=list)
    is_forked: bool = False
    logits: dict[int, torch.Tensor] = field(default_factory=dict)
    """By index of the sequence, what the next token is chosen from, until all sequences have it."""
    num_cached_tokens: int | None = None
    first_token_s: float | None = None

    @property
    def seqs(self) -> list[Sequence]:
        return self.group.seqs if self.group else []

    def target(self, index: int) -> list[int]:
        """All tokens that sequence `index` is to compute before the next token is chosen."""
        if not self.is_forked:
            return self.prefix
        return self.prompt + self.decoding.live[index].token_ids

    def common_prefix(self) -> list[int]:
        """What the live paths share, so that where there are several each has a token beyond it."""
        texts = [self.prompt + path.token_ids for path in self.decoding.live]
        if len(texts) == 1:
            return texts[0]
        length = len(self.prompt)
        while length < len(texts[0]) - 1 and len({text[length] for text in texts}) == 1:
            length += 1
        return texts[0][:length]
