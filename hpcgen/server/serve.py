"""`hpcgen serve`: puts the server together, with an engine of its own or in front of Slurm."""

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from hpcgen.batch.lock import DirectoryLock
from hpcgen.errors import HpcgenError
from hpcgen.jobs import signals
from hpcgen.server.delivery import RunSettings
from hpcgen.server.front import FrontSettings, bind, run_front, start_front
from hpcgen.server.retention import remove_orphans
from hpcgen.server.settings import Limits, Places
from hpcgen.server.store import Store
from hpcgen.server.tls import Tls
from hpcgen.server.tokens import is_loopback, load_tokens, require_tokens_beyond_loopback

if TYPE_CHECKING:
    from hpcgen.jobs.instance import InstanceOptions
    from hpcgen.jobs.job_options import SlurmOptions

IDLE_SECONDS = 0.02
Say = Callable[[str], None]


class FrontDied(HpcgenError):
    """The process that speaks HTTP ended."""

    exit_code = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions:
    """What both ways to run have in common."""

    model: Path
    directory: Path
    """State, files and run directories."""
    name: str
    """Of the model in the API."""
    host: str = "127.0.0.1"
    port: int = 8000
    token_file: Path | None = None
    tls: Tls | None = None
    limits: Limits = field(default_factory=Limits)
    watched: Path | None = None
    sub_batch: int | None = None
    checkpoint_interval: float = 600.0
    """Seconds between two times that a local server saves its unfinished sequences; 0: only when it is stopped."""


def prepare_front(options: ServeOptions, say: Say) -> FrontSettings:
    """Raises HpcgenError for what the operator can mend."""
    tokens = load_tokens(options.token_file)
    require_tokens_beyond_loopback(options.host, tokens)
    if not tokens:
        say("no tokens: everybody who has an account on this machine can use the server; see --token-file")
    if options.tls is None and not is_loopback(options.host):
        say("no TLS: tokens and texts cross the network as they are; see --tls-certificate")
    places = Places(options.directory.absolute())
    return FrontSettings(places, options.limits, tokens, options.name, options.watched, options.tls)


@contextmanager
def open_state(places: Places) -> Iterator[Store]:
    """The state, which one server at a time may use, freed of what a crash left.

    Raises:
        ServerError, LockedError: it cannot be used.
    """
    os.umask(0o077)
    places.make()
    lock = DirectoryLock(places.root)
    try:
        store = Store(places.database)
        remove_orphans(store, places)
        yield store
    finally:
        lock.release()


def serve_slurm(
    options: ServeOptions, job: "SlurmOptions", arguments: Sequence[str], poll_seconds: float, say: Say
) -> None:
    """Serves until it is asked to stop; jobs go on.

    Args:
        job: options of each batch's job.
        arguments: of `hpcgen run`, besides model and files.
        poll_seconds: between two looks at the jobs.
    """
    from hpcgen.batch.detokenization import Detokenizer
    from hpcgen.server.slurm_runs import SlurmRuns

    front = prepare_front(options, say)
    listening = bind(options.host, options.port)
    with open_state(front.places) as store:
        settings = RunSettings(options.model, {}, options.sub_batch, options.limits.line_bytes)
        runs = SlurmRuns(
            store, front.places, settings, job, arguments, lambda: Detokenizer.load(options.model), poll_seconds
        )
        runs.start()
        run_front(front, listening)
        runs.stop()


def serve_local(options: ServeOptions, instance: "InstanceOptions", say: Say) -> None:
    """Serves with an engine in this process; under mpirun with one over all ranks. Until it is asked to stop.

    Args:
        instance: model and machine of the engine.
    """
    from hpcgen.cluster.world import open_world
    from hpcgen.server.local import follow_local, lead_local

    stop = signals.current()
    with open_world() as world:
        if not world.leads:
            follow_local(world, instance)
            return
        front = prepare_front(options, say)
        listening = bind(options.host, options.port)
        with open_state(front.places) as store:
            process = start_front(front, listening)
            listening.close()
            try:
                with lead_local(world, instance, store, front.places, options, say) as pool:
                    while not stop.requested:
                        if not process.is_alive():
                            raise FrontDied(f"the HTTP process ended with status {process.exitcode}; its log says why")
                        if not pool.turn():
                            time.sleep(IDLE_SECONDS)
            finally:
                process.terminate()
                process.join()
