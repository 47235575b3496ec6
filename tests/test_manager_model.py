"""The block manager against the plain model, step by step, in pools so small that they fill.

Each step is done to a `BlockSpaceManager` and to a `CacheModel`, and everything that can be seen
must agree: ids, copies, counts and answers. An answer of OK is followed by the action; an action
that fails must leave every array as it was.
"""

import os
from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from cache.block_manager import BlockSpaceManager
from cache.interfaces import Device, NoFreeBlocksError
from cache.sequence import Sequence, SequenceGroup, SequenceStatus
from tests.cache_model import CacheModel, ModelFull
from tests.snapshot import assert_unchanged, snapshot

NUM_EXAMPLES = int(os.environ.get("PREFIXLAB_EXAMPLES", "250"))
STEPS_AN_EXAMPLE = 50

index = st.integers(0, 11)
token = st.integers(0, 1)
tokens = st.lists(token, min_size=1, max_size=13)
lookahead = st.sampled_from([0, 0, 0, 1, 2, 5])
extra_key = st.sampled_from([None, None, None, "a", 1, True])
few = st.lists(index, min_size=1, max_size=4)


class ManagerMachine(RuleBasedStateMachine):
    """Without a sliding window; caching on or off."""

    num_steps = 0  # of all machines

    @initialize(
        block_size=st.sampled_from([2, 1, 3, 4]),
        num_gpu_blocks=st.sampled_from([8, 10, 12, 6, 4, 3]),
        num_cpu_blocks=st.sampled_from([8, 6, 3, 0]),
        watermark=st.sampled_from([0.0, 0.0, 0.1, 0.25, 0.5]),
        enable_caching=st.sampled_from([True, True, True, False]),
        evictor=st.sampled_from(["lru", "lru", "fifo"]),
        algorithm=st.sampled_from(["mix64", "mix64", "mix64", "sha256"]),
    )
    def build(self, algorithm: str, **config: object) -> None:
        self.start(algorithm, **config)

    def start(self, algorithm: str, evictor: str = "lru", **config: object) -> None:
        self.manager = BlockSpaceManager(
            **config, evictor=evictor, hash_seed=7, hash_algorithm=algorithm
        )
        self.model = CacheModel(**config, evictor=evictor)
        self.block_size = config["block_size"]
        self.groups: list[SequenceGroup] = []
        self.history: list[Sequence] = []
        self.next_id = 0

    # -- helpers

    def act(self, real: Callable[[], object], model: Callable[[], object]) -> tuple[bool, object]:
        """Do one thing to both; say whether it succeeded and what the manager returned."""
        before = snapshot(self.manager)
        try:
            expected = model()
        except ModelFull:
            with pytest.raises(NoFreeBlocksError):
                real()
            assert_unchanged(self.manager, before)
            return False, None
        got = real()
        if expected is not None:
            assert got.tolist() == [list(pair) for pair in expected]
        return True, got

    def refused(self, action: Callable[[], object]) -> None:
        """A caller's mistake changes nothing."""
        before = snapshot(self.manager)
        with pytest.raises(ValueError, match=r"."):
            action()
        assert_unchanged(self.manager, before)

    def live(self, device: int | None = None) -> list[tuple[SequenceGroup, Sequence]]:
        return [
            (group, seq)
            for group in self.groups
            for seq in group.seqs
            if seq.seq_id in self.model.tables
            and device in (None, self.model.tables[seq.seq_id].device)
        ]

    def pick(self, items: list, number: int) -> object:
        return items[number % len(items)]

    def pick_some(self, items: list, numbers: list[int]) -> list:
        return [items[i] for i in dict.fromkeys(number % len(items) for number in numbers)]

    def fresh_id(self) -> int:
        self.next_id += 1
        return self.next_id - 1

    def waiting(self) -> list[SequenceGroup]:
        return [g for g in self.groups if g.get_seqs(SequenceStatus.WAITING)]

    def on(self, group: SequenceGroup, device: int) -> list[Sequence]:
        return [seq for g, seq in self.live(device) if g is group]

    def unseen(self, seq: Sequence) -> list[int]:
        return seq.token_ids.tolist()[self.model.tables[seq.seq_id].length :]

    def admit(self, group: SequenceGroup, num_lookahead_slots: int) -> bool:
        seqs = group.get_seqs(SequenceStatus.WAITING)
        prompt, key = seqs[0].token_ids.tolist(), seqs[0].extra_key
        answer = self.manager.can_allocate(group, num_lookahead_slots).value
        assert answer == self.model.can_allocate(prompt, key, num_lookahead_slots)
        cached = self.model.find_cached_prefix(prompt, key)
        assert self.manager.get_num_cached_tokens(seqs[0]) == len(cached) * self.block_size
        assert self.manager.allocator.find_cached_prefix(prompt, key).tolist() == cached
        done, _ = self.act(
            lambda: self.manager.allocate(group, num_lookahead_slots),
            lambda: self.model.allocate(
                [seq.seq_id for seq in seqs], prompt, key, num_lookahead_slots
            ),
        )
        assert done or answer != "ok"
        if done:
            for seq in seqs:
                seq.status = SequenceStatus.RUNNING
                seq.num_computed_tokens = 0
        return done

    def append_unseen(self, seq: Sequence, num_lookahead_slots: int) -> bool:
        computed = min(seq.num_computed_tokens, self.model.tables[seq.seq_id].length)
        done, _ = self.act(
            lambda: self.manager.append_slots(seq, num_lookahead_slots),
            lambda: self.model.append(
                [(seq.seq_id, self.unseen(seq))], num_lookahead_slots, [computed]
            ),
        )
        return done

    # -- rules

    @rule(prompt=tokens, key=extra_key, num_seqs=st.sampled_from([1, 1, 1, 2, 3]), ahead=lookahead)
    def submit(self, prompt: list[int], key: object, num_seqs: int, ahead: int) -> None:
        seqs = [Sequence(self.fresh_id(), prompt, key) for _ in range(num_seqs)]
        self.groups.append(SequenceGroup(len(self.groups), seqs))
        self.history.append(seqs[0])
        self.admit(self.groups[-1], ahead)

    @precondition(lambda self: self.history)
    @rule(
        number=index, length=st.integers(1, 12), tail=st.lists(token, max_size=4), ahead=lookahead
    )
    def submit_alike(self, number: int, length: int, tail: list[int], ahead: int) -> None:
        """A prompt that starts like another sequence, living or gone."""
        other = self.pick(self.history[::-1], number)
        self.submit(other.token_ids.tolist()[:length] + tail, other.extra_key, 1, ahead)

    @precondition(lambda self: self.waiting())
    @rule(number=index, ahead=lookahead)
    def admit_waiting(self, number: int, ahead: int) -> None:
        self.admit(self.pick(self.waiting(), number), ahead)

    @precondition(lambda self: self.live(Device.GPU))
    @rule(number=index, new=st.lists(token, max_size=6), ahead=lookahead)
    def append(self, number: int, new: list[int], ahead: int) -> None:
        """To one sequence, zero, one or many tokens."""
        _, seq = self.pick(self.live(Device.GPU), number)
        seq.append_token_ids(new)
        self.append_unseen(seq, ahead)

    @precondition(lambda self: self.live(Device.GPU))
    @rule(number=index, new=st.lists(token, max_size=3), ahead=lookahead)
    def append_to_group(self, number: int, new: list[int], ahead: int) -> None:
        group, _ = self.pick(self.live(Device.GPU), number)
        seqs = self.on(group, Device.GPU)
        for i, seq in enumerate(seqs):
            seq.append_token_ids(new[i:])
        rows = [(seq.seq_id, len(self.unseen(seq))) for seq in seqs]
        fits = self.manager.can_append_slots(group, ahead)
        assert fits == self.model.can_append(rows, ahead)
        for seq in seqs:
            done = self.append_unseen(seq, ahead)
            assert done or not fits

    @precondition(lambda self: self.live(Device.GPU))
    @rule(numbers=few, new=st.lists(token, min_size=4, max_size=4), ahead=lookahead)
    def append_batch(self, numbers: list[int], new: list[int], ahead: int) -> None:
        """One token to each of several sequences that have nothing unseen."""
        seqs = self.seen()
        self.decode(self.pick_some(seqs, numbers) if seqs else [], new, ahead)

    @precondition(lambda self: self.live(Device.GPU))
    @rule(
        new=st.lists(token, min_size=8, max_size=8),
        num_steps=st.integers(1, 3),
        alike=st.booleans(),
    )
    def decode_all(self, new: list[int], num_steps: int, alike: bool) -> None:
        for step in range(num_steps):
            seqs = self.seen()[:8]
            new = new[step:] + new[:step]
            if alike:
                new = [self.follow(seq, new[i]) for i, seq in enumerate(seqs)]
            self.decode(seqs, new, 0)

    def follow(self, seq: Sequence, otherwise: int) -> int:
        """The next token of another sequence that starts like this one, to fill blocks alike."""
        mine = seq.token_ids.tolist()
        for other in self.history[::-1]:
            theirs = other.token_ids.tolist()
            if len(theirs) > len(mine) and theirs[: len(mine)] == mine:
                return theirs[len(mine)]
        return otherwise

    def seen(self) -> list[Sequence]:
        return [seq for _, seq in self.live(Device.GPU) if not self.unseen(seq)]

    def decode(self, seqs: list[Sequence], new: list[int], ahead: int) -> None:
        rows = self.manager.rows_of(seqs)
        pairs = [(seq.seq_id, [new[i]]) for i, seq in enumerate(seqs)]
        taken = self.model.num_taken_by_append([(s, 1) for s, _ in pairs], ahead)
        assert self.manager.num_blocks_taken_by_append(rows, ahead) == taken
        computed = [seq.num_tokens for seq in seqs]
        done, _ = self.act(
            lambda: self.manager.append_slots_batch(rows, new[: len(seqs)], ahead),
            lambda: self.model.append(pairs, ahead, computed),
        )
        if done:
            for seq, new_token in zip(seqs, new, strict=False):
                seq.num_computed_tokens = seq.num_tokens
                seq.append_token_ids([new_token])

    @precondition(lambda self: self.live())
    @rule(number=index, num_children=st.integers(0, 3))
    def fork(self, number: int, num_children: int) -> None:
        group, parent = self.pick(self.live(), number)
        children = [parent.fork(self.fresh_id()) for _ in range(num_children)]
        seq_ids = [child.seq_id for child in children]
        self.model.fork(parent.seq_id, seq_ids)
        if num_children == 1:
            self.manager.fork(parent, children[0])
        else:
            self.manager.fork_many(parent, children)
        for child in children:
            group.add(child)

    @precondition(lambda self: self.live(Device.GPU))
    @rule(number=index, num_tokens=st.one_of(st.none(), st.integers(0, 12)))
    def mark_computed(self, number: int, num_tokens: int | None) -> None:
        group, _ = self.pick(self.live(Device.GPU), number)
        self.mark(group, num_tokens)

    def mark(self, group: SequenceGroup, num_tokens: int | None) -> None:
        seqs = self.on(group, Device.GPU)
        self.manager.mark_blocks_as_computed(group, num_tokens)
        self.model.mark_computed([seq.seq_id for seq in seqs], num_tokens)
        for seq in seqs:
            length = self.model.tables[seq.seq_id].length
            computed = length if num_tokens is None else min(length, num_tokens)
            seq.num_computed_tokens = max(seq.num_computed_tokens, computed)

    @precondition(lambda self: self.live())
    @rule(number=index, now=st.integers(0, 5), start=st.sampled_from([0, 0, 1, 2]))
    def access(self, number: int, now: int, start: int) -> None:
        """Times that go back, too, and a tail alone: so that a prefix is evicted before it."""
        _, seq = self.pick(self.live(), number)
        table = self.model.tables[seq.seq_id]
        if start:
            blocks = table.blocks[max(start, table.num_null) :]
            block_ids = [block.block_id for block in blocks]
            self.manager.allocator.mark_blocks_as_accessed(block_ids, now, Device(table.device))
            for block in blocks:
                block.last_accessed = float(now)
        else:
            self.manager.access_all_blocks_in_seq(seq, now)
            self.model.access(seq.seq_id, float(now))

    @precondition(lambda self: self.live())
    @rule(numbers=few, computed=st.booleans())
    def free(self, numbers: list[int], computed: bool) -> None:
        """Of both devices at once; what was computed stays in the cache."""
        chosen = self.pick_some(self.live(), numbers)
        seqs = [seq for _, seq in chosen]
        if computed:
            on_gpu = self.pick_some(self.live(Device.GPU), numbers) if self.live(Device.GPU) else []
            for group, _ in on_gpu:
                self.mark(group, None)
        if len(seqs) == 1:
            self.manager.free(seqs[0])
            self.refused(lambda: self.manager.free(seqs[0]))
        else:
            self.manager.free_many(seqs)
        self.model.free([seq.seq_id for seq in seqs])
        for group, seq in chosen:
            group.seqs.remove(seq)

    @precondition(lambda self: self.live())
    @rule(number=index, moved=st.booleans(), ahead=lookahead)
    def preempt_by_recompute(self, number: int, moved: bool, ahead: int) -> None:
        """Free a sequence and let it wait, in its group or, where another waits, in its own."""
        group, seq = self.pick(self.live(), number)
        self.manager.free(seq)
        self.model.free([seq.seq_id])
        if moved or group.get_seqs(SequenceStatus.WAITING):
            group.seqs.remove(seq)
            group = SequenceGroup(len(self.groups), [seq])
            self.groups.append(group)
        seq.status = SequenceStatus.WAITING
        self.admit(group, ahead)

    @precondition(lambda self: self.live(Device.GPU))
    @rule(number=index)
    def swap_out(self, number: int) -> None:
        group, _ = self.pick(self.live(Device.GPU), number)
        seq_ids = [seq.seq_id for seq in self.on(group, Device.GPU)]
        fits = self.manager.can_swap_out(group)
        assert fits == self.model.can_swap_out(seq_ids)
        done, _ = self.act(
            lambda: self.manager.swap_out(group), lambda: self.model.swap_out(seq_ids)
        )
        assert done == fits

    @precondition(lambda self: self.live(Device.CPU))
    @rule(number=index, new=st.lists(token, max_size=5), ahead=lookahead)
    def swap_in(self, number: int, new: list[int], ahead: int) -> None:
        group, _ = self.pick(self.live(Device.CPU), number)
        seqs = self.on(group, Device.CPU)
        for i, seq in enumerate(seqs):
            seq.append_token_ids(new[2 * i :])
        rows = [(seq.seq_id, len(self.unseen(seq))) for seq in seqs]
        answer = self.manager.can_swap_in(group, ahead).value
        assert answer == self.model.can_swap_in(rows, ahead)
        done, _ = self.act(
            lambda: self.manager.swap_in(group),
            lambda: self.model.swap_in([seq_id for seq_id, _ in rows]),
        )
        assert done or answer != "ok"
        if answer == "ok":
            for seq in seqs:
                assert self.append_unseen(seq, ahead)

    @rule(kind=st.sampled_from(["reset", "drain", "mistakes"]), number=index)
    def rarely(self, kind: str, number: int) -> None:
        if kind == "reset":
            self.reset(self.pick(list(Device), number))
        elif kind == "drain":
            self.drain()
        elif self.live():
            self.mistakes(*self.pick(self.live(), number))

    def reset(self, device: Device) -> None:
        before = snapshot(self.manager)
        done = self.manager.reset_prefix_cache(device)
        assert done == self.model.reset(device)
        if not done:
            assert_unchanged(self.manager, before)

    def drain(self) -> None:
        """Free everything: then all blocks are free (case A25)."""
        seqs = [seq for _, seq in self.live()]
        self.manager.free_many(seqs)
        self.model.free([seq.seq_id for seq in seqs])
        self.groups.clear()
        for device in Device:
            pool = self.model.pools[device]
            assert self.manager.allocator.get_num_free_blocks(device) == pool.total

    def mistakes(self, group: SequenceGroup, seq: Sequence) -> None:
        stranger = Sequence(-1, [0])
        self.refused(lambda: self.manager.free(stranger))
        self.refused(lambda: self.manager.append_slots(stranger))
        self.refused(lambda: self.manager.free_many([seq, seq]))
        self.refused(lambda: self.manager.fork(seq, seq))
        self.refused(lambda: self.manager.fork(stranger, stranger))
        row = self.manager.rows_of([seq])[0]
        self.refused(lambda: self.manager.append_slots_batch([row, row], [0, 0]))
        self.refused(lambda: self.manager.append_slots_batch([row], [-1]))
        if self.model.tables[seq.seq_id].device == Device.CPU:
            self.refused(lambda: self.manager.append_slots(seq))
            self.refused(lambda: self.manager.append_slots_batch([row], [0]))
        for device, swap in enumerate([self.manager.swap_out, self.manager.swap_in]):
            if not self.on(group, device):
                self.refused(lambda swap=swap: swap(group))

    # -- what must agree after every step

    @invariant()
    def agrees_with_the_model(self) -> None:
        if not hasattr(self, "model"):
            return
        type(self).num_steps += 1
        manager, model = self.manager, self.model
        manager.check_integrity()
        model.check()
        assert manager.get_num_free_gpu_blocks() == model.pools[Device.GPU].num_free
        assert manager.get_num_free_cpu_blocks() == model.pools[Device.CPU].num_free
        for device in Device:
            self.check_pool(device)
        live = self.live()
        for _, seq in live:
            self.check_sequence(seq)
        on_gpu = [seq for _, seq in self.live(Device.GPU)]
        for seqs in (on_gpu[:1], on_gpu[-2:], on_gpu):
            common = manager.get_common_computed_block_ids(seqs)
            assert common == model.common_computed([seq.seq_id for seq in seqs])
        assert not len(manager.allocator.clear_copy_on_writes())

    def check_pool(self, device: Device) -> None:
        model, stats = self.model.pools[device], self.manager.get_stats(device)
        got = (stats.lookups, stats.hits, stats.evictions, stats.copies, stats.promotions)
        expected = model.stats
        assert got == (
            expected.lookups,
            expected.hits,
            expected.evictions,
            expected.copies,
            expected.promotions,
        )
        if self.model.caching:
            allocator = self.manager.allocator.allocator(device)
            assert allocator.evictor.block_ids().tolist() == sorted(model.evictable)
            _, cached = allocator.index.entries()
            assert sorted(cached.tolist()) == sorted(b.block_id for b in model.index.values())

    def check_sequence(self, seq: Sequence) -> None:
        table = self.model.tables[seq.seq_id]
        manager, size = self.manager, self.block_size
        block_ids = manager.get_block_table(seq).tolist()
        assert block_ids == self.model.block_table(seq.seq_id)
        assert manager.get_num_cached_tokens(seq) == table.num_cached_tokens
        row = manager.rows_of([seq])[0]
        assert manager.tables.devices[row] == table.device
        assert manager.tables.seq_lens[row] == table.length
        # Case A29, as far as block ids go: the blocks hold exactly the sequence's own tokens.
        pool = manager.allocator.allocator(Device(table.device)).pool
        for i in range(table.num_null, len(block_ids)):
            block_id, block = block_ids[i], table.blocks[i]
            end = min((i + 1) * size, table.length)
            expected = seq.token_ids[i * size : max(end, i * size)].tolist()
            assert pool.token_ids[block_id, : len(expected)].tolist() == expected
            assert pool.num_tokens[block_id] == len(expected) == len(block.tokens)
            assert pool.last_accessed[block_id] == block.last_accessed
            if self.model.caching:
                assert pool.computed[block_id] == block.computed
                assert pool.in_prefill[block_id] == block.in_prefill


