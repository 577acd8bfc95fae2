"""From tokens to text: final text, incremental search for stop strings, and the bytes of single tokens."""

import codecs
import json
import re
from collections.abc import Iterable, Sequence
from functools import lru_cache
from pathlib import Path

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from hpcgen.batch.tokenization import load_tokenizer

_BYTE_FALLBACK = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class Detokenizer:
    """Text of token ids, without special tokens.

    Args:
        tokenizer: of the `tokenizers` library; for a transformers tokenizer its `backend_tokenizer`.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        decoder = json.dumps(json.loads(tokenizer.to_str())["decoder"])
        self._byte_level = '"ByteLevel"' in decoder
        self._added = tokenizer.get_added_tokens_decoder()
        self.token_bytes = lru_cache(maxsize=2**17)(self._token_bytes)

    @classmethod
    def load(cls, model_directory: str | Path) -> "Detokenizer":
        """Raises:
        TokenizerError: the model directory has no tokenizer that we can use.
        """
        return cls(load_tokenizer(model_directory).backend_tokenizer)

    def text(self, tokens: Sequence[int]) -> str:
        """Text of a whole output. Bytes that are not UTF-8 become U+FFFD."""
        return self._tokenizer.decode(list(tokens), skip_special_tokens=True)

    def stop_matcher(self, stop: Iterable[str], min_tokens: int = 0, output: Iterable[int] = ()) -> "StopMatcher":
        """A matcher that has seen `output` already, as after a resume."""
        matcher = StopMatcher(self._tokenizer, stop, min_tokens)
        for token in output:
            matcher.push(token)
        return matcher

    def is_special(self, token: int) -> bool:
        """Whether `text` leaves the token out."""
        return token in self._added and self._added[token].special

    def _token_bytes(self, token: int) -> bytes:
        """The bytes a token stands for; they need not be UTF-8, a character may be spread over several tokens."""
        if token in self._added:
            return self._added[token].content.encode()
        piece = self._tokenizer.id_to_token(token)
        if piece is None:  # beyond the tokenizer's vocabulary: models pad theirs
            return b""
        if self._byte_level:
            return bytes(_BYTE_OF_CHARACTER[character] for character in piece)
        if byte := _BYTE_FALLBACK.fullmatch(piece):
            return bytes([int(byte[1], 16)])
        # SentencePiece's mark of a space. Decoding the piece alone would strip it, as at the start of a text.
        return piece.replace("\u2581", " ").encode()


class StopMatcher:
    """Watches the text of one sequence grow for stop strings, which may span tokens.

    A string counts from the token on that completes it. Of several that one token completes, the one that starts first
    cuts the text. Strings completed before token number `min_tokens` do not count.
    """

    def __init__(self, tokenizer: Tokenizer, stop: Iterable[str], min_tokens: int = 0) -> None:
        self._tokenizer = tokenizer
        self._stream = DecodeStream(skip_special_tokens=True)
        self._stop = tuple(stop)
        self._overlap = max(map(len, self._stop), default=1) - 1
        self._min_tokens = min_tokens
        self._tokens = 0
        self._pieces: list[str] = []
        self._tail = ""
        """The last `_overlap` characters: what the start of a match can lie in."""
        self._cut: str | None = None

    def push(self, token: int) -> bool:
        """Whether `token` completes a stop string. After that no more may be pushed."""
        self._tokens += 1
        piece = self._decode(token)
        if not piece:
            return False
        self._pieces.append(piece)
        window = self._tail + piece
        if self._tokens >= self._min_tokens:
            starts = [self._first_completed(window, stop) for stop in self._stop]
            found = [start for start in starts if start >= 0]
            if found:
                text = "".join(self._pieces)
                self._cut = text[: len(text) - len(window) + min(found)]
                return True
        self._tail = window[-self._overlap :] if self._overlap else ""
        return False

    @property
    def text(self) -> str | None:
        """The text before the stop string; None until one is matched."""
        return self._cut

    def _decode(self, token: int) -> str | None:
        """The text that `token` adds; None while the bytes of a character are incomplete."""
        try:
            return self._stream.step(self._tokenizer, token)
        except Exception:  # the library raises no narrower type
            # Stray bytes: byte-fallback decoders then decode the run of bytes differently, also what was given out
            # before. Go on with a new stream, that begins with some text lest the token count as the start of one.
            some_text = self._tokenizer.encode("a", add_special_tokens=False).ids
            self._stream = DecodeStream(ids=some_text, skip_special_tokens=True)
            return self._stream.step(self._tokenizer, token)

    def _first_completed(self, window: str, stop: str) -> int:
        """Where in `window` the first occurrence of `stop` starts that ends beyond the tail; -1 if there is none."""
        return window.find(stop, max(len(self._tail) - len(stop) + 1, 0))


def text_offsets(pieces: Iterable[bytes]) -> list[int]:
    """For each piece, how many characters of the text lie before the one in which it starts."""
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    offsets = []
    length = 0
    for piece in pieces:
        offsets.append(length)
        length += len(decoder.decode(piece))
    return offsets


def _byte_characters() -> dict[str, int]:
    """The bytes that byte-level BPE's printable stand-ins stand for (Radford et al. 2019, `bytes_to_unicode`)."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    stand_ins: dict[str, int] = {chr(byte): byte for byte in printable}
    stand_ins.update({chr(256 + position): byte for position, byte in enumerate(others)})
    return stand_ins


_BYTE_OF_CHARACTER: dict[str, int] = _byte_characters()
