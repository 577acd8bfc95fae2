"""Structured output: which tokens each sequence may draw, so that its text stays within its grammar.

R rows (sequences), V vocabulary. Grammars are compiled on other threads while a prompt is prefilled; the matcher of a
sequence exists while it is worked on, and is made again from the output tokens when it comes back.
"""

from collections.abc import Sequence as Seq
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from hpcgen.coroutine.lifecycle import Lifecycle
from hpcgen.sequence import Grammar, Sequence, Status

if TYPE_CHECKING:
    import xgrammar

COMPILE_THREADS = 2
CACHE_BYTES = 2**30
"""Compiled grammars that are kept beyond the sequences that use them; a large schema takes some 10 MB."""


@dataclass(slots=True)
class _Matching:
    matcher: "xgrammar.GrammarMatcher"
    accepted: int = 0
    """Output tokens that the matcher has seen."""


class StructuredOutput:
    """Masks logits by the grammars of their sequences. What it needs is made with the first sequence that has one."""

    def __init__(self, tokenizer_directory: Path | None, vocabulary: int):
        """`vocabulary`: columns of the logits, which may be more than the tokenizer has tokens."""
        self._tokenizer_directory, self._vocabulary = tokenizer_directory, vocabulary
        self._threads = ThreadPoolExecutor(COMPILE_THREADS, thread_name_prefix="grammar")
        self._compiler: Future[xgrammar.GrammarCompiler] | None = None
        self._batch: xgrammar.BatchGrammarMatcher | None = None
        self._compiling: dict[int, Future[xgrammar.CompiledGrammar]] = {}
        self._matching: dict[int, _Matching] = {}

    @property
    def compiling(self) -> int:
        """Sequences whose grammar was asked for and not yet used."""
        return len(self._compiling)

    @property
    def matching(self) -> int:
        """Sequences that have a matcher."""
        return len(self._matching)

    def follow(self, lifecycle: Lifecycle) -> None:
        """Compiles while sequences are prefilled, and forgets those that are not worked on any more."""
        lifecycle.on(Status.PREFILLING, lambda sequence, left: self.prepare(sequence))
        for status in (Status.WAITING, Status.SUSPENDED, Status.FINISHED, Status.FAILED):
            lifecycle.on(status, lambda sequence, left: self.forget(sequence))

    def prepare(self, sequence: Sequence) -> None:
        """Begins to compile the grammar of a sequence, if it has one."""
        if sequence.sampling.grammar is None or sequence.id in self._compiling:
            return
        if self._compiler is None:
            self._compiler = self._threads.submit(self._make_compiler)
        self._compiling[sequence.id] = self._threads.submit(_compile, self._compiler, sequence.sampling.grammar)

    def forget(self, sequence: Sequence) -> None:
        self._compiling.pop(sequence.id, None)
        self._matching.pop(sequence.id, None)

    def mask(self, logits: torch.Tensor, sequences: Seq[Sequence]) -> None:
        """Puts -inf into `logits` [R, V] at what a row may not draw.

        A row that can draw nothing keeps its logits, and its sequence gets an `error`.
        """
        rows = [row for row, sequence in enumerate(sequences) if self._advance(sequence)]
        if not rows:
            return
        import xgrammar

        if self._batch is None:
            self._batch = xgrammar.BatchGrammarMatcher(max_threads=torch.get_num_threads())
        bitmask = xgrammar.allocate_token_bitmask(len(rows), self._vocabulary)
        matchers = [self._matching[sequences[row].id].matcher for row in rows]
        self._batch.batch_fill_next_token_bitmask(matchers, bitmask)
        possible = bitmask.any(dim=1)
        if not possible.all():
            for row in torch.tensor(rows)[~possible].tolist():
                sequences[row].error = "no token of the model's vocabulary can continue the text within its grammar"
            bitmask = bitmask[possible]
            rows = torch.tensor(rows)[possible].tolist()
        whole = torch.full((len(logits), bitmask.shape[1]), -1, dtype=bitmask.dtype)
        whole[rows] = bitmask
        xgrammar.apply_token_bitmask_inplace(logits, whole.to(logits.device), indices=rows)

    def _make_compiler(self) -> "xgrammar.GrammarCompiler":
        import xgrammar
        from transformers import AutoTokenizer

        if self._tokenizer_directory is None:
            raise ValueError("the engine was given no tokenizer")
        tokenizer = AutoTokenizer.from_pretrained(str(self._tokenizer_directory), local_files_only=True)
        # Ids beyond the tokenizer's own are never drawn.
        info = xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=self._vocabulary)
        return xgrammar.GrammarCompiler(info, max_threads=COMPILE_THREADS, cache_limit_bytes=CACHE_BYTES)

    def _advance(self, sequence: Sequence) -> bool:
        """Brings the matcher of a sequence up to its last token. Whether there is one, and its grammar goes on."""
        if sequence.sampling.grammar is None or sequence.error is not None:
            return False
        matching = self._matching.get(sequence.id)
        if matching is None:
            matching = self._begin(sequence)
            if matching is None:
                return False
        for token in sequence.output[matching.accepted :]:
            if not matching.matcher.accept_token(token):
                sequence.error = f"token {token} of the text does not conform to its grammar"
                return False
        matching.accepted = len(sequence.output)
        return True

    def _begin(self, sequence: Sequence) -> _Matching | None:
        import xgrammar

        self.prepare(sequence)
        try:
            compiled = self._compiling.pop(sequence.id).result()
            stop = list(sequence.sampling.stop_token_ids)
            matching = _Matching(xgrammar.GrammarMatcher(compiled, override_stop_tokens=stop))
        except (RuntimeError, ValueError) as error:
            sequence.error = f"the grammar cannot be compiled: {error}"
            return None
        self._matching[sequence.id] = matching
        return matching


def _compile(compiler: "Future[xgrammar.GrammarCompiler]", grammar: Grammar) -> "xgrammar.CompiledGrammar":
    made = compiler.result()
    if grammar.kind == "json_schema":
        return made.compile_json_schema(grammar.text)
    return made.compile_regex(grammar.text) if grammar.kind == "regex" else made.compile_grammar(grammar.text)
