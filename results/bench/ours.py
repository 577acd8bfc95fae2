"""One batch by `hpcgen run`, as a user runs it, read back from its events."""

import json
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil
from peer_clock import busy_seconds


def run(model: Path, requests: Path, directory: Path, threads: int, arguments: tuple[str, ...] = ()) -> dict:
    """Seconds of the batch are those from the end of loading to the last result: tokenization that the run did not
    wait for, detokenization and journal included. Peak memory is that of the process and its tokenizer together."""
    output = directory / "results.jsonl"
    started, busy = time.time(), busy_seconds()
    command = [sys.executable, "-m", "hpcgen.cli", "run", "--model", model, "--input", requests, "--output", output]
    process = psutil.Popen(
        [*map(str, command), "--threads", str(threads), *arguments],
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    peak, own = 0, {}
    while process.poll() is None:
        resident = 0
        for member in _family(process):
            with suppress(psutil.Error):
                resident += member.memory_info().rss
                times = member.cpu_times()
                own[member.pid] = times.user + times.system
        peak = max(peak, resident)
        time.sleep(0.2)
    if process.returncode:
        raise SystemExit(f"hpcgen run failed: {process.stderr.read()}")
    elapsed = time.time() - started
    cores = elapsed * (psutil.cpu_count() or 1)
    events = [json.loads(line) for line in (directory / "results.run" / "events.jsonl").open()]
    at = {event["event"]: event["time"] for event in reversed(events)}  # the first of each kind
    results = [json.loads(line)["response"]["body"]["usage"] for line in output.open()]
    steps = [event for event in events if event["event"] == "steps"]
    return {
        "first_token": steps[0]["time"] - started,
        "seconds": at["finished"] - at["memory"],
        "prompt_tokens": sum(usage["prompt_tokens"] for usage in results),
        "output_tokens": sum(usage["completion_tokens"] for usage in results),
        "peak_bytes": peak,
        "others": max(busy_seconds() - busy - sum(own.values()), 0.0) / cores,
        "whole": elapsed,
    }


def _family(process: psutil.Popen) -> list[psutil.Process]:
    try:
        return [process, *process.children(recursive=True)]
    except psutil.Error:
        return []
