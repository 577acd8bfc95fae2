"""The process that speaks HTTP: the application, the validator, and the watched directory. It computes nothing."""

import logging
import multiprocessing
import os
import signal
import socket
import sys
import threading
import time
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path

import uvicorn

from hpcgen.server.access import Server
from hpcgen.server.app import LOOPBACK_NAMES, build_app
from hpcgen.server.errors import ServerError
from hpcgen.server.retention import remove_expired
from hpcgen.server.settings import Limits, Places
from hpcgen.server.store import Store
from hpcgen.server.tls import Tls
from hpcgen.server.tokens import Tokens
from hpcgen.server.validation import Validator
from hpcgen.server.watch import WatchedDirectory

SHUTDOWN_SECONDS = 10
HOUSEKEEPING_SECONDS = 60.0


@dataclass(frozen=True)
class FrontSettings:
    """All that the process needs; crosses to it."""

    places: Places
    limits: Limits
    tokens: Tokens
    model: str
    watched: Path | None = None
    tls: Tls | None = None


def bind(host: str, port: int) -> socket.socket:
    """A listening socket, of port 0 one that is free.

    Raises:
        ServerError: the address is not this machine's, or the port is taken.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listening = socket.socket(family, kind, protocol)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(address)
        listening.listen(2048)
    except OSError as error:
        raise ServerError(f"cannot listen on {host}, port {port}: {error.strerror or error}; try --port 0") from None
    return listening


def address(listening: socket.socket, tls: Tls | None = None) -> str:
    host, port = listening.getsockname()[:2]
    scheme = "http" if tls is None else "https"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def run_front(settings: FrontSettings, listening: socket.socket) -> None:
    """Serves until the process is asked to stop (SIGTERM, SIGINT)."""
    os.umask(0o077)
    # uvicorn handles the signal, and when it is done raises it again for the handler that was there before.
    signal.signal(signal.SIGTERM, lambda number, frame: None)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    server = Server(
        Store(settings.places.database),
        settings.places,
        settings.tokens,
        settings.limits,
        settings.model,
        int(time.time()),
    )
    validator = Validator(server)
    watched = None if settings.watched is None else WatchedDirectory(settings.watched, server)
    validator.start()
    if watched is not None:
        watched.start()
    threading.Thread(target=_keep_house, args=(server,), name="housekeeping", daemon=True).start()
    app = build_app(server, hosts=None if settings.tokens else LOOPBACK_NAMES)
    config = uvicorn.Config(
        app,
        log_level="warning",
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=SHUTDOWN_SECONDS,
        lifespan="off",
        ssl_certfile=None if settings.tls is None else settings.tls.certificate,
        ssl_keyfile=None if settings.tls is None else settings.tls.key,
    )
    print(f"hpcgen serve: {address(listening, settings.tls)}/v1", file=sys.stderr, flush=True)
    uvicorn.Server(config).run(sockets=[listening])
    validator.stop()
    if watched is not None:
        watched.stop()


def start_front(settings: FrontSettings, listening: socket.socket) -> "multiprocessing.process.BaseProcess":
    """In a process of its own, that ends with this one: the engine's loop must not hold HTTP up."""
    process = multiprocessing.get_context("spawn").Process(
        target=_run_as_child, args=(settings, listening), name="http"
    )
    process.start()
    return process


def _run_as_child(settings: FrontSettings, listening: socket.socket) -> None:
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    run_front(settings, listening)


def _exit_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)


def _keep_house(server: Server) -> None:
    while True:
        try:
            remove_expired(server.store, server.places)
        except Exception:  # the state is locked, say: the next time is soon
            logging.getLogger(__name__).exception("what has expired cannot be removed now")
        time.sleep(HOUSEKEEPING_SECONDS)
