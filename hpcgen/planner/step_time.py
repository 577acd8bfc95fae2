"""Seconds of a wave and of a decode step under one configuration, remembered for loads that are nearly equal."""

from __future__ import annotations

from collections.abc import Sequence

from hpcgen.planner.configuration import Configuration, layer_bytes
from hpcgen.planner.costs import Costs
from hpcgen.planner.sweep import decode_sweep, prefill_sweep
from hpcgen.scheduler.plan import Phase


class StepTime:
    """The same graph that the planner costs, evaluated at loads rounded to about 2%."""

    def __init__(self, costs: Costs, configuration: Configuration):
        self._costs, self._configuration = costs, configuration
        self._prefill: dict[tuple[int, int, int], float] = {}
        self._decode: dict[tuple[int, int, int, int], float] = {}

    def prefill(self, tokens: int, length: float, rows: int) -> float:
        """A wave whose largest part is `tokens` tokens of prompts of `length` tokens."""
        key = (_rounded(tokens), _rounded(length), _rounded(rows))
        if key not in self._prefill:
            sweep = prefill_sweep(self._costs, self._configuration.prefill, key[0], key[1], key[2])
            self._prefill[key] = sweep.seconds
        return self._prefill[key]

    def decode(self, loads: Sequence[tuple[float, float]], split: bool, living: int) -> tuple[float, list[float]]:
        """Seconds of a step, and of it those that each rank computes.

        `loads`: (sequences, context tokens) of each rank. `split`: a single sequence over all ranks by tensor
        parallelism.
        """
        costs = self._costs
        attention = [costs.attention_decode_seconds(sequences, context) for sequences, context in loads]
        slowest = max(range(len(loads)), key=attention.__getitem__)
        sequences, context = loads[slowest]
        total = sum(load[0] for load in loads)
        if split:
            seconds = costs.split_step_seconds(context, living)
            return seconds, [seconds] * len(loads)
        seconds = self.step(sequences, context, total, living)
        shape = costs.shape
        experts = shape.moe_layers * costs.experts_seconds(total / living, total, living)
        dense = shape.dense_layers * costs.dense_seconds(total / living)
        return seconds, [min(shape.layers * own + (experts + dense if total else 0.0), seconds) for own in attention]

    def step(self, sequences: float, context: float, total: float, ranks: int) -> float:
        """Seconds of a step whose busiest rank has `sequences` sequences with `context` tokens, of `total`."""
        key = (_rounded(sequences), _rounded(context), _rounded(total), ranks)
        if key not in self._decode:
            phase = self._configuration.decode
            sweep = decode_sweep(self._costs, phase, ranks, key[0], key[1], max(key[0], key[2]))
            self._decode[key] = sweep.seconds
        return self._decode[key]

    def reconfigure(self, phase: Phase) -> float:
        """Seconds to load the parameters that are resident in a phase and were not in the one before."""
        configuration, shape = self._configuration, self._costs.shape
        if configuration.in_place or not self._costs.streamed:
            return 0.0
        if configuration.ranks == 1 and configuration.prefill.resident_layers == configuration.decode.resident_layers:
            return 0.0
        entered = configuration.decode if phase is Phase.DECODE else configuration.prefill
        ranks = configuration.ranks if phase is Phase.DECODE else 1
        return self._costs.host.seconds(entered.resident_layers * layer_bytes(shape, ranks))


def _rounded(value: float) -> int:
    """To about 2%: six bits of it."""
    whole = max(int(value), 1)
    shift = max(whole.bit_length() - 6, 0)
    return (whole + (1 << shift >> 1)) >> shift << shift
