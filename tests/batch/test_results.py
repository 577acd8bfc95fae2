import json
import os
import subprocess
import sys
from array import array

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hpcgen.batch import RequestError, RunDirectory
from hpcgen.batch.detokenization import Detokenizer
from hpcgen.batch.lock import LockedError
from hpcgen.batch.results import OutputError, Results, check_output_path, error_path
from hpcgen.sequence import SamplingParams, Sequence


@pytest.fixture(scope="module")
def detokenizer(tokenizer):
    return Detokenizer(tokenizer)


@pytest.fixture
def start(tmp_path, model_directory, detokenizer):
    """Opens or continues the run over an input."""
    opened = []

    def open_run(batch, sub_batch=None, path=tmp_path / "run"):
        run = RunDirectory(path).open(batch, model_directory, {})
        opened.append(run)
        return Results(run, batch, detokenizer, sub_batch, sync_seconds=0), run

    yield open_run
    for run in opened:
        run.close()


def finished(request, sample=0, tokens=(70, 1), error=None):
    return Sequence(
        id=request * 128 + sample,
        request=request,
        sample=sample,
        prompt=array("I", [5]),
        sampling=SamplingParams(max_tokens=4),
        output=array("I", tokens),
        finish_reason="stop",
        error=error,
    )


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_outputs_are_in_input_order_whatever_the_order_of_finishing(start, batch_input, completion, tmp_path):
    results, _ = start(batch_input([completion(f"id{i}") for i in range(4)]))
    for request in (2, 0, 3, 1):
        results.finish(finished(request))
    assert results.complete
    assert results.write_outputs(tmp_path / "out.jsonl") == (4, 0)
    assert [line["custom_id"] for line in lines(tmp_path / "out.jsonl")] == ["id0", "id1", "id2", "id3"]
    assert lines(tmp_path / "out.errors.jsonl") == []


def test_a_request_is_finished_with_its_last_sample_and_keeps_their_order(start, batch_input, completion, tmp_path):
    results, _ = start(batch_input([completion(n=3)]))
    for sample in (2, 0):
        results.finish(finished(0, sample, tokens=[70 + sample, 1]))
    assert results.is_wanted(0)
    assert [sequence.sample for sequence in results.unassembled()] == [2, 0]
    results.finish(finished(0, 1, tokens=[71, 1]))
    assert not results.is_wanted(0) and not list(results.unassembled())
    results.write_outputs(tmp_path / "out.jsonl")
    choices = lines(tmp_path / "out.jsonl")[0]["response"]["body"]["choices"]
    assert [(choice["index"], choice["text"]) for choice in choices] == [(0, "d"), (1, "e"), (2, "f")]


def test_one_failed_sample_fails_its_request_alone(start, batch_input, completion, tmp_path):
    results, _ = start(batch_input([completion("a", n=2), completion("b")]))
    results.finish(finished(0, 0))
    results.finish(finished(0, 1, error="needs more KV pages than there are"))
    results.finish(finished(1))
    assert results.write_outputs(tmp_path / "out.jsonl") == (1, 1)
    (error,) = lines(tmp_path / "out.errors.jsonl")
    assert error["error"]["message"] == "line 1: needs more KV pages than there are"
    assert (error["custom_id"], error["response"]["status_code"]) == ("a", 500)


def test_samples_that_end_after_their_request_failed_change_nothing(start, batch_input, completion):
    results, _ = start(batch_input([completion("a", n=2)]))
    results.finish(finished(0, 0, error="no"))
    results.finish(finished(0, 1))
    assert results.complete and results.failed == 1 and not list(results.unassembled())


def test_a_request_fails_once(start, batch_input, completion, tmp_path):
    results, _ = start(batch_input([completion("a")]))
    for reason in ("first", "second"):
        results.fail(0, RequestError(line=1, code="c", message=reason))
    results.write_outputs(tmp_path / "out.jsonl")
    assert [line["error"]["message"] for line in lines(tmp_path / "out.errors.jsonl")] == ["first"]


def test_a_resumed_run_knows_what_is_finished(start, batch_input, completion, tmp_path):
    batch = batch_input([completion(f"id{i}") for i in range(3)])
    results, run = start(batch)
    results.finish(finished(1))
    results.fail(2, RequestError(line=3, code="c", message="line 3: m", custom_id="id2"))
    results.close()
    run.close()
    results, _ = start(batch)
    assert [results.is_wanted(request) for request in range(3)] == [True, False, False]
    assert (results.finished, results.failed, results.complete) == (2, 1, False)
    results.finish(finished(0))
    assert results.write_outputs(tmp_path / "out.jsonl") == (2, 1)


def test_sub_batches_appear_while_the_run_goes_on(start, batch_input, completion):
    results, run = start(batch_input([completion(f"id{i}") for i in range(5)]), sub_batch=2)
    for request in (0, 3, 2):
        results.finish(finished(request))
    assert [path.name for path in run.sub_batches.iterdir()] == ["000001.jsonl"]
    assert [line["custom_id"] for line in lines(run.sub_batches / "000001.jsonl")] == ["id2", "id3"]
    assert results.sub_batches.completion_times()[0] is None


