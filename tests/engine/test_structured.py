import json
import re
from array import array
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from hpcgen.coroutine.lifecycle import Lifecycle
from hpcgen.engine.sampling import sample
from hpcgen.engine.stopping import Stopping
from hpcgen.engine.structured import StructuredOutput
from hpcgen.sequence import Grammar, SamplingParams, Sequence, Status
from tests.tiny_tokenizer import VOCABULARY_SIZE, save_tokenizer

END = 1
SCHEMA = {
    "type": "object",
    "properties": {"n": {"type": "integer"}, "on": {"type": "boolean"}},
    "required": ["n", "on"],
}
GRAMMARS = (
    Grammar("json_schema", json.dumps(SCHEMA)),
    Grammar("regex", "[a-f]{3}-[0-9]{2}"),
    Grammar("ebnf", 'root ::= "a" root "b" | "é"'),
    None,
)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    save_tokenizer(directory)
    (directory / "config.json").write_text('{"model_type": "llama"}')
    return directory


@pytest.fixture
def structured(directory: Path) -> StructuredOutput:
    return StructuredOutput(directory, VOCABULARY_SIZE)


def sequence(number: int, grammar: Grammar | None, **options: Any) -> Sequence:
    chosen = {"max_tokens": 60, "temperature": 1.0, "stop_token_ids": (END,), "key": number} | options
    return Sequence(number, number, 0, array("I", [3]), SamplingParams(**chosen, grammar=grammar))


def generate(structured: StructuredOutput, sequences: list[Sequence], interrupt: bool = False) -> None:
    """Runs a batch to its end on logits that depend on sequence and position alone."""
    stopping = Stopping(lambda sequence: None)  # type: ignore[arg-type,return-value]
    active = list(sequences)
    while active:
        logits = torch.stack(
            [
                torch.randn(VOCABULARY_SIZE, generator=torch.Generator().manual_seed(s.id * 97 + s.length))
                for s in active
            ]
        )
        tokens = sample(logits, active, structured)
        active = [s for s, token in zip(active, tokens, strict=True) if not stopping.append(s, token)]
        if interrupt:
            for s in active:
                structured.forget(s)


def text(directory: Path, s: Sequence) -> str:
    return Tokenizer.from_file(str(directory / "tokenizer.json")).decode(list(s.output))


def test_every_text_of_a_mixed_batch_conforms_unless_it_was_cut(directory: Path, structured: StructuredOutput) -> None:
    batch = [sequence(i, GRAMMARS[i % 4], temperature=(0.0, 1.0, 2.0)[i % 3]) for i in range(24)]
    generate(structured, batch)
    stopped = [[s for s in batch[kind::4] if s.finish_reason == "stop"] for kind in range(4)]
    assert all(stopped[:3])
    for s in stopped[0]:
        assert set(json.loads(text(directory, s))) == {"n", "on"}
    for s in stopped[1]:
        assert re.fullmatch("[a-f]{3}-[0-9]{2}", text(directory, s))
    for s in stopped[2]:
        assert re.fullmatch("a*éb*", text(directory, s))


def test_a_text_that_is_cut_says_so(structured: StructuredOutput) -> None:
    s = sequence(0, GRAMMARS[1], max_tokens=2)
    generate(structured, [s])
    assert s.finish_reason == "length" and len(s.output) == 2


def test_a_matcher_that_was_forgotten_is_made_again_from_the_output(
    directory: Path, structured: StructuredOutput
) -> None:
    through, interrupted = ([sequence(i, GRAMMARS[i % 4]) for i in range(8)] for _ in range(2))
    generate(structured, through)
    generate(StructuredOutput(directory, VOCABULARY_SIZE), interrupted, interrupt=True)
    assert [list(s.output) for s in through] == [list(s.output) for s in interrupted]


def test_a_sequence_without_grammar_draws_the_same_in_whatever_company(structured: StructuredOutput) -> None:
    alone, together = sequence(3, None), sequence(3, None)
    generate(structured, [alone])
    generate(structured, [sequence(0, GRAMMARS[0]), together, sequence(1, GRAMMARS[1])])
    assert list(alone.output) == list(together.output)


def test_logprobs_are_those_of_the_model_and_not_of_the_grammar(structured: StructuredOutput) -> None:
    logits = torch.randn(1, VOCABULARY_SIZE, generator=torch.Generator().manual_seed(0))
    s = sequence(0, GRAMMARS[1], logprobs=1)
    (token,) = sample(logits, [s], structured)
    assert s.logprobs[0].logprob == pytest.approx(float(logits[0].log_softmax(-1)[token]))
    assert s.logprobs[0].top[0][0] == int(logits.argmax())


def test_a_grammar_that_the_vocabulary_cannot_write_is_an_error_of_its_sequence_alone(tmp_path: Path) -> None:
    words = Tokenizer(WordLevel({"a": 0, "</s>": 1, "?": 2}, unk_token="?"))
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="</s>", unk_token="?").save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    impossible, fine = sequence(0, Grammar("regex", "ab")), sequence(1, Grammar("regex", "aa"))
    impossible.output.append(0)
    tokens = sample(torch.zeros(2, 3), [impossible, fine], StructuredOutput(tmp_path, 3))
    assert impossible.error is not None and "vocabulary" in impossible.error
    assert fine.error is None and tokens[1] == 0
    assert Stopping(lambda sequence: None).append(impossible, 0)  # type: ignore[arg-type,return-value]


def test_without_a_tokenizer_a_grammar_is_an_error_of_its_sequence() -> None:
    s = sequence(0, GRAMMARS[1])
    sample(torch.zeros(1, VOCABULARY_SIZE), [s], StructuredOutput(None, VOCABULARY_SIZE))
    assert s.error is not None and "no tokenizer" in s.error


def test_grammars_are_compiled_from_prefill_on_and_forgotten_at_the_end(structured: StructuredOutput) -> None:
    lifecycle = Lifecycle()
    structured.follow(lifecycle)
    s = sequence(0, GRAMMARS[1])
    lifecycle.move(s, Status.PREFILLING)
    assert structured.compiling == 1
    sample(torch.zeros(1, VOCABULARY_SIZE), [s], structured)
    assert (structured.compiling, structured.matching) == (0, 1)
    lifecycle.move(s, Status.FINISHED)
    assert (structured.compiling, structured.matching) == (0, 0)
