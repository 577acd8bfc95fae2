import os
import random
import tempfile
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcgen.cluster.shared_pages import SharedFreePages
from hpcgen.memory.host_store import HostStoreFull


def free_pages(count: int, patience: float = 0.0) -> SharedFreePages:
    with tempfile.TemporaryDirectory() as directory:
        file = os.open(Path(directory) / "lock", os.O_RDWR | os.O_CREAT)
    pages = SharedFreePages(np.zeros(SharedFreePages.words_for(count), np.int32), file, patience)
    pages.fill()
    return pages


@given(st.lists(st.integers(0, 7), max_size=30))
def test_no_page_is_owned_twice_and_none_is_lost(counts: list[int]) -> None:
    free, owned = free_pages(16), []
    for count in counts:
        if count > len(free):
            with pytest.raises(HostStoreFull):
                free.take(count)
            free.give(owned.pop(0))
        else:
            owned.append(free.take(count))
        taken = [page for pages in owned for page in pages]
        assert len(set(taken)) == len(taken) and len(taken) + len(free) == 16


def test_pages_that_another_rank_is_about_to_free_are_waited_for() -> None:
    free = free_pages(4, patience=30)
    held = free.take(3)

    def give_later() -> None:
        time.sleep(0.05)
        free.give(held)

    thread = threading.Thread(target=give_later)
    thread.start()
    assert len(free.take(4)) == 4
    thread.join()


def test_processes_that_take_and_give_at_once_never_share_a_page(tmp_path: Path) -> None:
    path, count = tmp_path / "pool", 12
    words = np.memmap(path, np.int32, "w+", shape=(SharedFreePages.words_for(count),))
    owners = np.memmap(tmp_path / "owners", np.int32, "w+", shape=(count,))
    SharedFreePages(words, os.open(path, os.O_RDWR)).fill()
    children = []
    for child in range(1, 4):
        pid = os.fork()
        if pid == 0:
            free, chosen = SharedFreePages(words, os.open(path, os.O_RDWR)), random.Random(child)
            clean = True
            for _ in range(400):
                pages = free.take(chosen.randint(1, 4))
                clean &= not owners[pages].any()
                owners[pages] = child
                clean &= bool((owners[pages] == child).all())
                owners[pages] = 0
                free.give(pages)
            os._exit(0 if clean else 1)
        children.append(pid)
    assert [os.waitpid(pid, 0)[1] for pid in children] == [0, 0, 0]
    assert len(SharedFreePages(words, os.open(path, os.O_RDWR))) == count


def test_what_a_dead_rank_owned_is_free_again() -> None:
    free = free_pages(8)
    alive, _ = free.take(3), free.take(4)
    free.keep_only(alive)
    assert len(free) == 5 and not set(free.take(5)) & set(alive)
