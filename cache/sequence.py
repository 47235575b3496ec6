"""Sequence and SequenceGroup: what the block manager knows of a request."""

from collections.abc import Sequence as ListOf
from enum import Enum

import numpy as np

from .interfaces import SeqId, as_token_ids


class SequenceStatus(Enum):
    """Where a sequence is in its life."""

    WAITING = "waiting"
    RUNNING = "running"
    SWAPPED = "swapped"
    FINISHED = "finished"


class Sequence:
    """The tokens of one sequence.

    Args:
        seq_id: unique among the sequences of a manager.
        prompt_token_ids: each in [0, 2^31), at least one.
        extra_key: what must match besides the tokens for a prefix to be shared; see `ExtraKey`.

    Attributes:
        status: set by the scheduler.
        num_computed_tokens: tokens whose KV is computed; set by the scheduler.

    Raises:
        ValueError: for an empty prompt or a token out of range.
    """

    def __init__(
        self,
        seq_id: SeqId | int,
        prompt_token_ids: ListOf[int] | np.ndarray,
        extra_key: object = None,
    ) -> None:
        prompt = as_token_ids(prompt_token_ids).copy()
        if not len(prompt):
            raise ValueError(f"the prompt of sequence {seq_id!r} is empty")
        self.seq_id = seq_id
        self.extra_key = extra_key
        self.status = SequenceStatus.WAITING
        self.num_prompt_tokens = len(prompt)
        self.num_computed_tokens = 0
        self._tokens = prompt
        self._length = len(prompt)
        self._hashes: tuple[object, int, np.ndarray] | None = None

    @property
    def token_ids(self) -> np.ndarray:
        """All tokens, int32 [num_tokens], a view."""
        return self._tokens[: self._length]

    @property
    def num_tokens(self) -> int:
        """Prompt and generated tokens."""
        return self._length

    def append_token_ids(self, token_ids: ListOf[int] | np.ndarray) -> None:
        """Add generated tokens. Raises ValueError for a token out of range."""
        new = as_token_ids(token_ids)
        end = self._length + len(new)
        if end > len(self._tokens):
            grown = np.empty(max(end, 2 * len(self._tokens)), dtype=np.int32)
            grown[: self._length] = self.token_ids
            self._tokens = grown
        self._tokens[self._length : end] = new
        self._length = end

    def fork(self, seq_id: SeqId | int) -> "Sequence":
        """Return a sequence with the same tokens, status and progress."""
        child = Sequence(seq_id, self.token_ids, self.extra_key)
        child.num_prompt_tokens = self.num_prompt_tokens
        child.num_computed_tokens = self.num_computed_tokens
        child.status = self.status
        return child


class SequenceGroup:
    """The sequences of one request; while they wait, all have one prompt.

    Raises:
        ValueError: for no sequences, or two with one id.
    """

    def __init__(
        self, request_id: object, seqs: ListOf[Sequence], arrival_time: float = 0.0
    ) -> None:
        seq_ids = [seq.seq_id for seq in seqs]
        if not seqs or len(set(seq_ids)) != len(seq_ids):
            raise ValueError(f"request {request_id!r} has sequences {seq_ids}; expected distinct")
        self.request_id = request_id
        self.arrival_time = arrival_time
        self.seqs = list(seqs)

    def get_seqs(self, status: SequenceStatus | None = None) -> list[Sequence]:
        """The sequences with a status, or all."""
        return [seq for seq in self.seqs if status is None or seq.status is status]

    def add(self, seq: Sequence) -> None:
        """Add a forked sequence. Raises ValueError if its id is taken."""
        if any(seq.seq_id == other.seq_id for other in self.seqs):
            raise ValueError(f"sequence {seq.seq_id!r} is in request {self.request_id!r} already")
        self.seqs.append(seq)