def test_nothing_counts_before_it_is_durable(start, batch_input, completion, model_directory, detokenizer, tmp_path):
    batch = batch_input([completion("a"), completion("b")])
    run = RunDirectory(tmp_path / "slow").open(batch, model_directory, {})
    results = Results(run, batch, detokenizer, sub_batch=1, sync_seconds=1000)
    results.finish(finished(0))
    assert results.finished == 0 and not list(run.sub_batches.iterdir())
    assert results.sync(now=True) == 1
    assert results.finished == 1 and (run.sub_batches / "000000.jsonl").exists()
    run.close()


def test_nothing_is_written_after_another_process_took_over(start, batch_input, completion):
    results, run = start(batch_input([completion("a"), completion("b")]))
    (run.path / "lock.00000009").write_bytes(b"")
    run._lock.beat()
    with pytest.raises(LockedError):
        results.sync(now=True)
    with pytest.raises(LockedError):
        results.finish(finished(0))


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_every_input_line_is_in_exactly_one_of_the_two_files(start, batch_input, completion, tmp_path_factory, data):
    garbage = st.binary(max_size=12).map(lambda line: line.replace(b"\n", b"") + b"\n")
    valid = st.sampled_from("abcdef").map(lambda id: json.dumps(completion(id)).encode() + b"\n")
    batch = batch_input(data.draw(st.lists(st.one_of(garbage, valid), min_size=1, max_size=12)))
    place = tmp_path_factory.mktemp("property")
    results, run = start(batch, sub_batch=3, path=place / "run")
    for index in data.draw(st.permutations(range(len(batch)))):
        request = batch.read(index)
        if isinstance(request, RequestError):
            results.fail(index, request)
        else:
            results.finish(finished(index))
    counts = results.write_outputs(place / "out.jsonl")
    output, errors = lines(place / "out.jsonl"), lines(error_path(place / "out.jsonl"))
    assert (len(output), len(errors)) == counts and sum(counts) == len(batch)
    in_order = [batch.read(index) for index in range(len(batch))]
    failed = [item for item in in_order if isinstance(item, RequestError)]
    assert [line["error"]["line"] for line in errors] == [item.line for item in failed]
    assert [line["custom_id"] for line in output] == [i.custom_id for i in in_order if not isinstance(i, RequestError)]
    assert len({line["id"] for line in output + errors}) == len(batch)
    parts = [json.loads(line) for path in run.sub_batches.iterdir() for line in path.read_text().splitlines()]
    assert sorted(line["id"] for line in parts) == sorted(line["id"] for line in output + errors)


def test_an_output_that_cannot_be_written_is_one_clear_error_before_any_work(tmp_path):
    check_output_path(tmp_path / "fine.jsonl")
    with pytest.raises(OutputError, match="is a directory"):
        check_output_path(tmp_path)
    with pytest.raises(OutputError, match="there is no directory"):
        check_output_path(tmp_path / "missing" / "out.jsonl")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_an_output_in_a_directory_without_permission_is_refused(tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(OutputError, match="not writable"):
        check_output_path(tmp_path / "out.jsonl")


WRITER = """
import sys
from array import array
from hpcgen.batch import BatchInput, RunDirectory
from hpcgen.batch.detokenization import Detokenizer
from hpcgen.batch.results import Results
from hpcgen.sequence import SamplingParams, Sequence
from tokenizers import Tokenizer

batch = BatchInput(sys.argv[1])
run = RunDirectory(sys.argv[2]).open(batch, sys.argv[3], {})
tokenizer = Tokenizer.from_file(sys.argv[3] + "/tokenizer.json")
results = Results(run, batch, Detokenizer(tokenizer), sub_batch=10, sync_seconds=0)
for request in range(len(batch)):
    if results.is_wanted(request):
        results.finish(Sequence(request * 128, request, 0, array("I", [5]), SamplingParams(4), array("I", [70, 1])))
        print(request, flush=True)
results.write_outputs(sys.argv[4])
"""


def test_a_process_killed_again_and_again_loses_no_request_that_it_had_finished(
    batch_input, completion, model_directory, tmp_path
):
    batch = batch_input([completion(f"id{i}") for i in range(300)])
    output = tmp_path / "out.jsonl"
    arguments = [
        sys.executable,
        "-c",
        WRITER,
        str(batch.path),
        str(tmp_path / "run"),
        str(model_directory),
        str(output),
    ]
    begun = []
    for kill_after in (70, 120, None):
        with subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True) as writer:
            for line in writer.stdout:
                begun.append(int(line))
                if kill_after is not None and int(line) >= kill_after:
                    writer.kill()
    # A line that was printed was durable: none is run twice. One may be finished and not printed when the kill comes.
    assert len(begun) == len(set(begun)) and len(begun) >= 298
    assert [line["custom_id"] for line in lines(output)] == [f"id{i}" for i in range(300)]
    parts = sorted((tmp_path / "run" / "outputs" / "sub_batches").glob("*.jsonl"))
    assert b"".join(part.read_bytes() for part in parts) == output.read_bytes()
