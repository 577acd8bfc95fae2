"""`submit`: prompts as a run of their own, a Slurm job or a process beside this one, and a handle to the results."""

import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from hpcgen.api.outputs import CompletionOutput, RequestOutput
from hpcgen.api.prompts import Conversation, Params, Prompt, chat_bodies, completion_bodies, request
from hpcgen.batch.request import CHAT, COMPLETIONS
from hpcgen.batch.results import error_path
from hpcgen.batch.run_directory import RunDirectoryError
from hpcgen.durable import DIRECTORY_MODE, FILE_MODE, write_atomically
from hpcgen.errors import HpcgenError
from hpcgen.jobs import slurm as slurm_client
from hpcgen.jobs.job_options import merge_options
from hpcgen.jobs.status import RunState, read_state
from hpcgen.jobs.submission import submit as submit_job

POLL_SECONDS = 2.0
_LOG_TAIL_BYTES = 2000


class RunFailed(HpcgenError):
    """A submitted run ended without results."""


class SubmittedRun:
    """Handle to a run that was submitted. Made anew from its run directory, it serves in another process too."""

    def __init__(self, run_directory: str | Path, process: subprocess.Popen[bytes] | None = None) -> None:
        self.run_directory = Path(run_directory)
        self._process = process

    @property
    def state(self) -> RunState:
        """How it stands: requests, failures, jobs."""
        return read_state(self.run_directory)

    def done(self) -> bool:
        """Whether its results are there."""
        return (self.run_directory / "SUCCESS").exists()

    def result(self, timeout: float | None = None, poll: float = POLL_SECONDS) -> list[RequestOutput]:
        """Waits for the results, in the prompts' order. Of samples there is the text; token ids are not kept.

        Raises:
            TimeoutError: after `timeout` seconds.
            RunFailed: the job ended before the run did; `hpcgen resume`, or the same submission, continues it.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        while not self.done():
            if deadline is not None and time.monotonic() >= deadline:
                raise TimeoutError(f"the run in {self.run_directory} is not done after {timeout} s")
            self._raise_if_ended()
            time.sleep(poll)
        return _read_outputs(_output(self.run_directory))

    def cancel(self) -> None:
        """Ends its jobs, or its process; what is finished is kept."""
        if self._process is not None:
            self._process.terminate()
            self._process.wait()
            return
        for job in {job.id.split("_")[0] for job in self.state.active}:
            slurm_client.cancel(job)

    def _raise_if_ended(self) -> None:
        if self._process is not None:
            status = self._process.poll()
            if status is not None and not self.done():
                tail = _log(self.run_directory).read_bytes()[-_LOG_TAIL_BYTES:].decode(errors="replace").strip()
                raise RunFailed(f"the run in {self.run_directory} ended with status {status}: {tail}")
            return
        try:
            state = self.state
        except RunDirectoryError:  # a process that another one started, and that has not begun
            return
        if state.word == "stopped" and state.slurm_error is None:
            path = self.run_directory
            how = f"hpcgen logs {path}, hpcgen resume {path}" if state.submissions else f"{_log(path)}, submit it again"
            raise RunFailed(f"the run in {path} is over and not complete; see and continue it with {how}")


def submit(
    model: str | Path,
    prompts: Iterable[Prompt] | Prompt,
    sampling_params: Params = None,
    *,
    run_directory: str | Path,
    slurm: Mapping[str, Any] | None = None,
    **options: Any,
) -> SubmittedRun:
    """Completes prompts in a run of its own.

    Args:
        model: Hugging Face model directory.
        prompts, sampling_params: as for `LLM.generate`.
        run_directory: of the run, on storage that the nodes of the job see.
        slurm: options of the job, as in the `slurm:` section of a cluster file; None: a process on this machine.
        options: further ones of `hpcgen run`, such as `seed=1` or `max_model_len=4096`.

    Raises:
        PromptError: a prompt or its parameters make no request.
        HpcgenError: the job is refused.
    """
    return _submit(model, COMPLETIONS, completion_bodies(prompts, sampling_params), run_directory, slurm, options)


def submit_chat(
    model: str | Path,
    conversations: Iterable[Conversation] | Conversation,
    sampling_params: Params = None,
    *,
    run_directory: str | Path,
    slurm: Mapping[str, Any] | None = None,
    **options: Any,
) -> SubmittedRun:
    """Answers conversations in a run of its own. Otherwise as `submit`."""
    return _submit(model, CHAT, chat_bodies(conversations, sampling_params, {}), run_directory, slurm, options)


def _submit(
    model: str | Path,
    url: str,
    bodies: Iterator[dict[str, Any]],
    run_directory: str | Path,
    slurm: Mapping[str, Any] | None,
    options: Mapping[str, Any],
) -> SubmittedRun:
    path = Path(run_directory).absolute()
    path.mkdir(mode=DIRECTORY_MODE, parents=True, exist_ok=True)
    job = None if slurm is None else merge_options({}, slurm)
    with write_atomically(path / "requests.jsonl") as file:
        for index, body in enumerate(bodies):
            request(index, url, body, index)
            line = {"custom_id": str(index), "method": "POST", "url": url, "body": body}
            file.write(msgspec.json.encode(line) + b"\n")
    arguments = ["run", "--model", str(Path(model).absolute()), "--input", str(path / "requests.jsonl")]
    arguments += ["--output", str(_output(path)), "--run-dir", str(path)]
    for name, value in options.items():
        arguments += _argument(name.replace("_", "-"), value)
    if job is not None:
        submit_job(job, path, arguments)
        return SubmittedRun(path)
    _log(path).touch(FILE_MODE)
    with _log(path).open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "hpcgen.cli", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    return SubmittedRun(path, process)


def _argument(name: str, value: Any) -> list[str]:
    """An option of `hpcgen run`; None leaves it at its default."""
    if isinstance(value, bool):
        return [f"--{name}" if value else f"--no-{name}"]
    return [] if value is None else [f"--{name}", str(value)]


def _output(run_directory: Path) -> Path:
    return run_directory / "results.jsonl"


def _log(run_directory: Path) -> Path:
    return run_directory / "process.log"


def _read_outputs(output: Path) -> list[RequestOutput]:
    outputs = []
    for path in (output, error_path(output)):
        with path.open("rb") as file:
            outputs += [_from_line(msgspec.json.decode(line)) for line in file]
    return sorted(outputs, key=lambda output: int(output.request_id))


def _from_line(line: dict[str, Any]) -> RequestOutput:
    output = RequestOutput(line["custom_id"], None, [])
    if line["error"] is not None:
        output.error = line["error"]["message"]
        return output
    for choice in line["response"]["body"]["choices"]:
        text = choice["message"]["content"] if "message" in choice else choice["text"]
        output.outputs.append(CompletionOutput(choice["index"], text, [], finish_reason=choice["finish_reason"]))
    return output
