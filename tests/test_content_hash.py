"""The content hash: its definition in plain integers, and what must never collide."""

import subprocess
import sys
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cache.content_hash import FOLD, MIX_1, MIX_2, ContentHasher, ExtraKey, encode_extra_key

M64 = 2**64 - 1


def xor_shift(x: int, n: int) -> int:
    return x ^ (x >> n)


def hash_chain_in_plain_integers(
    hasher: ContentHasher, token_blocks: np.ndarray, root: int
) -> list[int]:
    """The module docstring's definition, one token pair at a time."""
    hashes = []
    h = root & M64
    for i, block in enumerate(token_blocks.tolist()):
        padded = [*block, 0] if len(block) % 2 else block
        y = (i + 1) * int(hasher.position_multiplier)
        for j in range(len(padded) // 2):
            w = padded[2 * j] | padded[2 * j + 1] << 32
            x = xor_shift(w ^ int(hasher.word_keys[j]), 32) * FOLD & M64
            y += xor_shift(x, 32) * int(hasher.word_multipliers[j])
        y = xor_shift(y & M64, 32) * MIX_1 & M64
        y = xor_shift(y, 29) * MIX_2 & M64
        h = (h + xor_shift(y, 32)) & M64
        hashes.append(h)
    return hashes


def random_blocks(num_blocks: int, block_size: int, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return rng.integers(0, 2**31, (num_blocks, block_size), dtype=np.int32)


@pytest.mark.parametrize("block_size", [1, 2, 3, 12, 16, 17, 128])
def test_equals_its_definition(block_size: int) -> None:
    hasher = ContentHasher(block_size, seed=7)
    blocks = random_blocks(70, block_size)
    root = hasher.root(("lora", 3))
    hashes = hasher.hash_chain(blocks, root).view(np.uint64).tolist()
    assert hashes == hash_chain_in_plain_integers(hasher, blocks, int(root))


@pytest.mark.parametrize("algorithm", ["mix64", "sha256"])
def test_block_by_block_equals_the_whole_chain(algorithm: str) -> None:
    hasher = ContentHasher(4, seed=7, algorithm=algorithm)
    blocks = random_blocks(9, 4)
    root = hasher.root()
    whole = hasher.hash_chain(blocks, root)
    parents = np.concatenate([[root], whole[:-1]])
    assert np.array_equal(hasher.hash_next(parents, np.arange(9), blocks), whole)


@pytest.mark.parametrize("algorithm", ["mix64", "sha256"])
@pytest.mark.parametrize("block_size", [1, 2, 5, 16])
def test_shifted_tokens_do_not_collide(block_size: int, algorithm: str) -> None:
    """A16: [a, b] -> [a + 31, b - 1] collides in a rolling hash, at any position."""
    hasher = ContentHasher(block_size, seed=1, algorithm=algorithm)
    tokens = np.arange(1000, 1000 + 4 * block_size, dtype=np.int32)
    seen = {int(hasher.hash_chain(tokens.reshape(4, -1), hasher.root())[-1])}
    for i in range(len(tokens) - 1):
        changed = tokens.copy()
        changed[i] += 31
        changed[i + 1] -= 1
        seen.add(int(hasher.hash_chain(changed.reshape(4, -1), hasher.root())[-1]))
    assert len(seen) == len(tokens)


@pytest.mark.parametrize("block_size", [1024, 2048])
def test_thue_morse_blocks_do_not_collide(block_size: int) -> None:
    """A polynomial modulo 2^64 maps a Thue-Morse word of 2^10 or more symbols and its complement to
    one value, whatever its base (rule 4)."""
    word = np.array([bin(i).count("1") % 2 for i in range(2 * block_size)], dtype=np.int32)
    hasher = ContentHasher(block_size, seed=1)
    a = hasher.hash_chain(word.reshape(2, -1), hasher.root())
    b = hasher.hash_chain((1 - word).reshape(2, -1), hasher.root())
    assert not set(a.tolist()) & set(b.tolist())


def test_order_of_blocks_matters() -> None:
    """The chain is a sum; what keeps swapped blocks apart is the position inside each digest."""
    hasher = ContentHasher(4, seed=1)
    blocks = random_blocks(2, 4)
    root = hasher.root()
    assert hasher.hash_chain(blocks, root)[1] != hasher.hash_chain(blocks[::-1].copy(), root)[1]


@pytest.mark.parametrize(
    "change",
    [
        lambda rng, t: t ^ (1 << 30),
        lambda rng, t: t ^ 1,
        lambda rng, t: int(rng.integers(0, 2**31)),
    ],
    ids=["top-bit", "low-bit", "random"],
)
def test_changes_of_two_tokens_never_cancel(change: Callable) -> None:
    """Differences in the highest bits are the weak spot of a multilinear hash modulo 2^64."""
    rng = np.random.default_rng(0)
    tokens = random_blocks(1, 64)
    variants = [tokens]
    for i in range(64):
        for j in range(i):
            variant = tokens.copy()
            variant[0, i] = change(rng, int(tokens[0, i]))
            variant[0, j] = change(rng, int(tokens[0, j]))
            variants.append(variant)
    for seed in range(8):
        hasher = ContentHasher(64, seed=seed)
        blocks = np.concatenate(variants)
        hashes = hasher.hash_next(
            np.zeros(len(blocks), np.int64), np.zeros(len(blocks), np.int64), blocks
        )
        distinct = len(np.unique(blocks, axis=0))
        assert len(np.unique(hashes)) == distinct
        # Not only distinct: the low and the high half each look random.
        for half in (hashes & 0xFFFFFFFF, hashes >> 32):
            assert len(np.unique(half)) >= distinct - 8


def test_every_input_bit_flips_half_of_the_output() -> None:
    hasher = ContentHasher(6, seed=3)
    base = random_blocks(200, 6)
    zeros = np.zeros(200, np.int64)
    original = hasher.hash_next(zeros, zeros, base)
    for token in range(6):
        for bit in range(31):
            flipped = base.copy()
            flipped[:, token] ^= np.int32(1 << bit)
            changed = (hasher.hash_next(zeros, zeros, flipped) ^ original).view(np.uint64)
            share = np.unpackbits(changed.view(np.uint8)).mean()
            assert 0.45 < share < 0.55, (token, bit, share)


SCRIPT = """
import numpy as np
from cache.content_hash import ContentHasher
h = ContentHasher(2, seed={seed}, algorithm={algorithm!r})
print(h.hash_chain(np.arange(8, dtype=np.int32).reshape(4, 2), h.root("x"))[-1])
"""


def in_another_process(seed: int | None, algorithm: str) -> int:
    script = SCRIPT.format(seed=seed, algorithm=algorithm)
    out = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return int(out.stdout)


def test_seeds_across_processes() -> None:
    """A16: roots differ by process unless a seed is set; sha256 ids are equal everywhere."""
    assert in_another_process(5, "mix64") == in_another_process(5, "mix64")
    assert in_another_process(None, "mix64") != in_another_process(None, "mix64")
    assert in_another_process(None, "sha256") == in_another_process(1, "sha256")


scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 3),
    st.sampled_from([0.0, -0.0, 1.0, 2.0]),
    st.sampled_from(["", "1", "None", "S"]),
    st.sampled_from([b"", b"1", b"None"]),
)
extra_keys = st.recursive(scalars, lambda inner: st.lists(inner, max_size=3).map(tuple))


