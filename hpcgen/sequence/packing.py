"""Tokens in few bytes, for messages: sixteen bits of each, and a plane of single bits for each higher one in use."""

from array import array

import numpy as np


def pack_tokens(tokens: array) -> bytes:
    """Tokens, unsigned 32-bit: 2 bytes each for a vocabulary of up to 65,536, an eighth more for each doubling."""
    values = np.frombuffer(tokens, np.uint32)
    high = values >> 16
    planes = int(high.max(initial=0)).bit_length()
    bits = [np.packbits((high >> plane & 1).astype(np.uint8)).tobytes() for plane in range(planes)]
    return b"".join([bytes([planes]), values.astype("<u2").tobytes(), *bits])


def unpack_tokens(packed: bytes) -> array:
    """The inverse of `pack_tokens`."""
    planes = packed[0]
    # 16 * count bits, and planes of count bits, each filled up to whole bytes.
    count = next(n for n in range(8 * (len(packed) - 1) // (16 + planes), -1, -1) if _size(n, planes) == len(packed))
    values = np.frombuffer(packed, "<u2", count, 1).astype(np.uint32)
    size = -(-count // 8)
    for plane in range(planes):
        bits = np.frombuffer(packed, np.uint8, size, 1 + 2 * count + plane * size)
        values |= np.unpackbits(bits, count=count).astype(np.uint32) << (16 + plane)
    return array("I", values.tobytes())


def _size(count: int, planes: int) -> int:
    return 1 + 2 * count + planes * -(-count // 8)
