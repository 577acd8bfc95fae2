"""`LLM`: an engine called from Python. Under mpirun every rank makes the same calls and has the same results."""

import atexit
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from tqdm import tqdm

from hpcgen.api.outputs import RequestOutput, assembled, failed
from hpcgen.api.prompts import Conversation, Params, Prompt, chat_bodies, completion_bodies, request
from hpcgen.batch.request import CHAT, COMPLETIONS, InvalidRequest, Request
from hpcgen.batch.tokenization import RequestTokenizer, end_of_sequence_ids, load_tokenizer
from hpcgen.cluster.coordinator import Coordinator, follow
from hpcgen.cluster.world import open_world
from hpcgen.engine.build import RankAssembly
from hpcgen.engine.engine import Engine
from hpcgen.errors import HpcgenError
from hpcgen.jobs.instance import InstanceOptions, open_weights, prepare
from hpcgen.sequence import Sequence


class LLMError(HpcgenError):
    """The engine cannot be called like this."""


class LLM:
    """A model, ready to generate.

    Args:
        model: Hugging Face model directory.
        dtype: "auto" (the checkpoint's), a torch.dtype or its name.
        seed: of requests that have none of their own.
        max_model_len: most tokens of a sequence, prompt and output together; None: the model's context.
        device: "cpu", "cuda", "cuda:N" or "auto".
        device_memory: bytes for parameters, KV and activations; what does not fit is streamed from host memory.
        host_memory: bytes for KV in host memory.
        attention_microbatch, expert_batch: as in `hpcgen run`; None: chosen.
        threads: CPU threads; None: the cores of this process.

    Raises:
        HpcgenError: the model or the machine is not what it should be; the message says what to do.

    Prompts may be any iterable: they are read as the engine has room. Use it as a context manager, or call `close`; at
    the latest the end of the program closes it.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        dtype: str | torch.dtype = "auto",
        seed: int = 0,
        max_model_len: int | None = None,
        device: str = "auto",
        device_memory: int | None = None,
        host_memory: int | None = None,
        attention_microbatch: int | None = None,
        expert_batch: int | None = None,
        threads: int | None = None,
    ) -> None:
        self.options = InstanceOptions(
            model=Path(model),
            seed=seed,
            max_model_len=max_model_len,
            dtype=_dtype(dtype),
            device=device,
            device_memory=device_memory,
            host_memory=host_memory,
            attention_microbatch=attention_microbatch,
            expert_batch=expert_batch,
            threads=threads,
        )
        self._requests = 0
        self._generating = False
        self._closed = False
        self._closing = ExitStack()
        with self._closing_on_error():
            self._world = self._closing.enter_context(open_world())
            prepared = prepare(self._world, self.options)
            weights = open_weights(self._world, self.options.model, prepared.options, _say)
            self._detokenizer = prepared.detokenizer
            self._tokenizer = RequestTokenizer(self.options.model, seed, prepared.options.max_model_len)
            self._end_of_sequence = end_of_sequence_ids(self.options.model, load_tokenizer(self.options.model))
            self._wave = prepared.options.expert_batch * self._world.size
            self._engine: Engine | Coordinator | None = None
            if self._world.leads:
                self._engine, assembly = prepared.build_engine(self._world, weights, on_loss=_say)
                self._close_in_good_order(assembly, self._engine.close)
            else:
                self._follower = prepared.build_rank(self._world, weights)
                self._close_in_good_order(self._follower, self._follower.close)
            self._forget = self._close_at_exit()

    def generate(
        self, prompts: Iterable[Prompt] | Prompt, sampling_params: Params = None, use_tqdm: bool = True
    ) -> list[RequestOutput]:
        """Completes prompts; the outputs are in their order.

        Args:
            prompts: texts, lists of token ids, or one of them.
            sampling_params: one for all, or one for each.
            use_tqdm: whether to show a progress bar.

        Raises:
            PromptError: a prompt or its parameters make no request. A prompt that is too long fails alone, with
                `RequestOutput.error`.
        """
        return self._in_order(COMPLETIONS, completion_bodies(prompts, sampling_params), use_tqdm)

    def generate_iter(
        self, prompts: Iterable[Prompt] | Prompt, sampling_params: Params = None
    ) -> Iterator[RequestOutput]:
        """As `generate`, but yields each output when it is there; `request_id` rises with the prompts' order.

        Leaving the loop early drops what is unfinished. Under mpirun, ranks other than 0 get theirs at the end.
        """
        return self._outputs(self._numbered(COMPLETIONS, completion_bodies(prompts, sampling_params)))

    def chat(
        self,
        messages: Iterable[Conversation] | Conversation,
        sampling_params: Params = None,
        use_tqdm: bool = True,
        *,
        add_generation_prompt: bool = True,
        tools: list[dict[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answers conversations through the model's chat template. Otherwise as `generate`."""
        fields = _chat_fields(add_generation_prompt, tools, chat_template_kwargs)
        return self._in_order(CHAT, chat_bodies(messages, sampling_params, fields), use_tqdm)

    def chat_iter(
        self,
        messages: Iterable[Conversation] | Conversation,
        sampling_params: Params = None,
        *,
        add_generation_prompt: bool = True,
        tools: list[dict[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> Iterator[RequestOutput]:
        """As `chat`, but yields each output when it is there. Otherwise as `generate_iter`."""
        fields = _chat_fields(add_generation_prompt, tools, chat_template_kwargs)
        return self._outputs(self._numbered(CHAT, chat_bodies(messages, sampling_params, fields)))

    @property
    def leads(self) -> bool:
        """Whether this process shows progress and messages: under mpirun that is rank 0."""
        return self._world.leads

    def get_tokenizer(self) -> Any:
        """The model's transformers tokenizer."""
        return load_tokenizer(self.options.model)

    def close(self) -> None:
        """Gives memory and threads back. Under mpirun all ranks must call it, or leave the `with` block, or end."""
        self._closed = True
        self._forget()
        self._closing.close()
        self._engine = None

    def __enter__(self) -> "LLM":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closed = True
        self._forget()
        # The other ranks of a world learn of an error here.
        self._closing.__exit__(kind, error, trace)
        self._engine = None

    def _close_in_good_order(self, assembly: RankAssembly, close_engine: Callable[[], None]) -> None:
        """The engine before its device; ranks do that together, so not after an error of one of them."""
        self._closing.callback(lambda: assembly.device.close())  # another one, where ranks were lost meanwhile
        self._closing.push(lambda kind, *rest: close_engine() if kind is None else None)

    def _close_at_exit(self) -> Callable[[], object]:
        """Whoever never closes it leaves in good order too. Returns what undoes that."""
        if self._world.size == 1:
            return weakref.finalize(self, self._closing.close).detach
        # Ranks close together: when each of them ends, not when its garbage is collected.
        close = partial(_close_with_error, self._closing)
        atexit.register(close)
        return lambda: atexit.unregister(close)

    def _closing_on_error(self) -> ExitStack:
        """Undoes what was opened if the block raises; in a world of several ranks, that ends all of them."""
        guard = ExitStack()
        guard.push(lambda kind, *rest: self._closing.__exit__(kind, *rest) if _is_failure(kind) else None)
        return guard

    def _in_order(self, url: str, bodies: Iterator[dict[str, Any]], use_tqdm: bool) -> list[RequestOutput]:
        requests = list(self._numbered(url, bodies))  # all are checked before any work
        quiet = not (use_tqdm and self._world.leads)
        outputs = self._outputs(iter(requests))
        done = list(tqdm(outputs, total=len(requests), desc="Processed prompts", disable=quiet, dynamic_ncols=True))
        errors = [output.error for output in done if output.error is not None]
        if errors and self._world.leads:
            _say(f"{len(errors)} of {len(done)} prompts failed, see RequestOutput.error; the first: {errors[0]}")
        return sorted(done, key=lambda output: int(output.request_id))

    def _outputs(self, requests: Iterator[Request]) -> Iterator[RequestOutput]:
        """Outputs as they come, on rank 0; on the others all of them at the end."""
        if self._closed:
            raise LLMError("this LLM is closed: make a new one")
        if self._generating:
            raise LLMError("another iterator of this LLM is unfinished: exhaust or close it first")
        self._generating = True
        try:
            if self._engine is None:
                follow(self._world, self._follower)
                yield from self._world.broadcast()
            else:
                yield from self._lead(self._engine, requests)
        finally:
            self._generating = False

    def _lead(self, engine: Engine | Coordinator, requests: Iterator[Request]) -> Iterator[RequestOutput]:
        sent: list[RequestOutput] = []
        try:
            # The other ranks of a world wait for this one: an error here ends them too.
            with self._closing_on_error() if self._world.size > 1 else ExitStack():
                for output in self._steps(engine, requests):
                    if self._world.size > 1:
                        sent.append(output)
                    yield output
        finally:
            engine.cancel([sequence.id for sequence in engine.sequences()])
            engine.stop()
            self._world.broadcast(sent)

    def _steps(self, engine: Engine | Coordinator, requests: Iterator[Request]) -> Iterator[RequestOutput]:
        """Feeds the engine a wave ahead until there are no more requests, and yields what is complete."""
        waiting: dict[int, tuple[Request, list[Sequence]]] = {}
        more = True
        while more or engine.pending:
            while more and engine.backlog < self._wave:
                item = next(requests, None)
                if item is None:
                    more = False
                    break
                try:
                    sequences = self._tokenizer.sequences(item)
                except InvalidRequest as error:
                    yield failed(item, str(error))
                    continue
                waiting[item.index] = (item, [])
                for sequence in sequences:
                    engine.add(sequence)
            for sequence in engine.step():
                item, samples = waiting[sequence.request]
                samples.append(sequence)
                if len(samples) == item.body.samples:
                    del waiting[sequence.request]
                    yield assembled(item, samples, self._detokenizer, self._end_of_sequence)

    def _numbered(self, url: str, bodies: Iterator[dict[str, Any]]) -> Iterator[Request]:
        """Requests with numbers that rise over all calls, so that each has random numbers of its own."""
        for index, body in enumerate(bodies):
            self._requests += 1
            yield request(self._requests - 1, url, body, index)


def _close_with_error(closing: ExitStack) -> None:
    """Closes as a `with` block would that an uncaught error has left: it ends the other ranks."""
    error: BaseException | None = getattr(sys, "last_value", None)
    if error is None:
        closing.close()
    else:
        closing.__exit__(type(error), error, error.__traceback__)


def _is_failure(kind: type[BaseException] | None) -> bool:
    """Leaving a loop over an iterator early is none."""
    return kind is not None and not issubclass(kind, GeneratorExit)


def _chat_fields(
    add_generation_prompt: bool, tools: list[dict[str, Any]] | None, chat_template_kwargs: Mapping[str, Any] | None
) -> dict[str, Any]:
    options = dict(chat_template_kwargs or {})
    if not add_generation_prompt:
        options["add_generation_prompt"] = False
    return {"tools": tools, "chat_template_kwargs": options or None}


def _dtype(dtype: str | torch.dtype) -> torch.dtype | None:
    if isinstance(dtype, torch.dtype):
        return dtype
    if dtype == "auto":
        return None
    found = getattr(torch, dtype, None)
    if not isinstance(found, torch.dtype):
        raise LLMError(f"dtype {dtype!r} is none of torch: use 'auto', 'bfloat16', 'float16' or 'float32'")
    return found


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