def typed(value: object) -> object:
    """A form in which equality also compares types and the sign of zero."""
    if isinstance(value, tuple):
        return ("tuple", *map(typed, value))
    return (type(value).__name__, repr(value))


@settings(max_examples=400, deadline=None)
@given(extra_keys, extra_keys)
def test_extra_keys_meet_only_if_equal_in_type_and_value(a: object, b: object) -> None:
    """1 == True == 1.0 and hash(-1) == hash(-2) in Python; tenants must not share through that."""
    assert (encode_extra_key(a) == encode_extra_key(b)) == (typed(a) == typed(b))


def test_kinds_of_extra_key_never_meet() -> None:
    hasher = ContentHasher(4, seed=1)
    keys = [
        None,
        1,
        True,
        1.0,
        "1",
        -1,
        -2,
        (1,),
        ((1,),),
        ExtraKey(adapter="a"),
        ExtraKey(cache_salt="a"),
        ExtraKey(mm_hashes=("a",)),
        ExtraKey(cache_salt=b"a"),
    ]
    assert len({int(hasher.root(key)) for key in keys}) == len(keys)
    assert hasher.root(ExtraKey(cache_salt="a")) == hasher.root(ExtraKey(cache_salt="a"))


@pytest.mark.parametrize("key", [[1], {"a": 1}, object(), (1, [2]), np.int64(3)])
def test_unknown_types_of_extra_key_are_refused(key: object) -> None:
    with pytest.raises(ValueError, match="extra key holds"):
        ContentHasher(4).root(key)


def test_unknown_algorithm_is_refused() -> None:
    with pytest.raises(ValueError, match="'md5'"):
        ContentHasher(4, algorithm="md5")
