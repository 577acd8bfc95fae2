"""Times and memory of a peer's batch, counted in its own process. Needs psutil beside the peer."""

import json
import threading
import time
from contextlib import suppress

import psutil


def requests_of(file: str) -> list[dict]:
    with open(file) as lines:
        return [json.loads(line)["body"] for line in lines]


class Clock:
    """From the start of the process over `loaded` (the first token of a warm-up is there); then `start` and `done`
    around each batch."""

    def __init__(self) -> None:
        self._process = psutil.Process()
        self._peak = 0
        threading.Thread(target=self._watch, daemon=True).start()

    def loaded(self) -> None:
        self._first_token = time.time() - self._process.create_time()

    def start(self) -> None:
        self._started, self._busy, self._own = time.time(), busy_seconds(), self._cpu_seconds()

    def done(self, prompt_tokens: int, output_tokens: int) -> None:
        """Prints the batch's result. `others`: the share of the machine's processors that others used meanwhile."""
        seconds = time.time() - self._started
        cores = seconds * (psutil.cpu_count() or 1)
        others = max(busy_seconds() - self._busy - (self._cpu_seconds() - self._own), 0.0) / cores
        result = {
            "first_token": self._first_token, "seconds": seconds, "prompt_tokens": prompt_tokens,
            "output_tokens": output_tokens, "peak_bytes": self._peak, "others": others,
        }  # fmt: skip
        print(json.dumps(result), flush=True)

    def _family(self) -> list[psutil.Process]:
        return [self._process, *self._process.children(recursive=True)]

    def _cpu_seconds(self) -> float:
        total = 0.0
        for process in self._family():
            with suppress(psutil.Error):
                times = process.cpu_times()
                total += times.user + times.system
        return total

    def _watch(self) -> None:
        while True:
            resident = 0
            for process in self._family():
                with suppress(psutil.Error):
                    resident += process.memory_info().rss
            self._peak = max(self._peak, resident)
            time.sleep(0.5)


def busy_seconds() -> float:
    """Processor time of everything on the machine."""
    times = psutil.cpu_times()
    return times.user + times.nice + times.system + times.irq + times.softirq
