from array import array

import pytest
import torch

from hpcgen.kernels.attention.kv_layout import KVLayout
from hpcgen.memory.host_store import HostStore, HostStoreFull
from hpcgen.memory.migration import LocalTransfer, MigrationFailed, migrate
from hpcgen.sequence import SamplingParams, Sequence

LAYOUT = KVLayout(2, 1, 8, 1, 8, torch.float32)


def sequence_in(store: HostStore, tokens: int) -> Sequence:
    sequence = Sequence(1, 0, 0, array("I", range(tokens + 1)), SamplingParams(max_tokens=200))
    sequence.kv_length = tokens
    sequence.pages = store.allocate(-(-tokens // 64) + 1)
    for page in sequence.pages:
        store.pages[page] = torch.randint(0, 256, (LAYOUT.page_bytes,), dtype=torch.uint8)
    return sequence


def test_the_pages_arrive_whole_and_are_free_at_the_source() -> None:
    source, destination = HostStore(LAYOUT, 8), HostStore(LAYOUT, 8)
    destination.allocate(3)
    sequence = sequence_in(source, 130)
    sent = source.pages[sequence.pages[:3]].clone()
    migrate(sequence, source, destination, LocalTransfer(source))
    assert torch.equal(destination.pages[sequence.pages], sent)
    assert source.free == 8 and destination.free == 2


def test_a_damaged_page_leaves_the_sequence_where_it_was() -> None:
    class Damaging(LocalTransfer):
        def pull(self, pages, into):
            super().pull(pages, into)
            into[1, 17] ^= 1

    source, destination = HostStore(LAYOUT, 8), HostStore(LAYOUT, 8)
    sequence = sequence_in(source, 130)
    before = list(sequence.pages)
    with pytest.raises(MigrationFailed, match="checksum"):
        migrate(sequence, source, destination, Damaging(source))
    assert sequence.pages == before and destination.free == 8 and source.free == 4


def test_a_full_destination_refuses_before_anything_moves() -> None:
    source, destination = HostStore(LAYOUT, 8), HostStore(LAYOUT, 2)
    sequence = sequence_in(source, 130)
    with pytest.raises(HostStoreFull):
        migrate(sequence, source, destination, LocalTransfer(source))
    assert source.free == 4 and destination.free == 2
