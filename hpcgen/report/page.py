"""The report of a run as one HTML page that needs nothing else: style and charts are in it."""

from html import escape
from pathlib import Path
from time import localtime, strftime
from typing import Any

import numpy as np

from hpcgen.report import charts
from hpcgen.report.plan_comparison import bar, chosen, compared
from hpcgen.report.progress import duration
from hpcgen.report.run_record import RunRecord
from hpcgen.report.style import STYLE
from hpcgen.report.summary import SCT_PERCENTILES, percentile
from hpcgen.report.timeline import timeline

SLOWEST = 15
"""Requests in the table of those that finished last."""
MOST_EVENTS = 50
"""Rows of the table of events."""


def render_page(record: RunRecord) -> str:
    """The whole page."""
    name = record.path.resolve().name
    sections = [
        _section("Essentials", _facts(record)),
        _section("Timeline", timeline(record) + _marks(record)),
        _section("Completion", charts.completion(record)),
    ]
    if record.plan:
        sections.append(_section("Plan and what happened", _plan(record)))
    sections.append(
        _section("Throughput", _shared(record) + charts.throughput(record))
        if record.steps
        else _section("Throughput", _none("No steps are recorded."))
    )
    if record.loads:
        sections.append(_section("Sequences", charts.sequences(record)))
        if len(record.loads[0]["active"]) > 1:
            sections.append(_section("Utilisation by rank", charts.active_by_rank(record)))
        sections.append(_section("KV in the host store", charts.kv_occupancy(record)))
    if record.succeeded:
        sections.append(_section("Lengths", charts.lengths(record)))
        sections.append(_section("Finished last", _slowest(record)))
    sections.append(_section("Errors", _errors(record) if record.errors else _none("No request failed.")))
    sections.append(_section("What ran where", _jobs(record)))
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(name)}: hpcgen report</title><style>{STYLE}</style></head><body><main>"
        f"<header><h1>{escape(name)}</h1><p>{_state(record)}</p></header>{''.join(sections)}</main></body></html>\n"
    )


def _state(record: RunRecord) -> str:
    done = len(record.finished)
    word = "complete" if record.complete else "not complete"
    began = strftime("%Y-%m-%d %H:%M:%S", localtime(record.clock.spans[0][0]))
    return f"{word}: {done:,} of {record.requests:,} requests done; began {began}"


def _facts(record: RunRecord) -> str:
    prompt = sum(one.prompt_tokens for one in record.succeeded)
    output = sum(one.output_tokens for one in record.succeeded)
    seconds, failed = record.clock.seconds, len(record.finished) - len(record.succeeded)
    large = [
        ("batch completion time" if record.complete else "so far", duration(seconds)),
        ("requests ok", f"{len(record.succeeded):,}"),
        ("failed", f"{failed:,}"),
        ("output tokens/s", f"{output / seconds:,.1f}" if seconds > 0 else "-"),
    ]
    facts = [
        ("output tokens", f"{output:,}"),
        ("prompt tokens", f"{prompt:,}"),
        ("prefill, decode", f"{record.phase_seconds('prefill'):,.1f} s, {record.phase_seconds('decode'):,.1f} s"),
    ]
    times = record.sub_batch_times().tolist()
    if times:
        text = ", ".join(f"p{p} {duration(percentile(times, p))}" for p in SCT_PERCENTILES)
        facts.append((f"SCT of {len(times):,} sub-batches", text))
    facts += [("model", Path(record.manifest.model.path).name), ("input", Path(record.manifest.input.path).name)]
    return _list("facts large", large) + _list("facts", facts)


def _list(style: str, facts: list[tuple[str, str]]) -> str:
    rows = "".join(f"<div><dt>{escape(k)}</dt><dd>{escape(v)}</dd></div>" for k, v in facts)
    return f'<dl class="{style}">{rows}</dl>'


