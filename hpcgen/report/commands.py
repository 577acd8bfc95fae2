"""`hpcgen report`: a run directory in, a page out."""

import argparse
from pathlib import Path

from hpcgen.errors import HpcgenError


def add_report_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Adds `report`."""
    parser = subparsers.add_parser(
        "report",
        help="a page about a run",
        description="Write one HTML page about a run: what ran where, completion and throughput over time, "
        "utilisation, lengths, what finished last, errors. It needs no other file "
        "and no network; a run at work has one too.",
    )
    parser.add_argument("run_directory", type=Path, metavar="RUN_DIR")
    parser.add_argument("--output", type=Path, metavar="HTML", help="default: RUN_DIR/report.html")
    parser.add_argument(
        "--timeline", type=Path, metavar="FILE",
        help="also what each rank did when: a trace for Perfetto (.json) or a picture (.png, .svg, .pdf)",
    )  # fmt: skip
    parser.set_defaults(call=_report)


def _report(arguments: argparse.Namespace) -> int:
    from hpcgen.durable import USER_FILE_MODE, write_atomically
    from hpcgen.report.page import render_page
    from hpcgen.report.run_record import RunRecord

    output = arguments.output or arguments.run_directory / "report.html"
    page = render_page(RunRecord.read(arguments.run_directory))
    try:
        with write_atomically(output, USER_FILE_MODE) as file:
            file.write(page.encode())
    except OSError as error:
        raise HpcgenError(f"cannot write {output}: {error.strerror}") from None
    print(output)
    if arguments.timeline is not None:
        from hpcgen.batch.run_directory import RunDirectory
        from hpcgen.planner.timeline import spans_of_events, write_timeline
        from hpcgen.report.events import read_events

        write_timeline(
            spans_of_events(read_events(RunDirectory(arguments.run_directory).events_path)), arguments.timeline
        )
        print(arguments.timeline)
    return 0
