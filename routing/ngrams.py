"""Text to indices of a hashed table: every word and every pair of neighbouring words, the same in training and serving.

Words are runs of ASCII letters, digits, `_` and two-byte letters (Latin accents, Cyrillic, Greek ...); only ASCII is
lower-cased; every digit counts as 0, so numbers generalise. A character of three or four bytes in UTF-8 (Chinese,
Japanese, Korean, emoji) is a word of its own, so a pair of them is a character bigram.

    word  w = b0 b1 ... bn     h(w)   = sum(b_i * 256**i) mod PRIME          (a polynomial hash of its bytes)
    word  index                       = (h * C1 mod 2**64) >> (64 - bits)    (Fibonacci hashing, Knuth TAOCP 3, 6.4)
    pair  index (v before w)          = ((h(w) * C1 + h(v) * C2) * C1 mod 2**64) >> (64 - bits)

Two ways to the same numbers: `indices_loop`, word by word, is quicker up to about a line of text; `indices` is all numpy,
takes the hash of each word from a prefix sum, and stays flat for long text.
"""

from __future__ import annotations

import re

import numpy as np
from numpy.typing import NDArray

PRIME = 2147483629  # below 2**31, so that sums and products stay inside 64 bits
C1 = 0x9E3779B97F4A7C15
C2 = 0xC2B2AE3D27D4EB4F
_MASK = (1 << 64) - 1

#: Longer text is cut here; callers cut earlier, by characters and from both ends.
MAX_BYTES = 16_384
#: Up to this many bytes the plain loop is quicker (measured: they meet at about 30 words).
LOOP_BYTES = 160

_UPPER_A, _UPPER_Z, _BLANK = 0x41, 0x5A, 0x20


def _fold(byte: int) -> int:
    character = chr(byte)
    if byte >= 0x80 or character == "_":
        return byte
    if character.isdigit():
        return ord("0")
    return ord(character.lower()) if character.isalpha() else _BLANK


_FOLD = bytes(_fold(byte) for byte in range(256))
_WORDS = re.compile(rb"[\xf0-\xff][\x80-\xbf]*|[\xe0-\xef][\x80-\xbf]*|[a-z0_\x80-\xdf]+").findall


def _powers(base: int, count: int) -> NDArray[np.uint64]:
    """base**0 .. base**(count-1) mod PRIME, by doubling."""
    powers = np.ones(1, np.uint64)
    while len(powers) < count:
        step = np.uint64(pow(base, len(powers), PRIME))
        powers = np.concatenate([powers, powers * step % np.uint64(PRIME)])
    return powers[:count]


_POWERS = _powers(256, MAX_BYTES + 8)
_INVERSE = _powers(pow(256, -1, PRIME), MAX_BYTES + 8)
_PRIME64, _C1_64, _C2_64 = np.uint64(PRIME), np.uint64(C1), np.uint64(C2)


def fold(utf8: bytes) -> bytes:
    """The bytes that hashing sees: as long as the input, which is cut to MAX_BYTES at a character's end."""
    if len(utf8) > MAX_BYTES:
        utf8 = utf8[:MAX_BYTES].decode("utf-8", "ignore").encode()
    return utf8.translate(_FOLD)


def word_hashes_loop(folded: bytes) -> list[int]:
    """h of each word, in order."""
    return [int.from_bytes(word, "little") % PRIME for word in _WORDS(folded)]


def indices_loop(folded: bytes, bits: int) -> tuple[list[int], int]:
    """Table indices of words and pairs, and the number of words. Equal to `indices`, save for the order."""
    shift = 64 - bits
    found: list[int] = []
    last = -1
    words = _WORDS(folded)
    for word in words:
        h = int.from_bytes(word, "little") % PRIME
        mixed = h * C1
        found.append((mixed & _MASK) >> shift)
        if last >= 0:
            found.append(((mixed + last * C2) * C1 & _MASK) >> shift)
        last = h
    return found, len(words)


def indices(folded: bytes, bits: int) -> tuple[NDArray[np.int64], int]:
    """Table indices of all words, then of all pairs (int64 [2 * words - 1]), and the number of words."""
    h = word_hashes(folded)
    if not len(h):
        return np.empty(0, np.int64), 0
    shift = np.uint64(64 - bits)
    mixed = h * _C1_64
    pairs = (mixed[1:] + h[:-1] * _C2_64) * _C1_64
    return (np.concatenate([mixed, pairs]) >> shift).view(np.int64), len(h)


def word_hashes(folded: bytes) -> NDArray[np.uint64]:
    """h of each word, in order, as uint64 [words]; no Python loop.

    With H[i] = sum of b_j * 256**j up to i, the hash of a word from s to e is (H[e] - H[s - 1]) * 256**-s.
    """
    padded = np.frombuffer(b" " + folded + b"    ", np.uint8)
    solid = padded != _BLANK
    if folded.isascii():
        edges = np.flatnonzero(solid[1:] != solid[:-1])
        start, last = edges[0::2] + 1, edges[1::2]
    else:
        start, last = _bounds(padded, solid)
    prefix = np.cumsum(padded * _POWERS[: len(padded)])
    hashes: NDArray[np.uint64] = (prefix[last] - prefix[start - 1]) % _PRIME64 * _INVERSE[start] % _PRIME64
    return hashes


def _bounds(padded: NDArray[np.uint8], solid: NDArray[np.bool_]) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """First and last byte of each word where wide characters occur: those are words of their own."""
    leads = np.flatnonzero(padded >= 0xE0)
    ends = leads + 2 + (padded[leads] >= 0xF0)
    narrow = solid.copy()
    narrow[leads] = narrow[leads + 1] = narrow[leads + 2] = narrow[ends] = False
    change = narrow[1:] != narrow[:-1]
    starts = np.zeros(len(padded), np.bool_)
    lasts = starts.copy()
    starts[1:] = change & narrow[1:]
    lasts[:-1] = change & narrow[:-1]
    starts[leads] = lasts[ends] = True
    return np.flatnonzero(starts), np.flatnonzero(lasts)
