"""From tokens to text, a token at a time: whole characters only, and never a part of a stop string.

A byte-level token is a piece of UTF-8 that may begin or end inside a character. `StreamText` holds back an unfinished
character until its last byte has come, and text that may yet become a stop string until that is decided.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Any


def byte_alphabet() -> dict[str, int]:
    """The printable stand-in of each byte in byte-level vocabularies (GPT-2's `bytes_to_unicode`, inverted)."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    alphabet = {chr(byte): byte for byte in printable}
    others = [byte for byte in range(256) if byte not in printable]
    alphabet.update({chr(256 + place): byte for place, byte in enumerate(others)})
    return alphabet


class TokenBytes:
    """The bytes of every token of a byte-level vocabulary; special tokens have none."""

    __slots__ = ("longest", "table")

    def __init__(self, table: Sequence[bytes]) -> None:
        self.table = tuple(table)
        #: Bytes of the longest token: no text of n bytes has fewer than n / longest tokens.
        self.longest = max((len(token) for token in self.table), default=1) or 1

    @classmethod
    def of(cls, tokenizer: Any) -> TokenBytes:
        """Read from a `tokenizers.Tokenizer`. Raises ValueError when its vocabulary is not byte-level."""
        decoder = str(tokenizer.decoder)
        if not decoder.startswith("ByteLevel"):
            raise ValueError(f"the tokenizer's decoder must be ByteLevel, not {decoder[:60] or 'absent'}")
        alphabet = byte_alphabet()
        added = tokenizer.get_added_tokens_decoder()
        table = [b""] * tokenizer.get_vocab_size(with_added_tokens=True)
        for text, token in tokenizer.get_vocab(with_added_tokens=True).items():
            if token in added:
                table[token] = b"" if added[token].special else text.encode()
                continue
            try:
                table[token] = bytes(alphabet[character] for character in text)
            except KeyError:
                raise ValueError(f"token {token} of the vocabulary is not written in the byte-level alphabet") from None
        return cls(table)

    def decode(self, tokens: Sequence[int]) -> str:
        """The whole text of `tokens` at once."""
        table = self.table
        return b"".join(table[token] for token in tokens).decode("utf-8", errors="replace")


class StreamText:
    """The text of one answer as its tokens come. Not thread-safe.

    `push` and `finish` return what may be shown now. Once `stopped`, a stop string has come: the text ends just before
    it and further tokens add nothing. Bytes that are no UTF-8 become U+FFFD; a character that the last token left
    unfinished is dropped.
    """

    __slots__ = ("_bytes", "_decoder", "_held", "_stops", "stopped")

    def __init__(self, vocabulary: TokenBytes, stops: Sequence[str] = ()) -> None:
        self._bytes = vocabulary.table
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._stops = tuple(stops)
        self._held = ""
        self.stopped = False

    def push(self, token: int) -> str:
        if self.stopped:
            return ""
        text = self._decoder.decode(self._bytes[token])
        if not self._stops or not text:
            return text
        text = self._held + text
        cut = stop_at(text, self._stops)
        if cut is not None:
            self.stopped = True
            self._held = ""
            return text[:cut]
        keep = len(text) - undecided(text, self._stops)
        self._held = text[keep:]
        return text[:keep]

    def finish(self) -> str:
        """What was held back, now that nothing more comes."""
        held, self._held = self._held, ""
        return held


def stop_at(text: str, stops: Sequence[str]) -> int | None:
    """Where the stop string that is complete first begins (the longest, if several end there); None without one.

    Judged by where a stop string ends, so that the cut does not depend on how the text came in pieces.
    """
    found = [(at + len(stop), at) for stop in stops if (at := text.find(stop)) >= 0]
    return min(found)[1] if found else None


def undecided(text: str, stops: Sequence[str]) -> int:
    """Characters at the end of `text` that may be the beginning of a stop string."""
    longest = 0
    for stop in stops:
        for size in range(min(len(stop) - 1, len(text)), longest, -1):
            if text.endswith(stop[:size]):
                longest = size
                break
    return longest
