"""Conversion in processes of its own, slow enough to be killed in the middle."""

import multiprocessing
import os
import time
from multiprocessing.process import BaseProcess
from pathlib import Path

from hpcgen.model.weight_cache import cached_weight_file


def start_conversion(model: Path, cache: Path, pause: float, log: Path) -> BaseProcess:
    """Starts a process that converts `model`, pauses after each weight, and adds its id to `log` as it begins one."""
    context = multiprocessing.get_context("forkserver")
    # What a process would otherwise import first, which takes longer than a conversion.
    context.set_forkserver_preload(["hpcgen.model.weight_cache", "transformers.models.llama.modeling_llama"])
    process = context.Process(target=_convert, args=(model, cache, pause, log))
    process.start()
    return process


def _convert(model: Path, cache: Path, pause: float, log: Path) -> None:
    def progress(done: int, total: int, name: str) -> None:
        with log.open("a") as file:
            file.write(f"{os.getpid()}\n")
        time.sleep(pause)

    cached_weight_file(model, cache=cache, progress=progress, threads=1)


def converters(log: Path) -> set[int]:
    """Ids of the processes that converted, rather than waited for another's file."""
    return {int(line) for line in log.read_text().split()} if log.exists() else set()
