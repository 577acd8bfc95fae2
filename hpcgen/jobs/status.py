"""How a run stands, from its directory and, where there is one, from Slurm's controller; from any node, unlocked."""

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from hpcgen.batch.journal import scan
from hpcgen.batch.lock import Owner, holder
from hpcgen.batch.run_directory import RunDirectory
from hpcgen.checkpoint.manifest import epochs
from hpcgen.errors import HpcgenError
from hpcgen.jobs import slurm
from hpcgen.jobs.leases import LeaseCounts
from hpcgen.jobs.submission import Submission, submissions
from hpcgen.jobs.vitals import Vitals
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
    vitals: Vitals
    jobs: tuple[slurm.Job, ...]
    """Of all submissions, as far as Slurm remembers them."""
    submissions: tuple[Submission, ...]
    leases: LeaseCounts | None = None
    """Of a run that instances share."""
    slurm_error: str | None = None
    """Why Slurm could not be asked."""
    process: Owner | None = None
    """The process that works in the directory now, in a job or by itself."""

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
        if self.process is not None or any(job.running for job in self.jobs):
            return "running"
        if self.active:
            return "waiting"
        if self.jobs or self.submissions or self.requests:
            return "stopped"
        return "empty"

    @property
    def over(self) -> bool:
        """Whether nothing will change by itself any more."""
        return self.word in ("complete", "stopped", "empty") and self.slurm_error is None

    @property
    def seconds_left(self) -> float | None:
        """Estimate: the requests that are left take as long as those that are done did, each; None: unknown."""
        done = self.ok + self.failed
        if self.word != "running" or not done or not self.vitals.seconds:
            return None
        return self.vitals.seconds * (self.requests - done) / done


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
    owners = [(part, holder(part.own) if part.own.is_dir() else None) for part in parts]
    return RunState(
        path=path,
        complete=directory.is_complete,
        requests=requests,
        ok=ok,
        failed=len(records) - ok,
        last_result=max((finished for _, finished in records.values()), default=None),
        checkpoints=sum(len(epochs(part.checkpoints)) for part in parts),
        vitals=Vitals.together([Vitals.read(part.events_path, running=owner is not None) for part, owner in owners]),
        jobs=tuple(jobs),
        submissions=tuple(recorded),
        leases=LeaseCounts.read(directory.leases) if directory.leases.exists() else None,
        slurm_error=error,
        process=next((owner for _, owner in owners if owner is not None), None),
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
    lines += _render_vitals(state)
    if state.last_result is not None:
        lines.append(f"last result  {duration(time.time() - state.last_result)} ago")
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
        how = f"hpcgen resume {state.path}" if state.submissions else "the same hpcgen run command"
        lines.append(f"continue with: {how}")
    return "\n".join(lines)


def _render_vitals(state: RunState) -> list[str]:
    """The essentials of the report that a running job has already."""
    vitals, lines = state.vitals, []
    if vitals.seconds:
        left = state.seconds_left
        ahead = f", about {duration(left)} left" if left is not None else ""
        lines.append(f"time         {duration(vitals.seconds)} of work{ahead}")
    if vitals.output_tokens:
        rates = ", ".join(f"{phase} {rate:,.0f}/s" for phase, rate in vitals.rates.items())
        lines.append(f"tokens       {vitals.output_tokens:,} decoded" + ("" if state.complete else f"; lately {rates}"))
    if state.complete:
        return lines
    if vitals.phase:
        lines.append(f"phase        {vitals.phase}")
    if vitals.active:
        spread = f" ({min(vitals.active):,} to {max(vitals.active):,} a rank)" if len(vitals.active) > 1 else ""
        lines.append(
            f"sequences    {sum(vitals.active):,} active{spread}, {vitals.suspended:,} suspended, "
            f"{vitals.waiting:,} waiting"
        )
    if vitals.kv_shares:
        spread = f", at least {min(vitals.kv_shares):.0%}" if len(vitals.kv_shares) > 1 else ""
        lines.append(f"host store   {max(vitals.kv_shares):.0%} in use{spread}")
    return lines


def follow(path: Path, show: Callable[[str], None], interval: float, sleep: Callable[[float], None]) -> None:
    """Shows how the run stands at an interval, until nothing will change any more."""
    while True:
        state = read_state(path)
        show(render(state))
        if state.over:
            return
        sleep(interval)


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


def _describe(job: slurm.Job) -> str:
    text = job.state.lower()
    if job.running:
        text += f" on {job.nodes}, until {job.end.replace('T', ' ')} at most"
    elif not job.ended and job.reason not in ("", "None"):
        text += f" ({job.reason})"
    return f"{text}, requeued {job.restarts} times" if job.restarts else text
