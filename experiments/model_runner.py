"""One forward pass of a model over the paged cache: from scheduled tokens to logits."""

from collections.abc import Sequence as ListOf
from typing import NamedTuple

import numpy as np
import torch

from cache.block_manager import BlockSpaceManager
from cache.sequence import Sequence
from kernels.kv_cache import KVCache

from .attention import IMPLEMENTATION, OPS, AttentionStep
from .models import LoadedModel


class Span(NamedTuple):
    """Tokens of one sequence to compute: positions `start` to `start + count`."""

    seq: Sequence
    start: int
    count: int

    @property
    def end(self) -> int:
        return self.start + self.count


class ModelRunner:
    """Runs a model whose keys and values lie in `kv_cache`, where `manager` says."""

    def __init__(
        self, loaded: LoadedModel, manager: BlockSpaceManager, kv_cache: KVCache, kernels: str
    ) -> None:
        self.model = loaded.model
        self.manager = manager
        self.kv_cache = kv_cache
        self.ops = OPS[kernels]
        if self.model.config._attn_implementation != IMPLEMENTATION:
            self.model.set_attn_implementation(IMPLEMENTATION)

    @torch.inference_mode()
    def forward(self, spans: ListOf[Span]) -> torch.Tensor:
        """Compute the spans in one batch, write their KV, and return each one's last logits.

        The blocks of every sequence cover its span, and the KV before it is in the cache.

        Returns:
            float32 [num_spans, vocab_size], on the CPU.
        """
        device = self.model.device
        token_ids = np.concatenate([s.seq.token_ids[s.start : s.end] for s in spans])
        positions = np.concatenate([np.arange(s.start, s.end) for s in spans])
        query_start_loc = np.cumsum([0, *(s.count for s in spans)], dtype=np.int32)
        tokens = torch.from_numpy(token_ids.astype(np.int64)).to(device)
        output = self.model(
            input_ids=tokens[None],
            position_ids=torch.from_numpy(positions).to(device)[None],
            use_cache=False,
            logits_to_keep=torch.from_numpy(query_start_loc[1:].astype(np.int64) - 1).to(device),
            paged=self._attention_step(spans, query_start_loc),
        )
        return output.logits[0].float().cpu()

    def _attention_step(self, spans: ListOf[Span], query_start_loc: np.ndarray) -> AttentionStep:
        device = self.model.device
        tables = self.manager.tables
        rows = self.manager.rows_of([s.seq for s in spans])
        block_tables = tables.block_tables[rows, : tables.num_blocks[rows].max()]
        slots = [self.manager.get_slot_mapping(s.seq, s.start, s.end) for s in spans]
        seq_lens = np.array([s.end for s in spans], dtype=np.int32)
        return AttentionStep(
            kv_cache=self.kv_cache,
            ops=self.ops,
            slot_mapping=torch.from_numpy(np.concatenate(slots)).to(device),
            block_tables=torch.from_numpy(np.ascontiguousarray(block_tables)).to(device),
            seq_lens=torch.from_numpy(seq_lens).to(device),
            query_start_loc=torch.from_numpy(query_start_loc).to(device),
            max_query_len=max(s.count for s in spans),
        )
