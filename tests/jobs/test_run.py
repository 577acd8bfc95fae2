"""`hpcgen run` as its users know it: a real process, a real model directory, files."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletion

from hpcgen.cli import main
from tests.jobs.conftest import Run, read_lines, request, write_requests


def arguments(model: Path, tmp_path: Path, *more: object) -> list[object]:
    files = ["--input", tmp_path / "in.jsonl", "--output", tmp_path / "out.jsonl"]
    return ["run", "--model", model, *files, "--threads", 1, "--host-memory", "64MB", *more]


def test_every_line_is_in_one_of_the_two_files_in_order_and_good_to_the_openai_client(
    model: Path, tmp_path: Path, hpcgen: Run
) -> None:
    completion = {"custom_id": "c", "method": "POST", "url": "/v1/completions"}
    write_requests(
        tmp_path / "in.jsonl",
        [
            request(0),
            "{not json",
            request(1, temperature=1.0, seed=3, n=2, logprobs=True, top_logprobs=2),
            completion | {"body": {"prompt": "the quick", "max_tokens": 5, "logprobs": 1, "temperature": 0}},
            "",
            request(0),
            request(2, max_tokens=-1),
            request(3, messages=[]),
            request(4, messages=[{"role": "user", "content": "the fox " * 500}]),
            b'{"custom_id": "\xff"}',
            request(5, stop=["o"]),
        ],
    )
    done = hpcgen(*arguments(model, tmp_path))
    assert done.returncode == 0, done.stderr
    assert "4 ok, 7 failed" in done.stdout and "out.errors.jsonl" in done.stdout
    results, errors = read_lines(tmp_path / "out.jsonl"), read_lines(tmp_path / "out.errors.jsonl")
    assert [line["custom_id"] for line in results] == ["r0", "r1", "c", "r5"]
    assert [line["error"]["line"] for line in errors] == [2, 5, 6, 7, 8, 9, 10]
    assert all(f"line {line['error']['line']}" in line["error"]["message"] for line in errors)
    bodies = [line["response"]["body"] for line in results]
    for body in (bodies[0], bodies[1], bodies[3]):
        ChatCompletion.model_validate(body)
    Completion.model_validate(bodies[2])
    assert [choice["index"] for choice in bodies[1]["choices"]] == [0, 1]
    assert bodies[0]["usage"]["completion_tokens"] == 8 and bodies[0]["choices"][0]["finish_reason"] == "length"
    assert len({line["id"] for line in results + errors}) == 11
    assert (tmp_path / "out.run" / "SUCCESS").exists()


def test_a_killed_run_goes_on_where_it_was_and_ends_with_the_tokens_of_one_that_was_not(
    model: Path, tmp_path: Path, hpcgen: Run, environment: dict[str, str]
) -> None:
    requests = [request(n, max_tokens=30 if n % 3 else 90, temperature=n % 2, seed=n) for n in range(60)]
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    for directory in (whole, killed):
        directory.mkdir()
        write_requests(directory / "in.jsonl", requests)
    assert hpcgen(*arguments(model, whole)).returncode == 0
    command = [sys.executable, "-m", "hpcgen.cli", *map(str, arguments(model, killed, "--expert-batch", 40))]
    journal = killed / "out.run" / "journal"
    finished_before = 0
    for _ in range(2):
        process = subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
        size = journal.stat().st_size if journal.exists() else 0
        deadline = time.monotonic() + 60
        while process.poll() is None and time.monotonic() < deadline:
            if journal.exists() and journal.stat().st_size > size:
                break
            time.sleep(0.005)
        process.send_signal(signal.SIGKILL)
        process.wait()
        finished_before = max(finished_before, journal.stat().st_size)
    assert finished_before > 0
    done = hpcgen(*arguments(model, killed, "--expert-batch", 40))
    assert done.returncode == 0, done.stderr
    choices = [[line["response"]["body"]["choices"] for line in read_lines(d / "out.jsonl")] for d in (whole, killed)]
    assert len(choices[0]) == 60 and choices[0] == choices[1]


def test_an_interrupt_ends_cleanly_and_says_how_to_go_on(
    model: Path, tmp_path: Path, environment: dict[str, str]
) -> None:
    write_requests(tmp_path / "in.jsonl", [request(n, max_tokens=200) for n in range(200)])
    command = [sys.executable, "-m", "hpcgen.cli", *map(str, arguments(model, tmp_path, "--expert-batch", 8))]
    process = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
    events = tmp_path / "out.run" / "events.jsonl"
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and not (events.exists() and "memory" in events.read_text()):
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, messages = process.communicate(timeout=30)
    assert process.returncode == 130
    assert "the same command continues" in messages and "Traceback" not in messages


def test_the_same_command_on_a_finished_run_changes_nothing(model: Path, tmp_path: Path, hpcgen: Run) -> None:
    write_requests(tmp_path / "in.jsonl", [request(n) for n in range(3)])
    hpcgen(*arguments(model, tmp_path))
    before = (tmp_path / "out.jsonl").read_bytes()
    again = hpcgen(*arguments(model, tmp_path))
    assert again.returncode == 0 and "3 of 3 requests are finished" in again.stderr
    assert (tmp_path / "out.jsonl").read_bytes() == before


def test_sub_batches_are_released_and_their_times_reported(model: Path, tmp_path: Path, hpcgen: Run) -> None:
    write_requests(tmp_path / "in.jsonl", [request(n) for n in range(5)] + ["{"])
    done = hpcgen(*arguments(model, tmp_path, "--sub-batch", 2))
    released = sorted(p.name for p in (tmp_path / "out.run" / "outputs" / "sub_batches").iterdir())
    assert released == ["000000.jsonl", "000001.jsonl", "000002.errors.jsonl", "000002.jsonl"]
    assert "sub-batches (3)" in done.stdout


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (["--model", "/nowhere"], "/nowhere"),
        (["--input", "/nowhere.jsonl"], "/nowhere.jsonl"),
        (["--output", "/nowhere/out.jsonl"], "there is no directory /nowhere"),
        (["--device", "cuda:99"], "CUDA"),
        (["--device", "tpu"], "tpu"),
        (["--max-model-len", "100000"], "--max-model-len"),
        (["--device-memory", "10kB"], "--device-memory"),
        (["--host-memory", "1kB"], "--host-memory"),
        (["--host-memory", "lots"], "not a size"),
        (["--expert-batch", "0"], "above 0"),
    ],
)
def test_what_the_user_can_mend_is_one_message_and_exit_code_2(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], change: list[str], message: str
) -> None:
    write_requests(tmp_path / "in.jsonl", [request(0)])
    try:
        code = main([*map(str, arguments(model, tmp_path)), *change])
    except SystemExit as exit:  # argparse's own
        code = exit.code
    assert code == 2
    assert message in (errors := capsys.readouterr().err) and "Traceback" not in errors
    assert not (tmp_path / "out.jsonl").exists()


def test_an_unsupported_architecture_is_refused_before_any_work(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_requests(tmp_path / "in.jsonl", [request(0)])
    other = tmp_path / "mamba"
    other.mkdir()
    for file in model.iterdir():
        os.link(file, other / file.name)
    (other / "config.json").unlink()
    (other / "config.json").write_text('{"model_type": "mamba", "num_hidden_layers": 2, "hidden_size": 8}')
    assert main([*map(str, arguments(other, tmp_path))]) == 2
    assert "mamba" in capsys.readouterr().err
    assert not (tmp_path / "out.run").exists()


@pytest.mark.parametrize(
    ("given", "output"),
    [("in.jsonl", "in.jsonl"), ("out.errors.jsonl", "out.jsonl"), ("in.jsonl", "link.jsonl"), ("in.jsonl", "pipe")],
    ids=["the input", "the input by the error file", "a link to the input", "a pipe"],
)
def test_an_output_never_replaces_the_input_or_what_is_no_file(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], given: str, output: str
) -> None:
    before = write_requests(tmp_path / given, [request(0)]).read_bytes()
    os.mkfifo(tmp_path / "pipe")
    if output == "link.jsonl":
        os.link(tmp_path / given, tmp_path / output)
    files = ["--input", str(tmp_path / given), "--output", str(tmp_path / output)]
    assert main(["run", "--model", str(model), *files]) == 2
    assert "the output" in capsys.readouterr().err
    assert (tmp_path / given).read_bytes() == before


def test_a_pipe_is_refused_as_input_at_once(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    os.mkfifo(tmp_path / "in.jsonl")
    assert main([*map(str, arguments(model, tmp_path))]) == 2
    assert "not a regular file" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("chat_template.jinja", "{% for x in %}", "chat template"),
        ("model.safetensors", "short", "model.safetensors"),
        ("config.json", "[]", "config.json"),
        ("config.json", '{"model_type": "t5"}', "causal"),
    ],
)
def test_a_damaged_model_directory_is_refused_before_any_work(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], file: str, content: str, message: str
) -> None:
    write_requests(tmp_path / "in.jsonl", [request(0)])
    other = tmp_path / "damaged"
    shutil.copytree(model, other)
    (other / file).write_text(content)
    assert main([*map(str, arguments(other, tmp_path))]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out.run").exists()


def test_weights_of_more_layers_than_the_configuration_has_are_refused(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_requests(tmp_path / "in.jsonl", [request(0)])
    other = tmp_path / "shallow"
    shutil.copytree(model, other)
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 1}))
    assert main([*map(str, arguments(other, tmp_path))]) == 2
    assert "model.layers.1" in capsys.readouterr().err


def test_a_run_directory_of_another_input_or_seed_is_refused(model: Path, tmp_path: Path, hpcgen: Run) -> None:
    write_requests(tmp_path / "in.jsonl", [request(0)])
    assert hpcgen(*arguments(model, tmp_path)).returncode == 0
    other_seed = hpcgen(*arguments(model, tmp_path, "--seed", 5))
    write_requests(tmp_path / "in.jsonl", [request(0), request(1)])
    other_input = hpcgen(*arguments(model, tmp_path))
    assert other_seed.returncode == other_input.returncode == 2
    assert "seed is 5, but was 0" in other_seed.stderr and "is not the one it was begun with" in other_input.stderr


def test_a_budget_too_small_for_the_model_gives_the_same_results(model: Path, tmp_path: Path, hpcgen: Run) -> None:
    requests = [request(n, max_tokens=20) for n in range(12)]
    texts = []
    for name, more in (("all", []), ("little", ["--device-memory", "1.0MB"])):
        (tmp_path / name).mkdir()
        write_requests(tmp_path / name / "in.jsonl", requests)
        done = hpcgen(*arguments(model, tmp_path / name, "--attention-microbatch", 64, "--expert-batch", 128, *more))
        assert done.returncode == 0, done.stderr
        lines = read_lines(tmp_path / name / "out.jsonl")
        texts.append([line["response"]["body"]["choices"][0]["message"]["content"] for line in lines])
    assert texts[0] == texts[1]
    assert '"ring_slots":2' in (tmp_path / "little" / "out.run" / "events.jsonl").read_text()
