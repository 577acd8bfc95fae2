import re
from html.parser import HTMLParser

import pytest

from hpcgen.cli import main
from hpcgen.report.page import render_page
from hpcgen.report.run_record import RunRecord
from tests.report.runs import make_run

PLAN = {
    "seconds": 560.0, "prefill_seconds": 110.0, "decode_seconds": 380.0, "tail_seconds": 60.0, "decode_rate": 2400.0,
    "expert_batch": 4096, "prefill": {"buffer_layers": 2}, "kv_bytes": 12 * 2**30,
}  # fmt: skip
VOID = {"meta", "circle", "line", "rect", "polyline", "path"}


class Checker(HTMLParser):
    """Collects headings and attributes, and checks that elements close in order."""

    def __init__(self):
        super().__init__()
        self.open, self.headings, self.attributes = [], [], []

    def handle_starttag(self, tag, attrs):
        self.attributes += attrs
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.attributes += attrs

    def handle_endtag(self, tag):
        if tag not in VOID:
            assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] == "h2":
            self.headings.append(data)


def checked(page):
    checker = Checker()
    checker.feed(page)
    assert checker.open == []
    return checker


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    return render_page(RunRecord.read(make_run(tmp_path_factory.mktemp("runs") / "a.run", plan=PLAN)))


def test_a_run_with_everything_has_every_section(page):
    assert checked(page).headings == [
        "Essentials", "Timeline", "Completion", "Plan and what happened", "Throughput", "Sequences",
        "Utilisation by rank", "KV in the host store", "Lengths", "Finished last", "Errors", "What ran where",
    ]  # fmt: skip


def test_the_page_needs_nothing_from_outside(page):
    names = {name for name, _ in checked(page).attributes}
    assert not names & {"src", "href", "srcset", "xlink:href", "onload"}
    assert not re.search(r"https?:|@import|url\(|<script|<link", page)


def test_what_users_wrote_is_escaped(page):
    assert "<b>no</b>" not in page and "&lt;b&gt;no&lt;/b&gt;" in page


def test_the_plan_stands_beside_what_happened(page):
    assert re.search(r"<td>batch completion</td><td>9:20</td><td>9:59</td><td>.*?1\.07", page)
    assert "<td>decode</td><td>7:20</td>" in page
    assert "the plan: complete after 9:20" in page and "the plan: 2,400 tokens/s of decode" in page


def test_what_the_plan_chose_is_listed_whatever_its_names(page):
    for name, value in (("expert batch", "4,096"), ("prefill, buffer layers", "2"), ("kv bytes", "12.00 GiB")):
        assert f"<dt>{name}</dt><dd>{value}</dd>" in page


def test_the_timeline_has_a_lane_for_each_kind_of_event(page):
    (names,) = re.findall(r'<div class="names">(.*?)</div>', page)
    assert re.findall("<span>(.*?)</span>", names) == ["phases", "jobs", "checkpoints", "stops", "continued"]
    assert "4:00 checkpoint sequences 64, 12.3 MB" in page


def test_many_ranks_are_drawn_as_their_least_mean_and_most(tmp_path):
    page = render_page(RunRecord.read(make_run(tmp_path / "a.run", ranks=64)))
    assert "least of 64 ranks" in page and "rank 9" not in page


def test_a_run_of_one_rank_has_no_section_by_rank(tmp_path):
    page = render_page(RunRecord.read(make_run(tmp_path / "a.run", ranks=1, nodes=1, sub_batch=None)))
    assert "Utilisation by rank" not in checked(page).headings


@pytest.mark.parametrize("files", [{"events": False}, {"requests": 0, "failed": 0, "events": False, "complete": False}])
def test_a_run_of_which_little_is_known_still_has_a_page(tmp_path, files):
    checked(render_page(RunRecord.read(make_run(tmp_path / "a.run", **files))))


def test_the_command_writes_the_page_into_the_run_directory(tmp_path, capsys):
    run = make_run(tmp_path / "a.run")
    assert main(["report", str(run)]) == 0
    assert capsys.readouterr().out.strip() == str(run / "report.html")
    checked((run / "report.html").read_text())


def test_the_command_writes_where_it_is_told(tmp_path, capsys):
    run = make_run(tmp_path / "a.run")
    assert main(["report", str(run), "--output", str(tmp_path / "page.html")]) == 0
    assert (tmp_path / "page.html").exists() and not (run / "report.html").exists()


def test_a_directory_without_a_run_is_one_clear_line(tmp_path, capsys):
    assert main(["report", str(tmp_path)]) == 2
    assert "is not a run directory" in capsys.readouterr().err