class WindowMachine(ManagerMachine):
    """With a sliding window, and so without caching."""

    num_steps = 0

    @initialize(
        block_size=st.sampled_from([2, 1, 3, 4]),
        num_gpu_blocks=st.sampled_from([8, 10, 12, 6, 4, 3]),
        num_cpu_blocks=st.sampled_from([8, 6, 3, 0]),
        watermark=st.sampled_from([0.0, 0.0, 0.1, 0.25, 0.5]),
        sliding_window=st.integers(1, 7),
    )
    def build(self, **config: object) -> None:
        self.start("mix64", **config)
        self.window = config["sliding_window"]

    @invariant()
    def keeps_the_window(self) -> None:
        """No query to come sees a key in the null block, and nobody writes that block."""
        if not hasattr(self, "window"):
            return
        pool = self.manager.allocator.allocator(Device.GPU).pool
        assert pool.ref_count[0] == 1
        assert not pool.num_tokens[0]
        assert not pool.token_ids[0].any()
        for _, seq in self.live():
            table = self.model.tables[seq.seq_id]
            computed = min(seq.num_computed_tokens, table.length)
            first_key = max(0, computed - self.window + 1)
            in_use = self.model.block_table(seq.seq_id)[first_key // self.block_size :]
            assert min(in_use, default=1) > 0 or table.device == Device.CPU
            assert table.num_null <= first_key // self.block_size


COMMON = settings(
    max_examples=NUM_EXAMPLES,
    stateful_step_count=STEPS_AN_EXAMPLE,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    print_blob=True,
)

TestManager = ManagerMachine.TestCase
TestManager.settings = COMMON
TestWindow = WindowMachine.TestCase
TestWindow.settings = settings(COMMON, max_examples=NUM_EXAMPLES // 2 + 1)
