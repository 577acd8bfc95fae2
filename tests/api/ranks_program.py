"""What every rank of `test_ranks` does: the same calls of an `LLM`, and what came of them as a line of JSON.

It closes nothing itself, as many programs of users do not.
"""

import json
import sys
from pathlib import Path

from hpcgen import LLM, SamplingParams

GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)


def use(llm: LLM, destination: Path) -> None:
    first = llm.generate(["the quick", "the dog", "fox"], GREEDY, use_tqdm=False)
    for _ in llm.generate_iter(["the"] * 30, SamplingParams(max_tokens=60, ignore_eos=True)):
        break  # the rest is dropped, on all ranks
    again = llm.generate("the dog", GREEDY, use_tqdm=False)
    tokens = [output.outputs[0].token_ids for output in first + again]
    (destination / f"{llm._world.rank}.json").write_text(json.dumps(tokens))


llm = LLM(sys.argv[1], host_memory=16 << 20, threads=1)
how = sys.argv[3]
if how == "unclosed":
    use(llm, Path(sys.argv[2]))
elif llm._world.leads:
    raise ValueError("a mistake of the user's program")
else:
    with llm:
        use(llm, Path(sys.argv[2]))
