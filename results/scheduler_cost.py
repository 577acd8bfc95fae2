"""Time and memory of the scheduler at 1,000 ranks and a million sequences: `python results/scheduler_cost.py`.

The ranks are counters: each reports at once what its plan says. A sequence is touched by a decision when it is
active in it (its KV grows), when it is moved (suspend, resume, discard, MIGRATE), when a chunk of it is prefilled, or
when it finishes. Time includes `decide` and all `report` calls.
"""

import argparse
import gc
import os
import random
import statistics
import time

import psutil

from hpcgen.scheduler import Limits, Phase, Report, Scheduler, Topology


def resident_bytes() -> int:
    gc.collect()
    return psutil.Process(os.getpid()).memory_info().rss


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, default=1000)
    parser.add_argument("--ranks-per-node", type=int, default=8)
    parser.add_argument("--sequences", type=int, default=1_000_000)
    parser.add_argument("--decisions", type=int, default=0, help="stop after so many; 0: run the batch to its end")
    parser.add_argument("--model", help="not used: the ranks are counters")
    args = parser.parse_args()
    draw = random.Random(0)
    topology = Topology(tuple(rank // args.ranks_per_node for rank in range(args.ranks)))
    limits = Limits(host_pages=200_000, device_pages=16_000, wave_tokens=65_536, max_active=1024)
    scheduler = Scheduler(topology, limits)

    prompts = [draw.randint(16, 1000) for _ in range(args.sequences)]
    outputs = [min(int(draw.lognormvariate(5.5, 1.0)) + 1, 8000) for _ in range(args.sequences)]
    before = resident_bytes()
    start = time.process_time()
    for index, prompt in enumerate(prompts):
        scheduler.add(index, prompt, prompt + 8000 - 1)
    add_seconds = time.process_time() - start
    added = resident_bytes()

    left: dict[int, int] = {}
    active: list[set[int]] = [set() for _ in range(args.ranks)]
    rows: dict[Phase, list[tuple[int, float]]] = {Phase.PREFILL: [], Phase.DECODE: []}
    decisions = 0
    peak = added
    while not scheduler.done and (not args.decisions or decisions < args.decisions):
        start = time.process_time()
        plan = scheduler.decide()
        seconds = time.process_time() - start
        touched = len(plan.migrations)
        reports = []
        for rank, part in enumerate(plan.ranks):
            report = Report(rank, steps=plan.steps, prefilled=part.chunks)
            active[rank].difference_update(part.suspend, part.discard)
            active[rank].update(part.resume)
            touched += len(part.suspend) + len(part.discard) + len(part.resume) + len(part.chunks) + len(active[rank])
            for chunk in part.chunks:
                left.setdefault(chunk.sequence, outputs[chunk.sequence] - 1)
            if plan.phase is Phase.DECODE:
                for sequence in list(active[rank]):
                    left[sequence] -= plan.steps
                    if left[sequence] <= 0:
                        report.finished.append(sequence)
                        active[rank].discard(sequence)
            touched += len(report.finished)
            reports.append(report)
        for migration in plan.migrations:
            reports[topology.node_of_rank.index(migration.destination)].migrated.append(migration.sequence)
        start = time.process_time()
        for report in reports:
            scheduler.report(report)
        seconds += time.process_time() - start
        rows[plan.phase].append((touched, seconds))
        decisions += 1
        if decisions % 50 == 1:
            peak = max(peak, resident_bytes())

    print(f"{args.ranks} ranks, {args.sequences} sequences, {decisions} decisions, {scheduler.finished} finished")
    print(f"add: {add_seconds / args.sequences * 1e6:.2f} us a sequence")
    print(f"memory: {(added - before) / args.sequences:.0f} bytes a sequence when all wait")
    print(f"        {(peak - before) / args.sequences:.0f} at most, the ranks' own counters of this script included")
    for phase, measured in rows.items():
        busy = [(touched, seconds) for touched, seconds in measured if touched >= 1000]
        if not busy:
            continue
        per_thousand = [seconds / touched * 1e6 for touched, seconds in busy]
        print(
            f"{phase.value}: {len(measured)} decisions, {sum(t for t, _ in measured)} touched, "
            f"{sum(s for _, s in measured):.1f} s; ms per 1,000 touched: all {total(measured):.2f}, "
            f"median {statistics.median(per_thousand):.2f}, worst {max(per_thousand):.2f} (of those touching 1,000+)"
        )


def total(measured: list[tuple[int, float]]) -> float:
    return sum(seconds for _, seconds in measured) / max(sum(touched for touched, _ in measured), 1) * 1e6


if __name__ == "__main__":
    main()
