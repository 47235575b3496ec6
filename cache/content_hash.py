"""The chained content hash of full blocks.

A block's content hash stands for every token up to and including the block, for the block's
position and for the sequence's extra key. With the algorithm `mix64`, all arithmetic modulo 2^64,

    h[-1] = root(extra_key)
    h[i]  = h[i-1] + mix((i + 1) * p + sum over j of fold(word[i, j]) * r[j])

where word[i, j] is the j-th pair of tokens of block i as a little-endian 64-bit word (an odd block
ends with a zero), `fold` and `mix` are fixed bijections, and k, r, p are keys drawn from the seed:

    fold(w) = xs32(xs32(w ^ k[j]) * FOLD)              xsN(x) = x ^ (x >> N)
    mix(y)  = xs32(xs29(xs32(y) * MIX_1) * MIX_2)

Because the chain is a sum, the hashes of a whole prompt are one cumulative sum, on a CPU and on a
GPU. The multiplications follow multilinear hashing (Lemire and Kaser, "Strongly universal string
hashing is fast", 2014); the last step follows the finalizers of SplitMix64 (Steele et al., OOPSLA
2014).

A hash is only a candidate: who looks up also compares tokens (see `PrefixCachingBlockAllocator`).
"""

import hashlib
import secrets
import struct
from typing import Literal, NamedTuple, NewType

import numpy as np

from .interfaces import as_count

ContentHash = NewType("ContentHash", int)
HashAlgorithm = Literal["mix64", "sha256"]

FOLD = 0xD6E8FEB86659FD93
MIX_1 = 0xBF58476D1CE4E5B9
MIX_2 = 0x94D049BB133111EB

_U64 = np.uint64
_ONE, _SHIFT_32, _SHIFT_29 = _U64(1), _U64(32), _U64(29)
_FOLD, _MIX_1, _MIX_2 = _U64(FOLD), _U64(MIX_1), _U64(MIX_2)


class ExtraKey(NamedTuple):
    """What must match besides the tokens. Each kind has a place of its own, so kinds never meet."""

    adapter: int | str | None = None
    cache_salt: str | bytes | None = None
    mm_hashes: tuple[str | bytes, ...] = ()


def encode_extra_key(extra_key: object) -> bytes:
    """Return an injective encoding of an extra key: every value carries its type and length.

    Accepts None, bool, int, float, str, bytes and tuples of these, nested.

    Raises:
        ValueError: for any other type, naming it.
    """
    if extra_key is None:
        return b"N"
    kind = type(extra_key)
    if kind is bool:
        tag, payload = b"B", bytes([extra_key])
    elif kind is int:
        tag, payload = b"I", str(extra_key).encode()
    elif kind is float:
        tag, payload = b"F", struct.pack("<d", extra_key)
    elif kind is str:
        tag, payload = b"S", extra_key.encode("utf-8", "surrogatepass")
    elif kind is bytes:
        tag, payload = b"Y", extra_key
    elif isinstance(extra_key, tuple):
        tag, payload = b"T", b"".join(map(encode_extra_key, extra_key))
    else:
        raise ValueError(
            f"extra key holds {extra_key!r} of type {kind.__name__}; expected None, bool, int, "
            "float, str, bytes or tuples of these"
        )
    return tag + struct.pack("<q", len(payload)) + payload


