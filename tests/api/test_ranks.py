"""The Python API under mpirun: every rank makes the same calls and has the same results."""

import json
import sys
from pathlib import Path

import pytest

from hpcgen.api import LLM, SamplingParams
from tests.cluster.launching import needs_mpi, run

pytestmark = [needs_mpi, pytest.mark.xdist_group("ranks")]
PROGRAM = [sys.executable, "-m", "tests.api.ranks_program"]


def test_all_ranks_have_the_results_of_one_process_and_leave_without_being_closed(
    llm: LLM, model: Path, tmp_path: Path
) -> None:
    result = run([*PROGRAM, str(model), str(tmp_path), "unclosed"], (2,))
    assert result.returncode == 0, result.stderr
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    alone = llm.generate(["the quick", "the dog", "fox", "the dog"], params, use_tqdm=False)
    expected = [output.outputs[0].token_ids for output in alone]
    assert [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1)] == [expected] * 2


def test_an_error_of_one_rank_ends_all(model: Path, tmp_path: Path, cache: Path) -> None:
    result = run([*PROGRAM, str(model), str(tmp_path), "fail"], (2,))
    assert result.returncode != 0 and "a mistake of the user's program" in result.stderr
