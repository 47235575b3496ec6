"""A small scheduler over the block manager, with a stand-in for the KV cache that remembers tokens.

The KV of a token is stood for by the tokens up to it. Each step makes the copies that the manager
asked for, writes what was scheduled, and then every scheduled query must find the KV of every token
that it sees: whatever was shared, skipped, copied, swapped, evicted and promoted in between.
"""

import os

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from cache.block_manager import BlockSpaceManager
from cache.interfaces import AllocStatus, Device
from cache.sequence import Sequence, SequenceGroup, SequenceStatus

NUM_EXAMPLES = int(os.environ.get("PREFIXLAB_EXAMPLES", "250"))

index = st.integers(0, 11)
token = st.integers(0, 1)
extra_key = st.sampled_from([None, None, None, "salt", 1])


class StepMachine(RuleBasedStateMachine):
    """Schedules at random and runs steps. With caching, or with a sliding window."""

    num_steps = 0

    @initialize(
        block_size=st.sampled_from([2, 1, 3, 4]),
        num_gpu_blocks=st.sampled_from([8, 10, 12, 6, 4, 3]),
        num_cpu_blocks=st.sampled_from([8, 6, 3, 0]),
        evictor=st.sampled_from(["lru", "fifo"]),
        sliding_window=st.sampled_from([None, None, None, 1, 2, 3, 5]),
    )
    def build(self, sliding_window: int | None, **config: int) -> None:
        self.manager = BlockSpaceManager(
            **config,
            watermark=0.0,
            sliding_window=sliding_window,
            enable_caching=sliding_window is None,
            hash_seed=7,
        )
        self.block_size = config["block_size"]
        self.window = sliding_window
        self.kv: dict[tuple[Device, int, int], object] = {}
        self.groups: list[SequenceGroup] = []
        self.history: list[Sequence] = []
        self.scheduled: dict[Sequence, int] = {}
        self.next_id = 0
        self.now = 0

    # -- what can be chosen from

    def seqs(self, status: SequenceStatus) -> list[tuple[SequenceGroup, Sequence]]:
        return [(g, seq) for g in self.groups for seq in g.get_seqs(status)]

    def idle(self) -> list[tuple[SequenceGroup, Sequence]]:
        running = self.seqs(SequenceStatus.RUNNING)
        return [(g, seq) for g, seq in running if seq not in self.scheduled]

    def decoding(self) -> list[tuple[SequenceGroup, Sequence]]:
        return [(g, s) for g, s in self.idle() if s.num_computed_tokens == s.num_tokens]

    def fresh_id(self) -> int:
        self.next_id += 1
        return self.next_id

    def copy_blocks(self, pairs: list, source: Device, target: Device) -> None:
        read = [
            [self.kv.get((source, src, offset)) for offset in range(self.block_size)]
            for src, _ in pairs
        ]
        for (_, dst), values in zip(pairs, read, strict=True):
            for offset, value in enumerate(values):
                self.kv[target, dst, offset] = value

    def append(self, seq: Sequence, num_lookahead_slots: int = 0) -> None:
        pairs = self.manager.append_slots(seq, num_lookahead_slots).tolist()
        self.copy_blocks(pairs, Device.GPU, Device.GPU)

    # -- scheduling

    @rule(
        prompt=st.lists(token, min_size=1, max_size=13),
        alike=index,
        length=st.integers(0, 12),
        key=extra_key,
        served=st.booleans(),
    )
    def submit(self, prompt: list[int], alike: int, length: int, key: object, served: bool) -> None:
        """A prompt, often one that starts like another sequence, living or gone."""
        if self.history and length:
            other = self.history[-1 - alike % len(self.history)]
            prompt = other.token_ids[:length].tolist() + prompt[:3]
            key = other.extra_key
        self.enter(prompt, key, served)

    @rule(prompt=st.lists(token, min_size=4, max_size=9), key=extra_key)
    def race(self, prompt: list[int], key: object) -> None:
        """A sequence decodes what another one still prefills: its block becomes the other's."""
        end = len(prompt) // self.block_size * self.block_size
        if end > 1:
            self.enter(prompt[: end - 1], key, served=True)
            self.enter(prompt[:end], key, served=False)
            if self.decoding():
                self.decode([0] * 12, count=1, ahead=False, alike=True)

    def enter(self, prompt: list[int], key: object, served: bool) -> None:
        """Admit a prompt if that is possible, and compute it at once if wanted."""
        seq = Sequence(self.fresh_id(), prompt, key)
        self.groups.append(SequenceGroup(seq.seq_id, [seq]))
        self.history.append(seq)
        self.admit(len(self.seqs(SequenceStatus.WAITING)) - 1)
        if served and seq.status is SequenceStatus.RUNNING:
            self.scheduled[seq] = seq.num_tokens
            self.run_step()

    @precondition(lambda self: self.seqs(SequenceStatus.WAITING))
    @rule(number=index)
    def admit(self, number: int) -> None:
        waiting = self.seqs(SequenceStatus.WAITING)
        group, seq = waiting[number % len(waiting)]
        if self.manager.can_allocate(group) is AllocStatus.OK:
            self.manager.allocate(group)
            seq.status = SequenceStatus.RUNNING
            seq.num_computed_tokens = self.manager.get_num_cached_tokens(seq)
            assert seq.num_computed_tokens < seq.num_tokens

    @precondition(lambda self: self.idle())
    @rule(number=index, chunk=st.integers(1, 13))
    def prefill(self, number: int, chunk: int) -> None:
        """Also in chunks."""
        _, seq = self.idle()[number % len(self.idle())]
        end = min(seq.num_tokens, seq.num_computed_tokens + chunk)
        if end > seq.num_computed_tokens:
            self.scheduled[seq] = end

    @precondition(lambda self: self.decoding())
    @rule(
        new=st.lists(token, min_size=12, max_size=12),
        count=st.sampled_from([1, 1, 2, 3]),
        ahead=st.booleans(),
        alike=st.booleans(),
    )
    def decode(self, new: list[int], count: int, ahead: bool, alike: bool) -> None:
        """All that can, in one batch or, with draft tokens, one by one."""
        seqs = [seq for _, seq in self.decoding()][: len(new)]
        if alike:
            new = [self.follow(seq, t) for seq, t in zip(seqs, new, strict=False)] + new
        rows = self.manager.rows_of(seqs)
        if count == 1:
            if (
                self.manager.num_blocks_taken_by_append(rows)
                > self.manager.get_num_free_gpu_blocks()
            ):
                return
            pairs = self.manager.append_slots_batch(rows, new[: len(seqs)]).tolist()
            self.copy_blocks(pairs, Device.GPU, Device.GPU)
            for seq, new_token in zip(seqs, new, strict=False):
                seq.append_token_ids([new_token])
                self.scheduled[seq] = seq.num_tokens
            return
        for group, seq in self.decoding():
            draft = SequenceGroup("draft", [seq])
            seq.append_token_ids(new[:count])
            if self.manager.can_append_slots(draft, int(ahead)):
                self.append(seq, int(ahead))
                self.scheduled[seq] = seq.num_tokens
            else:
                self.give_up(group, seq)
            new = new[1:] + new[:1]

    def follow(self, seq: Sequence, otherwise: int) -> int:
        """The next token of another sequence that starts like this one, to fill blocks alike."""
        mine = seq.token_ids.tolist()
        for other in self.history[::-1]:
            theirs = other.token_ids.tolist()
            if len(theirs) > len(mine) and theirs[: len(mine)] == mine:
                return theirs[len(mine)]
        return otherwise

    @precondition(lambda self: self.decoding())
    @rule(number=index, num_children=st.integers(1, 3))
    def fork(self, number: int, num_children: int) -> None:
        group, parent = self.decoding()[number % len(self.decoding())]
        children = [parent.fork(self.fresh_id()) for _ in range(num_children)]
        self.manager.fork_many(parent, children)
        for child in children:
            group.add(child)

    def give_up(self, group: SequenceGroup, seq: Sequence) -> None:
        """Preempt by recompute, in a group of its own."""
        self.manager.free(seq)
        self.scheduled.pop(seq, None)
        group.seqs.remove(seq)
        seq.status = SequenceStatus.WAITING
        self.groups.append(SequenceGroup(seq.seq_id, [seq]))

    @precondition(lambda self: self.seqs(SequenceStatus.RUNNING))
    @rule(number=index, finished=st.booleans())
    def preempt(self, number: int, finished: bool) -> None:
        """Also a sequence that this step was to compute."""
        running = self.seqs(SequenceStatus.RUNNING)
        group, seq = running[number % len(running)]
        if finished:
            self.manager.free(seq)
            self.scheduled.pop(seq, None)
            group.seqs.remove(seq)
        else:
            self.give_up(group, seq)

    @precondition(lambda self: self.seqs(SequenceStatus.RUNNING))
    @rule(number=index)
    def swap_out(self, number: int) -> None:
        """Sequences that wait for their step keep their place in it, but are not computed."""
        running = self.seqs(SequenceStatus.RUNNING)
        group, _ = running[number % len(running)]
        if not self.manager.can_swap_out(group):
            return
        pairs = self.manager.swap_out(group).tolist()
        self.copy_blocks(pairs, Device.GPU, Device.CPU)
        for seq in group.get_seqs(SequenceStatus.RUNNING):
            self.scheduled.pop(seq, None)
            seq.status = SequenceStatus.SWAPPED

    @precondition(lambda self: self.seqs(SequenceStatus.SWAPPED))
    @rule(number=index)
    def swap_in(self, number: int) -> None:
        swapped = self.seqs(SequenceStatus.SWAPPED)
        group, _ = swapped[number % len(swapped)]
        if self.manager.can_swap_in(group) is AllocStatus.OK:
            pairs = self.manager.swap_in(group).tolist()
            self.copy_blocks(pairs, Device.CPU, Device.GPU)
            for seq in group.get_seqs(SequenceStatus.SWAPPED):
                seq.status = SequenceStatus.RUNNING

    @rule()
    def run_step(self) -> None:
        """Write the KV of all that is scheduled, then read what each query sees."""
        self.now += 1
        for seq, end in self.scheduled.items():
            slots = self.manager.get_slot_mapping(seq, seq.num_computed_tokens, end).tolist()
            for position, slot in enumerate(slots, start=seq.num_computed_tokens):
                block_id, offset = divmod(slot, self.block_size)
                assert block_id > 0 or self.window is None, "the null block was written"
                self.kv[Device.GPU, block_id, offset] = self.value(seq, position)
        for seq, end in self.scheduled.items():
            self.check_reads(seq, seq.num_computed_tokens, end)
        done = list(self.scheduled)
        for seq, end in self.scheduled.items():
            seq.num_computed_tokens = end
            self.manager.access_all_blocks_in_seq(seq, self.now)
        self.manager.mark_blocks_as_computed_batch(
            self.manager.rows_of(done), [seq.num_computed_tokens for seq in done]
        )
        self.scheduled.clear()

    def value(self, seq: Sequence, position: int) -> object:
        return repr(seq.extra_key), seq.token_ids[: position + 1].tolist()

    def check_reads(self, seq: Sequence, start: int, end: int) -> None:
        first = 0 if self.window is None else max(0, start - self.window + 1)
        for position, slot in enumerate(
            self.manager.get_slot_mapping(seq, first, end).tolist(), start=first
        ):
            block_id, offset = divmod(slot, self.block_size)
            found = self.kv.get((Device.GPU, block_id, offset))
            assert found == self.value(seq, position), (
                f"sequence {seq.seq_id} reads {found} at position {position}, block {block_id}"
            )

    @invariant()
    def keeps_its_books(self) -> None:
        if hasattr(self, "manager"):
            type(self).num_steps += 1
            self.manager.check_integrity()


TestSteps = StepMachine.TestCase
TestSteps.settings = settings(
    max_examples=NUM_EXAMPLES,
    stateful_step_count=50,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    print_blob=True,
)