def _jobs(record: RunRecord) -> str:
    hidden = {"event", "time", "at", "version", "requests", "worked", "until"}
    names = list(dict.fromkeys(name for job in record.jobs for name in job if name not in hidden))
    rows = [
        [strftime("%Y-%m-%d %H:%M:%S", localtime(job["time"])), duration(job["worked"])]
        + [_text(job.get(name)) for name in names]
        for job in record.jobs
    ]
    memory = ""
    if record.memory:
        gib = record.memory["host_pages"] * record.memory["page_bytes"] / 2**30
        budget = record.memory.get("device_budget")
        device = "used in place" if budget is None else f"{budget / 2**30:,.2f} GiB of the device"
        memory = f"<p>KV host store of a node: {record.memory['host_pages']:,} pages, {gib:,.2f} GiB; {device}.</p>"
    options = ", ".join(f"{key} {_text(value)}" for key, value in record.manifest.options.items() if value is not None)
    return _table(["began", "worked", *names], rows) + memory + f"<p>Options: {escape(options)}.</p>"


def _marks(record: RunRecord) -> str:
    if not record.marks:
        return _none("No checkpoint, preemption or other event is recorded.")
    rows = [[duration(mark.at), mark.kind.replace("_", " "), mark.details] for mark in record.marks]
    title = f"{len(rows):,} events" + (f", the last {MOST_EVENTS}" if len(rows) > MOST_EVENTS else "")
    return _table(["at", "event", "details"], rows[-MOST_EVENTS:], fold=len(rows) > 8, title=title)


def _plan(record: RunRecord) -> str:
    rows = [
        [escape(name), escape(planned), escape(happened), bar(ratio)]
        for name, planned, happened, ratio in compared(record)
    ]
    table = _table_of_html(["", "plan", "run", "run / plan"], rows) if rows else ""
    note = "<p>The plan takes every output to be as long as its request allows, and leaves loading out.</p>"
    return note + table + _list("facts", chosen(record))


def _shared(record: RunRecord) -> str:
    if not any("engine" in job for job in record.jobs):
        return ""
    return "<p>The engine worked for other batches too: what follows, up to the lengths, is of all of them.</p>"


def _slowest(record: RunRecord) -> str:
    rows = [
        [one.custom_id, duration(record.clock(one.time)), f"{one.prompt_tokens:,}", f"{one.output_tokens:,}",
         one.finish_reason]
        for one in reversed(record.succeeded[-SLOWEST:])
    ]  # fmt: skip
    longest = np.sort([one.output_tokens for one in record.succeeded])
    note = (
        f"<p>Output tokens: median {int(np.median(longest)):,}, "
        f"99th percentile {int(np.percentile(longest, 99)):,}, most {int(longest[-1]):,}.</p>"
    )
    return note + _table(["request", "finished at", "prompt tokens", "output tokens", "ended by"], rows)


def _errors(record: RunRecord) -> str:
    rows = [[code, f"{len(found):,}", found[0].custom_id, found[0].error_message] for code, found in record.errors]
    return _table(["code", "requests", "first one", "its message"], rows)


def _table_of_html(head: list[str], rows: list[list[str]]) -> str:
    header = "".join(f"<th>{escape(cell)}</th>" for cell in head)
    body = "".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in rows)
    return f'<div class="scroll"><table><thead><tr>{header}</tr></thead><tbody>{body}</tbody></table></div>'


def _table(head: list[str], rows: list[list[str]], fold: bool = False, title: str = "") -> str:
    table = _table_of_html(head, [[escape(cell) for cell in row] for row in rows])
    return f"<details><summary>{escape(title)}</summary>{table}</details>" if fold else table


def _section(title: str, body: str) -> str:
    return f"<section><h2>{escape(title)}</h2>{body}</section>"


def _none(text: str) -> str:
    return f'<p class="none">{escape(text)}</p>'


def _text(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(map(_text, value))
    return "" if value is None else str(value)
