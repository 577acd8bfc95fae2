"""What every rank of `test_ranks` does: the same calls of an `LLM`, and what came of them as a line of JSON."""

import json
import sys
from pathlib import Path

from hpcgen import LLM, SamplingParams

GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)


def main(model: str, destination: Path) -> None:
    with LLM(model, host_memory=16 << 20, threads=1) as llm:
        first = llm.generate(["the quick", "the dog", "fox"], GREEDY, use_tqdm=False)
        outputs = llm.generate_iter(["the"] * 30, SamplingParams(max_tokens=60, ignore_eos=True))
        next(outputs)
        outputs.close()  # the rest is dropped, on all ranks
        again = llm.generate("the dog", GREEDY, use_tqdm=False)
        rank = llm._world.rank
        tokens = [output.outputs[0].token_ids for output in first + again]
        (destination / f"{rank}.json").write_text(json.dumps(tokens))
        if len(sys.argv) > 3 and rank == 0:
            raise ValueError("a mistake of the user's program")


main(sys.argv[1], Path(sys.argv[2]))
