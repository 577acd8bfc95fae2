"""`hpcgen evaluate`: the command line of the LM evaluation harness, on this engine."""

import argparse
import sys

from hpcgen.errors import HpcgenError


def add_evaluate_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Adds `evaluate`."""
    parser = subparsers.add_parser(
        "evaluate",
        help="run lm_eval on this engine",
        description="The LM evaluation harness (lm_eval) with the model 'hpcgen'. All arguments are lm_eval's: "
        "hpcgen evaluate --model_args model=DIR --tasks arc_easy. Works under mpirun too. After `hpcgen evaluate "
        "--register`, once in an environment, plain `lm_eval --model hpcgen ...` is the same there; --unregister "
        "undoes that.",
        prefix_chars="\0",  # so that lm_eval's options are not taken for ours
        add_help=False,
    )
    parser.add_argument("arguments", nargs="*", metavar="ARGUMENT", help="see lm_eval run --help")
    parser.set_defaults(call=_evaluate)


def _evaluate(arguments: argparse.Namespace) -> int:
    from hpcgen.evaluation.registration import register, unregister

    chosen = list(arguments.arguments)
    if chosen == ["--register"]:
        print(f"`lm_eval --model hpcgen --model_args model=DIR` works from now on, by {register()}")
        return 0
    if chosen == ["--unregister"]:
        print(f"removed {unregister()}")
        return 0
    try:
        from lm_eval.__main__ import cli_evaluate
    except ImportError:
        raise HpcgenError("`hpcgen evaluate` needs lm_eval: pip install 'hpcgen[eval]'") from None
    import hpcgen.evaluation.harness  # noqa: F401  # registers the model

    if not any(word in ("--model", "-M") or word.startswith("--model=") for word in chosen):
        chosen = ["--model", "hpcgen", *chosen]
    sys.argv = ["lm_eval", "run", *chosen]
    cli_evaluate()
    return 0
