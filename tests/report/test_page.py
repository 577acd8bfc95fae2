import re
from html.parser import HTMLParser

import pytest

from hpcgen.cli import main
from hpcgen.report.page import render_page
from hpcgen.report.run_record import RunRecord
from tests.report.runs import make_run

PLAN = {"seconds": 560.0, "prefill_seconds": 110.0, "decode_seconds": 380.0, "tail_seconds": 60.0}
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
        "Essentials", "What ran where", "Timeline", "Completion", "Throughput", "Sequences", "Utilisation by rank",
        "KV in the host store", "Plan and what happened", "Lengths", "Finished last", "Errors",
    ]  # fmt: skip


def test_the_page_needs_nothing_from_outside(page):
    names = {name for name, _ in checked(page).attributes}
    assert not names & {"src", "href", "srcset", "xlink:href", "onload"}
    assert not re.search(r"https?:|@import|url\(|<script|<link", page)


def test_what_users_wrote_is_escaped(page):
    assert "<b>no</b>" not in page and "&lt;b&gt;no&lt;/b&gt;" in page


def test_the_plan_stands_beside_what_happened(page):
    assert re.search(r"<td>batch completion, s</td><td>560\.0</td><td>599\.0</td><td>1\.07</td>", page)
    assert "<td>decode, s</td><td>440.0</td>" in page


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