class ContentHasher:
    """Hashes full blocks. Two hashers with equal arguments give equal hashes in every process.

    Args:
        block_size: tokens a block, at least 1.
        seed: any int; None draws a random one, so that nobody outside can build collisions. Not
            used by sha256.
        algorithm: "mix64" as above, or "sha256": the first 8 bytes of the SHA-256 of the hash
            before and the block's tokens (little-endian int32), for those who route by hashes.

    Attributes:
        word_keys: k, uint64 [ceil(block_size / 2)].
        word_multipliers: r, uint64 [ceil(block_size / 2)], odd.
        position_multiplier: p, uint64, odd.
    """

    def __init__(
        self, block_size: int, seed: int | None = None, algorithm: HashAlgorithm = "mix64"
    ) -> None:
        if algorithm not in ("mix64", "sha256"):
            raise ValueError(f"hash algorithm is {algorithm!r}; expected 'mix64' or 'sha256'")
        self.block_size = as_count("block_size", block_size, 1)
        if seed is not None and (isinstance(seed, bool) or not isinstance(seed, int)):
            raise ValueError(f"hash seed is {seed!r}; expected an integer or None")
        self.algorithm = algorithm
        self.seed = secrets.randbits(64) if seed is None else seed
        self._seed_bytes = b"" if algorithm == "sha256" else str(self.seed).encode()
        self.num_words = (block_size + 1) // 2
        stream = hashlib.shake_256(b"prefixlab content hash" + self._seed_bytes)
        keys = np.frombuffer(stream.digest(8 * (2 * self.num_words + 1)), dtype="<u8")
        self.word_keys = keys[: self.num_words].copy()
        self.word_multipliers = keys[self.num_words : -1] | _U64(1)
        self.position_multiplier = keys[-1] | _U64(1)
        self._tiled_keys = np.tile(self.word_keys, 64).reshape(64, self.num_words)
        self._tiled_terms = self._terms(np.arange(64))
        self._roots: dict[bytes, np.int64] = {}

    def root(self, extra_key: object = None) -> np.int64:
        """Return h[-1], the hash before the first block, int64.

        Raises:
            ValueError: for an extra key of a type that has no encoding.
        """
        encoded = encode_extra_key(extra_key)
        root = self._roots.get(encoded)
        if root is None:
            material = len(self._seed_bytes).to_bytes(8, "little") + self._seed_bytes + encoded
            root = np.frombuffer(hashlib.sha256(material).digest()[:8], dtype="<i8")[0]
            if len(self._roots) < 4096:
                self._roots[encoded] = root
        return root

    def hash_chain(self, token_blocks: np.ndarray, root: np.int64) -> np.ndarray:
        """Hash consecutive blocks from position 0.

        Args:
            token_blocks: int32 [num_blocks, block_size], contiguous.
            root: what `root` gave for the sequence's extra key.

        Returns:
            int64 [num_blocks].
        """
        if self.algorithm == "sha256":
            return self._sha256_chain(token_blocks, root)
        count = len(token_blocks)
        if count > len(self._tiled_terms):
            self._tiled_terms = self._terms(np.arange(2 * count))
        hashes = self._digest(token_blocks, self._tiled_terms[:count])
        hashes[:1] += root.view(_U64)
        return np.add.accumulate(hashes, out=hashes).view(np.int64)

    def hash_next(
        self, parents: np.ndarray, positions: np.ndarray, token_blocks: np.ndarray
    ) -> np.ndarray:
        """Hash one block for each of many chains.

        Args:
            parents: int64 [n], the hash before each block.
            positions: int [n], the index of each block in its chain, from 0.
            token_blocks: int32 [n, block_size], contiguous.

        Returns:
            int64 [n].
        """
        if self.algorithm == "sha256":
            return np.array(
                [
                    self._sha256_chain(token_blocks[i : i + 1], parent)[0]
                    for i, parent in enumerate(parents)
                ],
                dtype=np.int64,
            )
        digests = self._digest(token_blocks, self._terms(positions))
        digests += parents.view(_U64)
        return digests.view(np.int64)

    def _terms(self, positions: np.ndarray) -> np.ndarray:
        """Return (i + 1) * p for positions i, uint64 [n]."""
        return (positions.astype(_U64) + _ONE) * self.position_multiplier

    def _digest(self, token_blocks: np.ndarray, terms: np.ndarray) -> np.ndarray:
        """Return mix(terms + ...), uint64 [n]."""
        n = len(token_blocks)
        x = np.bitwise_xor(self._words(token_blocks), self._tiled(n))
        x ^= x >> _SHIFT_32
        x *= _FOLD
        x ^= x >> _SHIFT_32
        y = x @ self.word_multipliers
        y += terms
        y ^= y >> _SHIFT_32
        y *= _MIX_1
        y ^= y >> _SHIFT_29
        y *= _MIX_2
        y ^= y >> _SHIFT_32
        return y

    def _words(self, token_blocks: np.ndarray) -> np.ndarray:
        """View pairs of tokens as uint64 [n, num_words]; an odd block is padded with a zero."""
        if self.block_size % 2:
            padded = np.zeros((len(token_blocks), self.block_size + 1), dtype=np.int32)
            padded[:, :-1] = token_blocks
            token_blocks = padded
        return token_blocks.view(_U64)

    def _tiled(self, n: int) -> np.ndarray:
        """Return word_keys repeated for n blocks; a full operand is faster than a broadcast one."""
        if n > len(self._tiled_keys):
            repeats = 1 << (n - 1).bit_length()
            self._tiled_keys = np.tile(self.word_keys, repeats).reshape(repeats, self.num_words)
        return self._tiled_keys[:n]

    def _sha256_chain(self, token_blocks: np.ndarray, root: np.int64) -> np.ndarray:
        digests = []
        parent = int(root).to_bytes(8, "little", signed=True)
        for row in token_blocks:
            parent = hashlib.sha256(parent + row.tobytes()).digest()[:8]
            digests.append(parent)
        return np.frombuffer(b"".join(digests), dtype="<i8")
