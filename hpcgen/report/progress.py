"""How far a run is: a bar on a terminal, else one line at an interval."""

import sys
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import TextIO

from tqdm import tqdm

RATE_WINDOW = 30.0
"""Seconds over which tokens/s are counted, so that the number follows phase switches without jumping."""
DRAW_INTERVAL = 0.1
"""Seconds between two pictures of the bar."""


@dataclass(frozen=True, slots=True)
class Counts:
    """Where a run stands. Numbers count from the start of the batch, earlier, interrupted jobs included."""

    requests: int
    """Requests of the whole input."""
    done: int = 0
    """Requests that have a result or an error."""
    failed: int = 0
    """Of these, the ones that have an error."""
    output_tokens: int = 0
    """Tokens generated, also for requests that are not done."""
    done_tokens: int = 0
    """Of these, the ones that belong to requests that are done."""
    phase: str = "start"
    """'prefill' or 'decode' while the engine works; before and after, one word of what goes on."""


def duration(seconds: float) -> str:
    """Hours, minutes and seconds, as `1:02:03` or `2:03`."""
    minutes, rest = divmod(max(round(seconds), 0), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


class Progress:
    """Shows Counts as they come. Cheap: it may be updated at every step.

    The time left assumes that the requests not done come to as many tokens as those done, on average. It is unknown
    until a request has finished, and too short at first where lengths differ much, since short answers finish first.
    """

    def __init__(
        self,
        start: Counts,
        *,
        stream: TextIO | None = None,
        interval: float = 60.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`start`: what earlier jobs of this run did. `interval`: seconds between lines where there is no terminal."""
        self._stream = stream or sys.stderr
        self._interval = interval
        self._clock = clock
        self._start = start
        self._last = start
        self._started = clock()
        self._window = deque([(self._started, start.output_tokens)])
        self._next_line = self._started + interval
        self._next_draw = self._started
        self._bar: tqdm | None = None
        if self._stream.isatty():
            self._bar = tqdm(
                total=start.requests,
                initial=start.done,
                file=self._stream,
                dynamic_ncols=True,
                bar_format="{percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} requests{postfix}",
            )

    def update(self, counts: Counts) -> None:
        now = self._clock()
        phase_changed = counts.phase != self._last.phase
        self._last = counts
        self._window.append((now, counts.output_tokens))
        while len(self._window) > 2 and self._window[1][0] <= now - RATE_WINDOW:
            self._window.popleft()
        if self._bar is not None:
            if phase_changed or now >= self._next_draw:
                self._next_draw = now + DRAW_INTERVAL
                self._draw(now)
        elif now >= self._next_line:
            self._next_line = now + self._interval
            self._print_line(now)

    def tokens_per_second(self) -> float:
        """Output tokens/s over the last RATE_WINDOW seconds."""
        (began, before), (now, tokens) = self._window[0], self._window[-1]
        return (tokens - before) / (now - began) if now > began else 0.0

    def seconds_left(self, now: float) -> float | None:
        """Estimate; None while nothing is known to estimate it from."""
        counts = self._last
        generated = counts.output_tokens - self._start.output_tokens
        if counts.done >= counts.requests:
            return 0.0
        if counts.done == 0 or counts.done_tokens == 0 or generated <= 0 or now <= self._started:
            return None
        mean = counts.done_tokens / counts.done
        unfinished = counts.requests - counts.done
        # Where the first term is small, those not done have outgrown the mean: half of it is as good a guess as any.
        tokens_left = max(counts.requests * mean - counts.output_tokens, unfinished * mean / 2)
        return tokens_left * (now - self._started) / generated

    def close(self) -> None:
        """Draws the last state. Nothing may be updated afterwards."""
        if self._bar is not None:
            self._draw(self._clock())
            self._bar.close()
        else:
            self._print_line(self._clock())

    def __enter__(self) -> "Progress":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _draw(self, now: float) -> None:
        assert self._bar is not None
        self._bar.n = self._last.done
        self._bar.set_postfix_str(self._state(now))

    def _state(self, now: float) -> str:
        left = self.seconds_left(now)
        parts = [self._last.phase, f"{self.tokens_per_second():,.0f} tokens/s"]
        if self._last.failed:
            parts.append(f"{self._last.failed} failed")
        parts.append(f"{duration(left)} left" if left is not None else "time left unknown")
        return ", ".join(parts)

    def _print_line(self, now: float) -> None:
        counts = self._last
        elapsed = duration(now - self._started)
        print(
            f"[{elapsed}] {counts.done}/{counts.requests} requests, {self._state(now)}", file=self._stream, flush=True
        )
