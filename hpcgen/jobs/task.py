"""What submitit runs in every task of a job: the `hpcgen` command, with the stop signals handled from the start."""

import submitit


class RunTask:
    """A picklable call of `hpcgen` with these arguments.

    Its exit status is that of the command: the batch script reads it, see `requeue`.
    """

    def __init__(self, arguments: list[str]) -> None:
        self.arguments = arguments

    def __call__(self) -> None:
        from hpcgen.jobs import signals

        signals.current()
        from hpcgen.cli import main

        status = main(self.arguments)
        if status:
            raise SystemExit(status)

    def checkpoint(self) -> submitit.helpers.DelayedSubmission:
        """For a signal in the instant between submitit's start and our own handlers: simply again."""
        return submitit.helpers.DelayedSubmission(self)
