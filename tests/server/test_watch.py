import json
from pathlib import Path

import pytest

from hpcgen.server.access import Server
from hpcgen.server.settings import Limits
from hpcgen.server.validation import Validator
from hpcgen.server.watch import OWNER, WatchedDirectory
from tests.server.conftest import MakeServer
from tests.server.requests import input_file, line


class Watched:
    """A watched directory whose batches the test itself runs."""

    def __init__(self, path: Path, server: Server) -> None:
        self.path, self.server = path, server
        self.directory = WatchedDirectory(path, server)

    def put(self, name: str, content: bytes) -> None:
        (self.path / "in" / name).write_bytes(content)

    def listing(self, part: str) -> list[str]:
        return sorted(str(path.relative_to(self.path / part)) for path in (self.path / part).rglob("*"))

    def end(self, output: bytes, errors: bytes = b"", status: str = "completed") -> None:
        """Ends the one open batch with these outputs."""
        (batch,) = self.server.store.batches_in("validating", "in_progress")
        ids = []
        for kind, content in (("output", output), ("error", errors)):
            self.server.places.file(f"file-{kind}").write_bytes(content)
            ids.append(f"file-{kind}" if content else None)
        self.server.store.update_batch(
            batch.id, (batch.status,), status=status, output_file_id=ids[0], error_file_id=ids[1]
        )


@pytest.fixture
def watched(tmp_path: Path, server: Server) -> Watched:
    return Watched(tmp_path / "watched", server)


def test_a_file_becomes_a_batch_and_its_results_appear(watched: Watched, server: Server) -> None:
    watched.put("job.jsonl", input_file(2))
    watched.directory.turn()
    (batch,) = server.store.batches_in("validating")
    assert (batch.owner, batch.endpoint, batch.lines) == (OWNER, "/v1/completions", 2)
    assert server.places.input(batch.id).read_bytes() == input_file(2)
    assert watched.listing("in") == [] and f"{batch.id}/job.jsonl" in watched.listing("accepted")
    watched.directory.turn()
    assert watched.listing("out") == []
    watched.end(b"results", b"errors")
    watched.directory.turn()
    assert watched.listing("out") == ["job.errors.jsonl", "job.jsonl"]
    assert (watched.path / "out" / "job.jsonl").read_bytes() == b"results"
    assert watched.listing("accepted") == []


def test_sub_batches_appear_while_the_batch_runs(watched: Watched, server: Server) -> None:
    watched.put("job.jsonl", input_file(2))
    watched.directory.turn()
    (batch,) = server.store.batches_in("validating")
    source = server.places.run(batch.id) / "outputs" / "sub_batches"
    source.mkdir(parents=True)
    (source / "000001.jsonl").write_bytes(b"second")
    (source / ".000000.jsonl.part").write_bytes(b"half")
    watched.directory.turn()
    assert watched.listing("out") == ["job", "job/000001.jsonl"]


def test_what_is_not_whole_yet_is_left_alone(watched: Watched, server: Server) -> None:
    watched.put(".job.jsonl", b"x")
    watched.put("job.jsonl.part", b"x")
    (watched.path / "in" / "link.jsonl").symlink_to("/etc/passwd")
    (watched.path / "in" / "folder.jsonl").mkdir()
    watched.directory.turn()
    assert server.store.batches_in("validating") == []
    assert len(watched.listing("in")) == 4


def test_a_full_server_leaves_files_where_they_are(make_server: MakeServer, tmp_path: Path) -> None:
    server = make_server(Limits(queued_batches=1))
    watched = Watched(tmp_path / "watched", server)
    watched.put("a.jsonl", input_file(1))
    watched.put("b.jsonl", input_file(1))
    watched.directory.turn()
    assert len(watched.listing("in")) == 1 and len(server.store.batches_in("validating")) == 1
    assert len(list(server.places.files.iterdir())) == 1
    watched.end(b"results")
    watched.directory.turn()
    assert watched.listing("in") == [] and len(server.store.batches_in("validating")) == 1


def test_a_faulty_file_has_its_errors_published(watched: Watched, server: Server) -> None:
    watched.put("job.jsonl", line(0) + b"broken\n")
    watched.directory.turn()
    Validator(server).turn()
    watched.directory.turn()
    assert watched.listing("out") == ["job.errors.jsonl"]
    error = json.loads((watched.path / "out" / "job.errors.jsonl").read_text())
    assert error["line"] == 2


@pytest.mark.parametrize("call", [1, 2])
def test_a_kill_while_a_file_is_taken_takes_it_once(
    watched: Watched, server: Server, monkeypatch: pytest.MonkeyPatch, call: int
) -> None:
    """Before the batch is durable, and after, before the file was moved."""
    watched.put("job.jsonl", input_file(1))
    with monkeypatch.context() as patch:
        if call == 1:
            patch.setattr("hpcgen.server.watch.admit", lambda *arguments: (_ for _ in ()).throw(SystemExit))
        else:
            patch.setattr("hpcgen.server.watch.os.rename", lambda *arguments: (_ for _ in ()).throw(SystemExit))
        with pytest.raises(SystemExit):
            watched.directory.turn()
    again = WatchedDirectory(watched.path, server)
    again.turn()
    again.turn()
    assert len(server.store.batches_in("validating")) == 1 and watched.listing("in") == []
    watched.end(b"results")
    again.turn()
    assert watched.listing("out") == ["job.jsonl"] and watched.listing("accepted") == []


def test_a_kill_while_results_are_published_publishes_them_again(
    watched: Watched, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    watched.put("job.jsonl", input_file(1))
    watched.directory.turn()
    watched.end(b"results")
    with monkeypatch.context() as patch:
        patch.setattr("hpcgen.server.watch.shutil.rmtree", lambda path: (_ for _ in ()).throw(SystemExit))
        with pytest.raises(SystemExit):
            watched.directory.turn()
    WatchedDirectory(watched.path, server).turn()
    assert watched.listing("out") == ["job.jsonl"] and watched.listing("accepted") == []
