"""The command `hpcgen serve`."""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from hpcgen.server.errors import ServerError

if TYPE_CHECKING:
    from hpcgen.server.serve import ServeOptions

Parse = Callable[[str], int]


def add_serve_parser(
    subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]",
    add_model_arguments: Callable[[argparse.ArgumentParser], None],
    size: Parse,
) -> None:
    """Adds the command; it sets `call`, which takes the parsed arguments and returns the exit status.

    Args:
        add_model_arguments: adds those of `hpcgen run` that concern model and machine.
        size: reads bytes such as '1GiB'.
    """
    parser = subparsers.add_parser(
        "serve",
        help="serve the OpenAI Batch API",
        description="Serve the OpenAI Batch API: files and batches over HTTP. With --local an engine in this "
        "allocation runs all batches in one pool of sequences, also under mpirun or srun; with --slurm each batch "
        "becomes a submitted run, and the server needs no GPU. Accepted batches survive any end of the server.",
    )
    way = parser.add_mutually_exclusive_group(required=True)
    way.add_argument("--local", action="store_true", help="run batches here, under mpirun on all its ranks")
    way.add_argument(
        "--slurm", metavar="CLUSTER", help="submit each batch as a job; a cluster file, by path or by name, says how"
    )
    parser.add_argument(
        "--slurm-poll", type=float, default=10.0, metavar="SECONDS", help="between two looks at jobs (default: 10)"
    )
    server = parser.add_argument_group("server")
    server.add_argument("--model", type=Path, required=True, metavar="DIR", help="Hugging Face model directory")
    server.add_argument("--model-name", metavar="NAME", help="its name in the API (default: that of the directory)")
    server.add_argument(
        "--directory", type=Path, default=Path("hpcgen-server"), metavar="DIR",
        help="state, files and run directories, on storage that jobs see too; the state is SQLite, and used from one "
        "host at a time (default: ./hpcgen-server)",
    )  # fmt: skip
    server.add_argument(
        "--host", default="127.0.0.1", help="address to listen on (default: 127.0.0.1); any other needs tokens"
    )
    server.add_argument("--port", type=int, default=8000, help="0 takes a free one (default: 8000)")
    server.add_argument(
        "--tls-certificate", type=Path, metavar="FILE",
        help="serve HTTPS with this certificate chain (PEM). Without, tokens and texts cross the network as they are: "
        "stay on loopback and reach it by `ssh -L 8000:localhost:8000 HOST`, or put nginx or the like before it",
    )  # fmt: skip
    server.add_argument("--tls-key", type=Path, metavar="FILE", help="its private key (default: in the same file)")
    server.add_argument(
        "--token-file", type=Path, metavar="FILE",
        help="bearer tokens, one a line, or a name and a token; each sees its own files and batches only. "
        "Default: $HPCGEN_TOKENS, separated by commas; or none, on a loopback address",
    )  # fmt: skip
    server.add_argument(
        "--watch", type=Path, metavar="DIR",
        help="take batches also from files that appear in DIR/in, and put results into DIR/out",
    )  # fmt: skip
    server.add_argument(
        "--sub-batch", type=int, metavar="N", help="release results of each N requests early (see --watch)"
    )
    limits = parser.add_argument_group("limits")
    limits.add_argument("--max-file-size", type=size, default=2**30, metavar="SIZE", help="default: 1GiB")
    limits.add_argument("--max-line-size", type=size, default=2**24, metavar="SIZE", help="default: 16MiB")
    limits.add_argument("--max-files", type=int, default=10_000, help="of one token (default: 10000)")
    limits.add_argument("--max-requests", type=int, default=1_000_000, help="of one batch (default: 1000000)")
    limits.add_argument(
        "--max-queued-batches", type=int, default=100,
        help="unfinished batches; further ones are answered with 429 and Retry-After (default: 100)",
    )  # fmt: skip
    limits.add_argument(
        "--max-queued-requests", type=int, default=10_000_000, help="requests in them (default: 10000000)"
    )
    limits.add_argument("--max-in-flight", type=int, default=64, help="HTTP requests at once (default: 64)")
    add_model_arguments(parser)
    parser.set_defaults(call=_serve)


def _serve(arguments: argparse.Namespace) -> int:
    try:
        import fastapi  # noqa: F401
        import prometheus_client  # noqa: F401
        import python_multipart  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError as error:
        raise ServerError(f"hpcgen serve needs {error.name}: pip install 'hpcgen[server]'") from None
    from hpcgen.server.serve import ServeOptions
    from hpcgen.server.settings import Limits
    from hpcgen.server.tls import read_tls

    if not (arguments.model / "config.json").is_file():
        raise ServerError(f"{arguments.model} is not a model directory: it has no config.json")
    options = ServeOptions(
        model=arguments.model.absolute(),
        directory=arguments.directory,
        name=arguments.model_name or arguments.model.resolve().name,
        host=arguments.host,
        port=arguments.port,
        token_file=arguments.token_file,
        tls=read_tls(arguments.tls_certificate, arguments.tls_key),
        limits=Limits(
            file_bytes=arguments.max_file_size,
            line_bytes=arguments.max_line_size,
            files=arguments.max_files,
            requests_per_batch=arguments.max_requests,
            queued_batches=arguments.max_queued_batches,
            queued_requests=arguments.max_queued_requests,
            in_flight=arguments.max_in_flight,
        ),
        watched=arguments.watch,
        sub_batch=arguments.sub_batch,
        checkpoint_interval=arguments.checkpoint_interval,
    )
    if arguments.local:
        _serve_local(arguments, options)
    else:
        _serve_slurm(arguments, options)
    return 0


_INSTANCE = (
    "seed", "max_model_len", "device", "device_memory", "host_memory", "attention_microbatch", "expert_batch",
    "threads", "migrate", "partition_below", "stall_timeout",
)  # fmt: skip
"""Arguments of model and machine, named as in InstanceOptions."""


def _serve_local(arguments: argparse.Namespace, options: "ServeOptions") -> None:
    import torch

    from hpcgen.jobs.instance import InstanceOptions
    from hpcgen.server.serve import serve_local

    dtype = None if arguments.dtype is None else getattr(torch, arguments.dtype)
    # A server without batches stands still for as long as nobody brings one.
    chosen = {name: getattr(arguments, name) for name in _INSTANCE} | {"stall_timeout": None}
    serve_local(options, InstanceOptions(model=options.model, dtype=dtype, **chosen), _say)


def _serve_slurm(arguments: argparse.Namespace, options: "ServeOptions") -> None:
    from hpcgen.jobs.job_options import load_cluster_file, merge_options
    from hpcgen.server.serve import serve_slurm

    job = merge_options(load_cluster_file(arguments.slurm).get("slurm", {}), {})
    if job.instances is not None:
        raise ServerError(f"{arguments.slurm}: a batch of the server is one instance; leave `instances` out")
    serve_slurm(options, job, _words(arguments), arguments.slurm_poll, _say)


def _words(arguments: argparse.Namespace) -> list[str]:
    """The arguments of model and machine as `hpcgen run` takes them."""
    words: list[str] = []
    for name in (*_INSTANCE, "dtype", "checkpoint_interval", "grace"):
        value = getattr(arguments, name)
        if name == "migrate":
            words += [] if value else ["--no-migrate"]
        elif value is not None:
            words += [f"--{name.replace('_', '-')}", str(value)]
    return words


def _say(line: str) -> None:
    print(f"hpcgen serve: {line}", file=sys.stderr, flush=True)
