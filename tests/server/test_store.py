import threading
from pathlib import Path

import pytest

from hpcgen.server.store import Full, Store, StoredBatch, StoredFile


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "state.sqlite")


def a_file(id: str, owner: str = "anna", **more: object) -> StoredFile:
    values = {"filename": "f", "purpose": "batch", "bytes": 1, "lines": 2, "created_at": 5} | more
    return StoredFile(id=id, owner=owner, **values)  # type: ignore[arg-type]


def a_batch(id: str, owner: str = "anna", **more: object) -> StoredBatch:
    values = {"endpoint": "e", "input_file_id": "f", "completion_window": "24h", "created_at": 5, "expires_at": 9}
    return StoredBatch(id=id, owner=owner, **(values | more))  # type: ignore[arg-type]


def test_what_was_added_is_there_after_a_restart(store: Store, tmp_path: Path) -> None:
    file, batch = a_file("file-1"), a_batch("batch_1", metadata={"a": "b"}, errors=[{"code": "c"}])
    store.add_file(file)
    store.add_batch(batch, 10, 10)
    again = Store(tmp_path / "state.sqlite")
    assert again.file("anna", "file-1") == file
    assert again.batch("anna", "batch_1") == batch


def test_nobody_sees_what_is_not_theirs(store: Store) -> None:
    store.add_file(a_file("file-1"))
    store.add_batch(a_batch("batch_1"), 10, 10)
    assert store.file("bela", "file-1") is None and store.batch("bela", "batch_1") is None
    assert store.files("bela", 10) == [] and store.batches("bela", 10) == []
    assert store.files("bela", 10, after="file-1") is None
    assert not store.delete_file("bela", "file-1")
    assert store.file("anna", "file-1") is not None


def test_pages_go_on_where_the_last_one_ended_in_both_directions(store: Store) -> None:
    for number in range(5):
        store.add_file(a_file(f"file-{number}"))
    first = store.files("anna", 2) or []
    assert [file.id for file in first] == ["file-4", "file-3"]
    assert [file.id for file in store.files("anna", 9, after="file-3") or []] == ["file-2", "file-1", "file-0"]
    assert [file.id for file in store.files("anna", 2, after="file-1", rising=True) or []] == ["file-2", "file-3"]


def test_a_file_whose_time_is_over_is_gone(store: Store) -> None:
    store.add_file(a_file("file-1", expires_at=6))
    store.add_file(a_file("file-2", expires_at=2**40))
    assert store.file("anna", "file-1") is None
    assert [file.id for file in store.files("anna", 9) or []] == ["file-2"]
    assert store.forget_expired_files() == ["file-1"]


def test_a_change_happens_only_in_the_expected_state(store: Store) -> None:
    store.add_batch(a_batch("batch_1"), 10, 10)
    assert not store.update_batch("batch_1", ("in_progress",), status="completed")
    assert store.any_batch("batch_1").status == "validating"
    assert store.update_batch("batch_1", ("validating", "in_progress"), status="cancelling", cancelling_at=7)
    assert store.any_batch("batch_1").cancelling_at == 7


def test_outputs_exist_if_and_only_if_the_batch_has_ended(store: Store) -> None:
    store.add_batch(a_batch("batch_1", status="finalizing"), 10, 10)
    assert not store.deliver("batch_1", ("cancelling",), [a_file("file-1")], status="cancelled")
    assert store.file("anna", "file-1") is None
    assert store.deliver("batch_1", ("finalizing",), [a_file("file-1")], status="completed", output_file_id="file-1")
    assert store.file("anna", "file-1") is not None


def test_a_full_queue_admits_nothing_and_one_batch_always_has_room(store: Store) -> None:
    store.add_batch(a_batch("batch_1", lines=50), 2, 10)
    with pytest.raises(Full):
        store.add_batch(a_batch("batch_2", lines=1), 2, 10)
    assert store.all_batch_ids() == {"batch_1"}
    store.update_batch("batch_1", ("validating",), completed=45)
    store.add_batch(a_batch("batch_2", lines=5), 2, 10)
    with pytest.raises(Full):
        store.add_batch(a_batch("batch_3", lines=0), 2, 10)
    store.update_batch("batch_1", ("validating",), status="completed")
    store.add_batch(a_batch("batch_3", lines=0), 2, 10)


def test_many_threads_admit_no_more_than_there_is_room_for(store: Store) -> None:
    admitted: list[int] = []

    def add(number: int) -> None:
        try:
            store.add_batch(a_batch(f"batch_{number}"), 5, 100)
            admitted.append(number)
        except Full:
            pass

    threads = [threading.Thread(target=add, args=(number,)) for number in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(admitted) == 5 and len(store.batches_in("validating")) == 5


def test_the_database_is_readable_by_its_owner_only(store: Store, tmp_path: Path) -> None:
    assert (tmp_path / "state.sqlite").stat().st_mode & 0o777 == 0o600
