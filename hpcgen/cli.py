"""The `hpcgen` command: parses, calls, and turns a user's mistake into one line. What it does is elsewhere."""

import argparse
import logging
import os
import re
import signal
import sys
from pathlib import Path

from hpcgen import __version__
from hpcgen.errors import HpcgenError
from hpcgen.evaluation.commands import add_evaluate_parser
from hpcgen.jobs.commands import add_checkpoint_parser, add_job_parsers
from hpcgen.jobs.doctor.commands import add_doctor_parser
from hpcgen.jobs.leases import AUTOMATIC, EXPIRY_SECONDS
from hpcgen.planner.commands import add_plan_parser, add_profile_parser, add_simulate_parser
from hpcgen.report.commands import add_report_parser
from hpcgen.server.commands import add_serve_parser

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}


def size(text: str) -> int:
    """Bytes of '24GiB', '500MB', '2g' or '1048576'."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]?i?)b?", text.strip().lower())
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size; write 24GiB, 500MB or a number of bytes")
    return int(float(match[1]) * _UNITS[match[2]])


def positive(text: str) -> int:
    """A whole number above 0."""
    if not text.isdigit() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(text)


def seconds(text: str) -> float:
    """A time above 0."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds above 0")
    return value


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="hpcgen",
        description="Batch LLM inference for supercomputers: a JSONL of requests in, ordered results out.",
        epilog="Start with: hpcgen run --model DIR --input requests.jsonl --output results.jsonl",
    )
    parser.add_argument("--version", action="version", version=f"hpcgen {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _add_run(commands)
    _add_convert(commands)
    _add_verify(commands)
    add_job_parsers(commands, add_run_arguments)
    add_serve_parser(commands, add_instance_arguments, size)
    add_checkpoint_parser(commands)
    add_plan_parser(commands)
    add_simulate_parser(commands)
    add_profile_parser(commands)
    add_report_parser(commands)
    add_evaluate_parser(commands)
    add_doctor_parser(commands)
    return parser


def add_run_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `run`, which `submit` takes too."""
    files = parser.add_argument_group("files")
    files.add_argument(
        "--model", type=Path, required=True, metavar="DIR", help="Hugging Face model directory (safetensors)"
    )
    files.add_argument(
        "--input", type=Path, required=True, metavar="FILE",
        help="OpenAI Batch requests, one a line, for /v1/chat/completions or /v1/completions (.jsonl), or with "
        "--template or --column a table (.csv, .parquet, .jsonl); each also as .gz or .zst",
    )  # fmt: skip
    files.add_argument(
        "--output", type=Path, required=True, metavar="FILE",
        help="results in the input's order; failed requests go to OUTPUT with .errors before its suffix. "
        "A .parquet has all of them, joined with the columns of the input",
    )  # fmt: skip
    files.add_argument("--template", metavar="TEXT", help="prompt of each row, as in 'Summarise: {text}'")
    files.add_argument("--column", metavar="NAME", help="column whose cells are the prompts")
    files.add_argument(
        "--body", metavar="JSON", help="fields of every request made from a row, as in '{\"max_tokens\": 200}'"
    )
    files.add_argument(
        "--completions", action="store_true", help="complete the prompts of rows as they are, without chat template"
    )
    files.add_argument(
        "--run-dir", type=Path, metavar="DIR",
        help="journal, checkpoints and events of the run; the same command on it continues an interrupted run "
        "(default: OUTPUT with suffix .run)",
    )  # fmt: skip
    files.add_argument(
        "--sub-batch", type=positive, metavar="N",
        help="release the results of each N requests in RUN_DIR/outputs/sub_batches as soon as they are complete",
    )  # fmt: skip
    leases = parser.add_argument_group("instances", "Of a run that instances share; see --instance, --instances.")
    leases.add_argument(
        "--lease-ahead", type=positive, default=1, metavar="N",
        help="sub-batches that an instance leases before it needs them, to keep its batch full (default: 1)",
    )  # fmt: skip
    leases.add_argument(
        "--lease-expiry", type=seconds, default=EXPIRY_SECONDS, metavar="SECONDS",
        help="time without a sign of life after which others take over what an instance has leased (default: 180)",
    )  # fmt: skip
    add_instance_arguments(parser)


def add_instance_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments that concern the model and the machine, which `serve` takes too."""
    recovery = parser.add_argument_group("recovery")
    recovery.add_argument(
        "--checkpoint-interval", type=float, default=600.0, metavar="SECONDS",
        help="time between checkpoints of the unfinished sequences (default: 600; 0: only before leaving)",
    )  # fmt: skip
    recovery.add_argument(
        "--grace", type=float, metavar="SECONDS",
        help="time from SIGTERM or SIGUSR2 to the kill, for the last checkpoint (default: what Slurm says)",
    )  # fmt: skip
    model = parser.add_argument_group("model")
    model.add_argument("--seed", type=int, default=0, help="seed of requests that name none (default: 0)")
    model.add_argument(
        "--max-model-len", type=positive, metavar="TOKENS",
        help="longest sequence, prompt and output together (default: the model's context)",
    )  # fmt: skip
    model.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), help="default: the checkpoint's")
    machine = parser.add_argument_group("machine", "Defaults are chosen from the machine. Sizes: 24GiB, 500MB, ...")
    machine.add_argument("--device", default="auto", help="cpu, cuda, cuda:N or auto (default)")
    machine.add_argument(
        "--device-memory", type=size, metavar="SIZE",
        help="budget for parameters, KV and activations on the device; what does not fit is streamed from host memory. "
        "On a CPU: default is no limit, and nothing is copied",
    )  # fmt: skip
    machine.add_argument(
        "--host-memory", type=size, metavar="SIZE", help="host memory for KV (default: 60%% of what is free)"
    )
    machine.add_argument(
        "--attention-microbatch", type=positive, metavar="TOKENS",
        help="most tokens (prefill) or sequences (decode) of one attention call",
    )  # fmt: skip
    machine.add_argument(
        "--expert-batch", type=positive, metavar="TOKENS",
        help="tokens of a prefill wave, and most sequences that decode at once: the batch the experts see",
    )  # fmt: skip
    machine.add_argument(
        "--threads", type=positive, help="CPU threads to compute with (default: the cores of this process)"
    )
    machine.add_argument(
        "--no-migrate", dest="migrate", action="store_false", help="keep sequences on the node that prefilled them"
    )
    machine.add_argument(
        "--partition-below", type=int, metavar="N",
        help="spread the last N sequences over the ranks, and split the very last (default: as many as ranks)",
    )  # fmt: skip
    machine.add_argument(
        "--stall-timeout", type=float, default=1800.0, metavar="SECONDS",
        help="on many ranks: end the job, with the name and the stack of what is stuck, after so long without progress",
    )  # fmt: skip


