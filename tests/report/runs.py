"""Run directories as runs leave them, for the report."""

import json
from pathlib import Path

import numpy as np

from hpcgen.batch.journal import Journal
from hpcgen.batch.run_directory import InputIdentity, Manifest, ModelIdentity
from hpcgen.durable import write_json

START = 1_796_000_000.0


def make_run(path: Path, requests=200, ranks=4, nodes=2, jobs=2, sub_batch=20, failed=6, seed=0, **files) -> Path:
    """A finished run of `jobs` jobs with a wait between them; deterministic. `files`: events, plan, complete."""
    path.mkdir(parents=True)
    rng = np.random.default_rng(seed)
    options = {"seed": 0, "max_model_len": 4096, "dtype": "bfloat16", "sub_batch": sub_batch}
    write_json(
        path / "manifest.json",
        Manifest(
            id="ab",
            created=START,
            input=InputIdentity("/data/requests.jsonl", 1000, "0", requests),
            model=ModelIdentity("/models/a-model", "0"),
            options=options,
        ),
    )
    outputs = np.minimum(rng.lognormal(5, 0.8, requests), 4000).astype(int) + 1
    order = np.argsort(outputs)
    at = np.linspace(60, 600, requests)
    _write_journal(path / "journal", order, outputs, at, failed)
    if files.get("events", True):
        (path / "events.jsonl").write_text("\n".join(map(json.dumps, _events(ranks, nodes, jobs, files.get("plan")))))
    if files.get("complete", True):
        (path / "SUCCESS").write_text("{}")
    return path


def _write_journal(path, order, outputs, at, failed):
    journal = Journal(path, len(order))
    for position, request in enumerate(order.tolist()):
        ok = position >= failed
        code = ("context_length_exceeded", "invalid_json")[position % 3 == 0]
        error = {"code": code, "message": f"line {request + 1}: <b>no</b>", "line": request + 1}
        usage = {"prompt_tokens": 100 + request % 50, "completion_tokens": int(outputs[request])}
        body = {"usage": usage, "choices": [{"finish_reason": "stop" if request % 5 else "length"}]}
        line = {
            "custom_id": f"r-{request}",
            "response": {"status_code": 200, "body": body if ok else {}},
            "error": None if ok else error,
        }
        journal.append(request, ok, json.dumps(line).encode())
        journal.times[request] = START + at[position]
    journal.close()
    _rewrite_times(path, journal, at, order)


def _rewrite_times(path, journal, at, order):
    """The journal stamps records itself; here they get the times of the story."""
    import struct
    import zlib

    data = bytearray(path.read_bytes())
    for position, request in enumerate(order.tolist()):
        offset = int(journal.offsets[request])
        (size,) = struct.unpack_from("<I", data, offset)
        wait = 3600 if at[position] > 300 else 0
        struct.pack_into("<d", data, offset + 13, START + at[position] + wait)
        end = offset + 21 + size
        struct.pack_into("<I", data, end, zlib.crc32(bytes(data[offset:end])))
    path.write_bytes(data)


def _events(ranks, nodes, jobs, plan):
    events = []
    length = 300
    for job in range(jobs):
        begin = START + job * (length + 3600)
        add = lambda event, at, begin=begin, **fields: events.append({"event": event, "time": begin + at, **fields})  # noqa: E731
        add(
            "opened",
            0,
            version=1,
            requests=200,
            ranks=ranks,
            hosts=f"node[1-{nodes}]",
            device="cuda",
            job=str(70 + job),
        )
        add("memory", 1, host_pages=1000, page_bytes=2**20, device_budget=None, phases={})
        if plan and job == 0:
            add("plan", 1, **plan)
        for second in range(2, length, 2):
            prefill = second % 150 < 30
            phase = "prefill" if prefill else "decode"
            if second % 150 in (0, 30) or second == 2:
                add("phase", second, phase=phase)
            tokens = 40_000 if prefill else int(9000 - 20 * second)
            add("steps", second, phase=phase, steps=4, tokens=tokens, seconds=1.9)
            active = [0 if prefill else max(64 - second // 10 - 3 * rank, 0) for rank in range(ranks)]
            used = [min(900, 200 + second * 3 + 40 * node) for node in range(nodes)]
            add("load", second, active=active, suspended=max(200 - second, 0), waiting=max(400 - 2 * second, 0),
                host_pages=used)  # fmt: skip
        add("checkpoint", 240, sequences=64, bytes=12_345_678)
        if job + 1 < jobs:
            add("preempted", length - 1, signal="SIGUSR1")
        else:
            add("finished", length, requests=200, failed=6)
    return events
