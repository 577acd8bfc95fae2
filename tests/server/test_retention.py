from starlette.testclient import TestClient

from hpcgen.server.access import Server
from hpcgen.server.retention import remove_orphans
from hpcgen.server.store import StoredFile
from tests.server.conftest import create, upload


def test_a_start_removes_what_a_kill_left_and_nothing_else(client: TestClient, server: Server) -> None:
    file = upload(client)
    batch = create(client, file)
    places = server.places
    (places.files / ".upload-1").write_bytes(b"half an upload")
    places.file("file-unknown").write_bytes(b"without an entry")
    places.batch("batch_unknown").mkdir()
    places.input("batch_unknown").write_bytes(b"never accepted")
    expired = StoredFile(
        id="file-old", owner="x", filename="f", purpose="batch", bytes=1, lines=1, created_at=1, expires_at=2
    )
    server.store.add_file(expired)
    places.file("file-old").write_bytes(b"x")
    remove_orphans(server.store, places)
    assert [path.name for path in places.files.iterdir()] == [file]
    assert [path.name for path in places.batches.iterdir()] == [batch["id"]]
    assert places.input(batch["id"]).exists()