def _add_run(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser(
        "run",
        help="run a batch here",
        description="Run a batch of requests to its end, or continue one that was interrupted.",
    )
    add_run_arguments(parser)
    parser.add_argument(
        "--instance", nargs="?", const=AUTOMATIC, metavar="NAME",
        help="be one of several that share the run directory, started by the same command at any time and place: each "
        "leases sub-batches, the last writes the output. Without NAME: the task of the Slurm array, else the Slurm "
        "job, else the host; the same name continues where it was",
    )  # fmt: skip
    parser.set_defaults(call=_run)


def _add_convert(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser(
        "convert",
        help="convert a model to a weight file",
        description="Convert a Hugging Face checkpoint to the weight file that runs map into memory. "
        "`run` does this by itself at first use, into $HPCGEN_CACHE or ~/.cache/hpcgen.",
    )
    parser.add_argument("model", type=Path, metavar="MODEL_DIR")
    parser.add_argument("file", type=Path, metavar="FILE", nargs="?", help="default: the cache")
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), help="default: the checkpoint's")
    parser.add_argument(
        "--layout",
        choices=("packed", "plain"),
        default="packed",
        help="for CPU kernels (default), or for CUDA and others",
    )
    parser.set_defaults(call=_convert)


def _add_verify(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser(
        "verify", help="check a weight file", description="Check every byte of a weight file against its checksums."
    )
    parser.add_argument("file", type=Path, metavar="FILE")
    parser.set_defaults(call=_verify)


def _run(arguments: argparse.Namespace) -> int:
    from hpcgen.batch.source import TemplateOptions, parse_body
    from hpcgen.jobs.leases import own_name
    from hpcgen.jobs.run import run
    from hpcgen.jobs.run_options import RunOptions
    from hpcgen.report.summary import render

    summary = run(
        RunOptions(
            model=arguments.model,
            input=arguments.input,
            output=arguments.output,
            run_directory=arguments.run_dir,
            template=TemplateOptions(
                arguments.template, arguments.column, parse_body(arguments.body), arguments.completions
            ),
            seed=arguments.seed,
            max_model_len=arguments.max_model_len,
            dtype=_dtype(arguments.dtype),
            device=arguments.device,
            device_memory=arguments.device_memory,
            host_memory=arguments.host_memory,
            attention_microbatch=arguments.attention_microbatch,
            expert_batch=arguments.expert_batch,
            sub_batch=arguments.sub_batch,
            checkpoint_interval=arguments.checkpoint_interval,
            grace=arguments.grace,
            instance=own_name() if arguments.instance == AUTOMATIC else arguments.instance,
            lease_ahead=arguments.lease_ahead,
            lease_expiry=arguments.lease_expiry,
            threads=arguments.threads,
            stall_timeout=arguments.stall_timeout,
            migrate=arguments.migrate,
            partition_below=arguments.partition_below,
        ),
        _say,
    )
    if summary is not None:
        print(render(summary))
    return 0


def _convert(arguments: argparse.Namespace) -> int:
    from hpcgen.jobs.instance import ConversionProgress
    from hpcgen.model.conversion.convert import convert
    from hpcgen.model.weight_cache import cached_weight_file

    progress = ConversionProgress(_say)
    if arguments.file is None:
        path = cached_weight_file(
            arguments.model, _dtype(arguments.dtype), arguments.layout, progress=progress, waiting=_say
        )
    else:
        path = convert(arguments.model, arguments.file, _dtype(arguments.dtype), arguments.layout, progress=progress)
    print(path)
    return 0


def _verify(arguments: argparse.Namespace) -> int:
    from hpcgen.model.weight_verify import verify

    problems = verify(arguments.file)
    for problem in problems:
        print(problem)
    if not problems:
        print(f"{arguments.file}: whole")
    return 1 if problems else 0


def _dtype(name: str | None):  # type: ignore[no-untyped-def]  # torch takes a second to import
    import torch

    return None if name is None else getattr(torch, name)


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def main(argv: list[str] | None = None) -> int:
    """Runs a command. 0: done; 1: a failure of the machine or the program; 2: the user's to mend; 130: interrupted."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    try:
        arguments = build_parser().parse_args(argv)
        return arguments.call(arguments)
    except HpcgenError as error:
        _say(f"hpcgen: {error}")
        return error.exit_code
    except BrokenPipeError:  # the reader of our output, such as `head`, has had enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except KeyboardInterrupt:
        _say("hpcgen: interrupted; what is finished is kept, and the same command continues")
        return 130


if __name__ == "__main__":
    sys.exit(main())
