"""How a run stands, from its directory and, where there is one, from Slurm's controller; from any node, unlocked."""

import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from hpcgen.batch.journal import scan
from hpcgen.batch.run_directory import RunDirectory
from hpcgen.checkpoint.manifest import epochs
from hpcgen.errors import HpcgenError
from hpcgen.jobs import slurm
from hpcgen.jobs.leases import LeaseCounts
from hpcgen.jobs.submission import Submission, submissions
from hpcgen.report.events import read_events
from hpcgen.report.progress import duration


@dataclass(frozen=True, slots=True)
class RunState:
    """What is known of a run."""

    path: Path
    complete: bool
    """Its success marker is there."""
    requests: int
    """Of the input; 0 while no job has begun."""
    ok: int
    failed: int
    last_result: float | None
    """Unix time."""
    checkpoints: int
    """Epochs that can be restored from."""
    phase: str
    """Of the last event: 'prefill', 'decode', or '' where none is known."""
    jobs: tuple[slurm.Job, ...]
    """Of all submissions, as far as Slurm remembers them."""
    submissions: tuple[Submission, ...]
    leases: LeaseCounts | None = None
    """Of a run that instances share."""
    slurm_error: str | None = None
    """Why Slurm could not be asked."""

    def check_slurm(self) -> None:
        """For what needs to know the jobs. Raises SlurmError where Slurm could not be asked."""
        if self.slurm_error is not None:
            raise slurm.SlurmError(self.slurm_error)

    def jobs_of(self, instance: str) -> list[slurm.Job]:
        """Jobs that are, or were, this instance."""
        ids = {submission.job_of(instance) for submission in self.submissions if instance in submission.instances}
        return [job for job in self.jobs if job.id in ids]

    @property
    def active(self) -> list[slurm.Job]:
        """Jobs that wait or run."""
        return [job for job in self.jobs if not job.ended]

    @property
    def word(self) -> str:
        """The state in a word."""
        if self.complete:
            return "complete"
        if any(job.running for job in self.jobs):
            return "running"
        if self.active:
            return "waiting"
        if self.jobs or self.submissions:
            return "stopped"
        return "begun" if self.requests else "empty"


def read_state(path: Path) -> RunState:
    """Raises RunDirectoryError or JournalError where there is no run, or its files are damaged."""
    directory = RunDirectory(path)
    recorded = submissions(path)
    requests = 0
    # A job that still waits in the queue has not made a manifest.
    if directory.manifest_path.exists() or not recorded:
        requests = directory.read_manifest().input.requests
    records: dict[int, tuple[bool, float]] = {}
    parts = directory.parts()
    for part in parts:
        if part.journal_path.exists():
            records.update((request, (ok, finished)) for request, ok, finished in scan(part.journal_path))
    jobs, error = _ask_slurm(recorded)
    ok = sum(record[0] for record in records.values())
    return RunState(
        path=path,
        complete=directory.is_complete,
        requests=requests,
        ok=ok,
        failed=len(records) - ok,
        last_result=max((finished for _, finished in records.values()), default=None),
        checkpoints=sum(len(epochs(part.checkpoints)) for part in parts),
        phase="" if directory.leases.exists() else _last_phase(directory.events_path),
        jobs=tuple(jobs),
        submissions=tuple(recorded),
        leases=LeaseCounts.read(directory.leases) if directory.leases.exists() else None,
        slurm_error=error,
    )


def render(state: RunState) -> str:
    """The state as text, a fact a line."""
    done = state.ok + state.failed
    lines = [f"{state.path}: {state.word}"]
    if state.requests:
        share = f" ({done / state.requests:.0%})"
        lines.append(f"requests     {done:,} of {state.requests:,} done{share}, {state.failed:,} failed")
    if state.leases is not None:
        done, held = sum(state.leases.done.values()), sum(state.leases.held.values())
        lines.append(f"sub-batches  {done:,} done, {held:,} in work, {state.leases.free:,} free")
        lines += [
            f"  {name:<10} {state.leases.done.get(name, 0):,} done, {state.leases.held[name]:,} in work"
            for name in state.leases.instances
        ]
    if state.last_result is not None:
        lines.append(f"last result  {duration(time.time() - state.last_result)} ago")
    if state.phase and not state.complete:
        lines.append(f"last phase   {state.phase}")
    if state.checkpoints:
        lines.append(f"checkpoints  {state.checkpoints} (see hpcgen checkpoint show {state.path})")
    lines += [f"job {job.id:<8} {_describe(job)}" for job in state.jobs]
    known = {job.id.split("_")[0] for job in state.jobs}
    if state.slurm_error is not None:
        lines.append(f"Slurm could not be asked: {state.slurm_error}")
    else:
        forgotten = [submission.job_id for submission in state.submissions if submission.job_id not in known]
        lines += [f"job {job:<8} over; Slurm no longer knows it" for job in forgotten]
    if state.word == "stopped":
        lines.append(f"continue with: hpcgen resume {state.path}")
    return "\n".join(lines)


def render_list(states: list[RunState]) -> str:
    """A table, a run a line."""
    rows = [("run", "state", "done", "requests", "failed", "jobs")]
    for state in states:
        jobs = ", ".join(
            f"{count} {word}" for word, count in Counter(job.state.lower() for job in state.active).items()
        )
        done = state.ok + state.failed
        rows.append((str(state.path), state.word, f"{done:,}", f"{state.requests:,}", f"{state.failed:,}", jobs))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def find_runs(root: Path, depth: int = 3) -> list[Path]:
    """Run directories in `root`, at most `depth` levels down, by name."""
    if (root / "manifest.json").exists() or any((root / "jobs").glob("submission-*.json")):
        return [root]
    if depth == 0 or not root.is_dir():
        return []
    below = sorted(path for path in root.iterdir() if path.is_dir() and not path.name.startswith("."))
    return [run for path in below for run in find_runs(path, depth - 1)]


def _ask_slurm(recorded: list[Submission]) -> tuple[list[slurm.Job], str | None]:
    found: list[slurm.Job] = []
    try:
        for submission in recorded:
            found.extend(slurm.jobs(submission.job_id))
    except HpcgenError as error:
        return found, str(error)
    return found, None


def _last_phase(events: Path) -> str:
    phase = ""
    if events.exists():
        for event in read_events(events):
            if event["event"] == "opened":
                phase = ""
            phase = event.get("phase", phase)
    return phase


def _describe(job: slurm.Job) -> str:
    text = job.state.lower()
    if job.running:
        text += f" on {job.nodes}, until {job.end.replace('T', ' ')} at most"
    elif not job.ended and job.reason not in ("", "None"):
        text += f" ({job.reason})"
    return f"{text}, requeued {job.restarts} times" if job.restarts else text
