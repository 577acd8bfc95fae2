from xml.etree import ElementTree

import numpy as np
import pytest

from hpcgen.report.svg import Chart, number, ticks, time_ticks


@pytest.mark.parametrize("most", [0.003, 0.7, 1, 9.99, 10, 37, 100, 12345, 9e9])
def test_ticks_are_few_round_and_reach_the_top(most):
    found = ticks(most)
    assert found[0] == 0 and 2 <= len(found) <= 8
    assert found[-1] >= most * 0.999
    step = found[1]
    mantissa = step / 10 ** np.floor(np.log10(step) + 1e-9)
    assert min(abs(mantissa - round_one) for round_one in (1, 2, 5)) < 1e-6


@pytest.mark.parametrize(("most", "step"), [(5, 1), (50, 10), (599, 120), (7000, 1800), (1e5, 21_600), (2e5, 36_000)])
def test_ticks_of_time_are_whole_units(most, step):
    assert time_ticks(most)[1] == step


def test_ticks_of_nothing_are_still_an_axis():
    assert ticks(0) == [0, 1]


@pytest.mark.parametrize(
    ("value", "text"), [(0, "0"), (350, "350"), (1234, "1,234"), (20_000, "20k"), (3.5e6, "3.5M"), (0.25, "0.25")]
)
def test_numbers_are_short(value, text):
    assert number(value) == text


def drawn(chart, label="x"):
    return ElementTree.fromstring(chart.render(label))


def test_a_chart_is_well_formed_and_its_texts_are_escaped():
    chart = Chart(10, 5)
    chart.line([0, 10], [0, 5], "s0", "a < b & c")
    chart.steps([0, 10], [0, 5], "s0", "a < b")
    chart.stairs([(0, 5)], [3], "s1", "x")
    chart.bars(np.array([0, 5, 10]), np.array([1, 2]), "s2", "tokens")
    chart.band(0, 5, "s0", "<phase>")
    chart.block(3, 3, 0, 1, "mark", '"quoted"')
    chart.level(3, "s0", "plan")
    chart.moment(3, "s0", "plan")
    root = drawn(chart, "a <label>")
    assert next(title.text for title in root.iter("title")) == "<phase>"
    assert root.attrib["aria-label"] == "a <label>"


def test_a_line_keeps_its_ends_when_it_is_thinned():
    chart = Chart(1e5, 1e5)
    chart.line(np.arange(100_000), np.arange(100_000), "s0", "")
    points = drawn(chart).find(".//polyline").attrib["points"].split()
    assert len(points) <= 600
    assert points[0] == "0.0,1000.0" and points[-1] == "1000.0,0.0"


def test_values_beyond_the_axes_stay_in_the_picture():
    chart = Chart(10, 10)
    chart.line([-5, 50], [-5, 50], "s0", "")
    assert drawn(chart).find(".//polyline").attrib["points"] == "0.0,1000.0 1000.0,0.0"


def test_a_step_stays_until_the_next_one():
    chart = Chart(10, 10)
    chart.steps([0, 5, 10], [0, 10, 10], "s0", "")
    assert drawn(chart).find(".//path").attrib["d"] == "M0.0 1000.0H500.0V0.0H1000.0V0.0"


def test_what_lasts_no_time_at_the_end_is_still_seen():
    chart = Chart(10, 1)
    chart.block(10, 10, 0, 1, "mark", "")
    block = drawn(chart).find(".//rect").attrib
    assert float(block["width"]) > 1 and float(block["x"]) + float(block["width"]) <= 1000


def test_axes_are_text_of_the_page_at_the_place_of_their_values():
    root = drawn(Chart(10, 4, x_ticks=[0, 5, 10]))
    assert [(span.text, span.attrib["style"]) for span in root.findall('div[@class="x"]/span')] == [
        ("0", "left:0.00%"), ("5", "left:50.00%"), ("10", "left:100.00%"),
    ]  # fmt: skip
