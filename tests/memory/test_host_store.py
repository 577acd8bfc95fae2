import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hpcgen.errors import HpcgenError
from hpcgen.kernels.attention.kv_layout import KVLayout
from hpcgen.memory.host_store import HostStore, HostStoreFull

LAYOUT = KVLayout(3, 2, 8, 2, 4, torch.bfloat16)


@given(st.lists(st.integers(0, 7), max_size=40))
def test_no_page_is_owned_twice_and_none_is_lost(counts: list[int]) -> None:
    store, owned = HostStore(LAYOUT, 16), []
    for count in counts:
        if count > store.free:
            with pytest.raises(HostStoreFull):
                store.allocate(count)
            store.release(owned.pop(0))
        else:
            owned.append(store.allocate(count))
        taken = [page for pages in owned for page in pages]
        assert len(set(taken)) == len(taken) and len(taken) + store.free == 16


def test_the_view_of_a_layer_writes_into_its_part_of_the_page_alone() -> None:
    store = HostStore(LAYOUT, 4)
    first, second = store.layer(1)
    assert first.shape == (4, 64, 2, 8) and second.shape == (4, 64, 2, 4)
    first[2] = 1.0
    second[2] = 2.0
    page = store.pages[2].view(torch.bfloat16).view(3, LAYOUT.layer_elements)
    assert page[1, : LAYOUT.first_elements].eq(1).all() and page[1, LAYOUT.first_elements :].eq(2).all()
    assert page[0].eq(0).all() and page[2].eq(0).all()
    assert store.pages[[0, 1, 3]].eq(0).all()


def test_a_store_without_room_for_a_page_names_the_option() -> None:
    with pytest.raises(HpcgenError, match="--host-memory"):
        HostStore(LAYOUT, 0)
