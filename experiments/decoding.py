"""From logits to tokens: greedy, sampled and beam search, without a thought for blocks.

A request has one or more live paths: texts so far, each with a sequence of the engine behind it.
`advance` takes the logits after every live path and answers with branches, which path goes on with
which token: two branches of one path mean a fork, none that its sequence ends.
"""

from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import torch

from .ranges import InputError


@dataclass(frozen=True)
class SamplingParams:
    """How a request's tokens are chosen.

    Raises InputError, naming the value, for one out of range or two that exclude each other.
    """

    max_tokens: int = 16
    n: int = 1
    """Samples of one prompt."""
    temperature: float = 0.0
    """0 takes the likeliest token."""
    top_k: int | None = None
    """Sample among so many of the likeliest tokens; None: among all."""
    beam_width: int | None = None
    """Not None: beam search, of which all beams are returned, best first."""
    length_penalty: float = 1.0
    """A beam's score is the sum of its log-probabilities over length ** length_penalty."""
    stop_token_ids: tuple[int, ...] = ()
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("max_tokens", "n", "top_k", "beam_width"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise InputError(f"{name}={value}: expected at least 1")
        if not self.temperature >= 0:
            raise InputError(f"temperature={self.temperature}: expected at least 0")
        if self.beam_width is not None and (self.n > 1 or self.temperature > 0):
            raise InputError(
                f"beam_width={self.beam_width}: expected n=1 and temperature=0, not n={self.n} "
                f"and temperature={self.temperature}"
            )

    @property
    def width(self) -> int:
        """The most sequences that are live at once."""
        return self.beam_width or self.n


@dataclass
class Path:
    """A text so far."""

    token_ids: list[int] = field(default_factory=list)
    """Generated, without the prompt."""
    logprob: float = 0.0
    """Sum of its tokens' log-probabilities."""
    generator: torch.Generator | None = None


class Branch(NamedTuple):
    """The live path `parent` goes on with `token`."""

    parent: int
    token: int


class Completion(NamedTuple):
    """A finished text."""

    token_ids: list[int]
    """Generated, a stop token included."""
    logprob: float
    """Sum of its tokens' log-probabilities."""


class Decoding(Protocol):
    """The state of one request's texts."""

    live: list[Path]

    def advance(self, logits: torch.Tensor) -> list[Branch]:
        """Take one token more on every live path; `live` then is one path a branch.

        `logits` is float32 [len(live), vocab_size]. Without branches the request is finished.
        """

    def completions(self) -> list[Completion]:
        """All texts of a finished request."""


def start_decoding(params: SamplingParams) -> Decoding:
    """The state before the first token: one empty path."""
    return Samples(params) if params.beam_width is None else Beams(params)


class Samples:
    """`n` independent texts. Equal seeds give equal texts, whatever else is in the batch."""

    def __init__(self, params: SamplingParams) -> None:
        self.params = params
        self.live = [Path()]
        self._origin: list[int] = []  # of each live path, which sample it is
        self._done: dict[int, Path] = {}

    def advance(self, logits: torch.Tensor) -> list[Branch]:
        parents = list(range(len(self.live)))
        if not self._origin:
            self._origin = list(range(self.params.n))
            parents = [0] * self.params.n
            self.live = [self._new_path(sample) for sample in self._origin]
        branches, live, origin = [], [], []
        logprobs = logits.log_softmax(-1)
        for path, sample, parent in zip(self.live, self._origin, parents, strict=True):
            token = self._choose(logits[parent], path.generator)
            path.token_ids.append(token)
            path.logprob += float(logprobs[parent, token])
            if token in self.params.stop_token_ids or len(path.token_ids) == self.params.max_tokens:
                self._done[sample] = path
                continue
            branches.append(Branch(parent, token))
            live.append(path)
            origin.append(sample)
        self.live, self._origin = live, origin
        return branches

    def completions(self) -> list[Completion]:
        paths = [self._done[sample] for sample in sorted(self._done)]
        return [Completion(path.token_ids, path.logprob) for path in paths]

    def _new_path(self, sample: int) -> Path:
        # Seeds that are near give unrelated generators only after some mixing.
        seed = hash((self.params.seed, sample)) % 2**63
        return Path(generator=torch.Generator().manual_seed(seed))

    def _choose(self, logits: torch.Tensor, generator: torch.Generator | None) -> int:
        if self.params.temperature == 0:
            return int(logits.argmax())
        logits = logits / self.params.temperature
        if self.params.top_k is not None and self.params.top_k < len(logits):
            lowest = logits.topk(self.params.top_k).values[-1]
            logits = logits.masked_fill(logits < lowest, float("-inf"))
        return int(torch.multinomial(logits.softmax(-1), 1, generator=generator))


class Beams:
    """Beam search, ending when no live beam can beat the worst finished one.

    Of the 2 * beam_width likeliest continuations, those that end the text within the first
    beam_width join the finished ones, of which the best beam_width are kept; the likeliest
    beam_width of the others go on.
    """

    def __init__(self, params: SamplingParams) -> None:
        assert params.beam_width is not None
        self.params = params
        self.width = params.beam_width
        self.live = [Path()]
        self._finished: list[tuple[float, Path]] = []

    def advance(self, logits: torch.Tensor) -> list[Branch]:
        total = logits.log_softmax(-1) + torch.tensor([path.logprob for path in self.live])[:, None]
        num_ends = max(1, len(self.params.stop_token_ids))
        best = total.flatten().topk(min((1 + num_ends) * self.width, total.numel()))
        branches, live = [], []
        for rank, (score, index) in enumerate(
            zip(best.values.tolist(), best.indices.tolist(), strict=True)
        ):
            parent, token = divmod(index, total.shape[1])
            path = Path([*self.live[parent].token_ids, token], score)
            is_last = len(path.token_ids) == self.params.max_tokens
            if is_last or token in self.params.stop_token_ids:
                if rank < self.width:
                    self._finish(path)
            elif len(live) < self.width:
                branches.append(Branch(parent, token))
                live.append(path)
        self.live = live
        if live and not self._can_improve():
            self.live, branches = [], []
        return branches

    def completions(self) -> list[Completion]:
        return [Completion(path.token_ids, path.logprob) for _, path in self._finished]

    def _finish(self, path: Path) -> None:
        self._finished.append((self._score(path), path))
        # Stable: of equal scores the earlier one stays first.
        self._finished.sort(key=lambda item: -item[0])
        del self._finished[self.width :]

    def _can_improve(self) -> bool:
        if len(self._finished) < self.width:
            return True
        return self._score(self.live[0]) > self._finished[-1][0]

    def _score(self, path: Path) -> float:
        return path.logprob / len(path.token_ids) ** self.params.length_penalty
