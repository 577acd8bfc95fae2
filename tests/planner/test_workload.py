import json

import numpy as np
import pytest

from hpcgen.planner.errors import PlanError
from hpcgen.planner.workload import Workload, draw, read_output_lengths, read_requests


def write(file, lines):
    file.write_text("\n".join(json.dumps(line) if isinstance(line, dict) else line for line in lines))
    return file


def test_lengths_of_requests_are_read_and_other_lines_left_out(tmp_path):
    file = write(
        tmp_path / "requests.jsonl",
        [
            {"custom_id": "a", "body": {"prompt": "x" * 400, "max_tokens": 7}},
            {"custom_id": "b", "body": {"prompt": [1, 2, 3], "max_tokens": 9, "n": 2}},
            {"custom_id": "c", "body": {"messages": [{"role": "user", "content": "y" * 384}]}},
            "not json",
            {"custom_id": "d"},
        ],
    )
    workload = read_requests(file)
    assert workload.prompts.tolist() == [100, 3, 3, 100]
    assert workload.most.tolist() == [7, 9, 9, 1024]


def test_output_lengths_come_from_the_results_of_an_earlier_run(tmp_path):
    line = {"response": {"body": {"usage": {"completion_tokens": 17}}}}
    assert read_output_lengths(write(tmp_path / "results.jsonl", [line, {"response": None}])).tolist() == [17]


def test_a_file_without_requests_is_refused(tmp_path):
    with pytest.raises(PlanError, match="no request"):
        read_requests(write(tmp_path / "empty.jsonl", ["{}"]))
    with pytest.raises(PlanError, match="cannot be read"):
        read_requests(tmp_path / "absent.jsonl")


@pytest.mark.parametrize("specification", ["fixed", "fixed:x", "uniform:1", "zipf:2", "lognormal:100"])
def test_an_unknown_distribution_is_refused_with_the_known_ones(specification):
    with pytest.raises(PlanError, match="lognormal:MEDIAN:SIGMA"):
        draw(specification, 3)


def test_distributions_have_the_moments_that_they_name():
    assert draw("fixed:5", 3).tolist() == [5, 5, 5]
    assert np.median(draw("lognormal:300:0.7", 20_000)) == pytest.approx(300, rel=0.03)
    assert draw("lognormal:300:0.7:500", 20_000).max() == 500
    assert draw("uniform:3:5", 1000).min() == 3


def test_lengths_are_at_least_one_and_the_limit_at_least_the_output():
    workload = Workload.of(np.array([0]), np.array([9]), np.array([4]))
    assert (workload.prompts[0], workload.most[0]) == (1, 9)
