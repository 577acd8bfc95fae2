import subprocess
from pathlib import Path

import pytest

from hpcgen.api import LLM, PromptError, SamplingParams, SubmittedRun, submit, submit_chat
from hpcgen.api.submission import RunFailed
from hpcgen.errors import HpcgenError

PARAMS = SamplingParams(max_tokens=6, ignore_eos=True, seed=2)


def test_a_run_of_its_own_has_the_results_of_an_engine_here(llm: LLM, model: Path, tmp_path: Path) -> None:
    prompts = ["the quick", [40] * 300, "the dog"]
    run = submit(model, prompts, PARAMS, run_directory=tmp_path / "run", host_memory="32MiB", threads=1)  # type: ignore[arg-type]
    submitted = run.result(timeout=120, poll=0.1)
    here = llm.generate(prompts, PARAMS, use_tqdm=False)
    assert [[s.text for s in output.outputs] for output in submitted] == [
        [s.text for s in output.outputs] for output in here
    ]
    assert "300 tokens" in str(submitted[1].error)
    assert (tmp_path / "run").stat().st_mode & 0o777 == 0o700
    again = SubmittedRun(tmp_path / "run")
    assert again.done() and again.state.ok == 2 and len(again.result()) == 3


def test_a_run_that_fails_says_why(tmp_path: Path, cache: Path) -> None:
    run = submit_chat(tmp_path, [{"role": "user", "content": "the"}], PARAMS, run_directory=tmp_path / "run")
    with pytest.raises(RunFailed, match=r"status 2.*config.json|status 2.*tokenizer"):
        run.result(timeout=120, poll=0.1)


def test_waiting_ends_at_the_timeout(tmp_path: Path) -> None:
    process = subprocess.Popen(["sleep", "60"])
    run = SubmittedRun(tmp_path, process)
    with pytest.raises(TimeoutError, match="not done after"):
        run.result(timeout=0.05, poll=0.01)
    run.cancel()
    assert process.returncode is not None


def test_a_wrong_prompt_or_job_starts_nothing(model: Path, tmp_path: Path) -> None:
    with pytest.raises(PromptError, match=r"prompt 0: .*top_p"):
        submit(model, ["the"], SamplingParams(top_p=3), run_directory=tmp_path / "run")
    with pytest.raises(HpcgenError, match=r"Slurm options: .*knots"):
        submit(model, ["the"], PARAMS, run_directory=tmp_path / "run", slurm={"knots": 2})
    assert not list((tmp_path / "run").iterdir())
