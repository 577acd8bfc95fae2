"""The model `hpcgen` of the LM evaluation harness; importing this module registers it.

The harness has no way to find models of other packages by itself: see `commands` and `registration`.
Tokenization, truncation and windows are those of the harness' own `hf` model, so that results are equal.
"""

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.models.utils import handle_stop_sequences, has_bos_prefix, normalize_gen_kwargs
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from hpcgen.api import LLM, SamplingParams
from hpcgen.api.outputs import RequestOutput
from hpcgen.errors import HpcgenError
from hpcgen.model.architecture import context_length, read_config

_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "seed", "repetition_penalty", "min_tokens", "ignore_eos")
"""Generation options of tasks that the engine has too, by the same names."""


class EvaluationError(HpcgenError):
    """A task asks for what the engine cannot do."""


@register_model("hpcgen")
class HpcgenLM(TemplateLM):
    """Scores and completes all requests of a task as one batch.

    Args:
        model: Hugging Face model directory; `pretrained` is another name for it.
        dtype: "auto", "float32", "bfloat16" or "float16".
        max_length: longest text that is scored, in tokens; by default the model's context without the two tokens that
            the engine adds to a text of `max_length` (the one before its first, and the one that is generated).
        max_gen_toks: tokens to generate where a task does not say.
        add_bos_token: whether texts begin with the BOS token; None: as the tokenizer does.
        batch_size, max_batch_size: of the harness, without influence: the engine fills its batches itself.
        engine: further arguments of `hpcgen.LLM`.
    """

    def __init__(
        self,
        model: str | None = None,
        *,
        pretrained: str | None = None,
        dtype: str = "auto",
        max_length: int | None = None,
        max_gen_toks: int = 256,
        add_bos_token: bool | None = None,
        device: str | None = None,
        batch_size: Any = None,
        max_batch_size: Any = None,
        **engine: Any,
    ) -> None:
        super().__init__()
        directory = model or pretrained
        if directory is None:
            raise EvaluationError("no model is given: add --model_args model=DIR")
        context = context_length(read_config(Path(directory))[1])
        self.max_length = max_length or context - 2
        self.max_gen_toks = max_gen_toks
        self._add_bos_token = add_bos_token
        longest = min(context, self.max_length + 2)
        # The harness names a CUDA device wherever the user names none; its `hf` model then falls back to the CPU too.
        if device is None or (device.startswith("cuda") and not torch.cuda.is_available()):
            device = "auto"
        self._llm = LLM(directory, dtype=dtype, device=device, max_model_len=longest, **engine)
        self.tokenizer = self._llm.get_tokenizer()
        if not self._llm.leads:
            # Under mpirun every rank has all results: one shows the table.
            sys.stdout = open(os.devnull, "w")  # noqa: SIM115

    @property
    def eot_token_id(self) -> int:
        return self.tokenizer.eos_token_id

    @property
    def prefix_token_id(self) -> int:
        bos = self.tokenizer.bos_token_id
        return self.eot_token_id if bos is None else bos

    @property
    def tokenizer_name(self) -> str:
        return self.tokenizer.name_or_path.replace("/", "__")

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        """Token ids; where the text brings its own BOS token, no second one is added."""
        if add_special_tokens is None:
            add_special_tokens = self._add_bos_token
            if has_bos_prefix(string, self.tokenizer.decode(self.prefix_token_id)):
                add_special_tokens = False
        options = {} if add_special_tokens is None else {"add_special_tokens": add_special_tokens}
        return self.tokenizer.encode(string, **options)

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        return self.tokenizer.apply_chat_template(
            chat_history,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt,
        )

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """Log-likelihood of whole texts, each token predicted once, in windows of `max_length`."""
        windows: list[tuple[Any, list[int], list[int]]] = []
        counts = []
        for request in requests:
            rolling = get_rolling_token_windows(
                token_list=self.tok_encode(request.args[0]),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length,
                context_len=1,
            )
            found = [(None, *make_disjoint_window(window)) for window in rolling]
            windows += found
            counts.append(len(found))
        scores = iter(self._loglikelihood_tokens(windows, disable_tqdm=disable_tqdm))
        totals = []
        for request, count in zip(requests, counts, strict=True):
            totals.append(sum(next(scores)[0] for _ in range(count)))
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, totals[-1])
        return totals

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        end = self.tokenizer.decode(self.eot_token_id)
        prompts, params = [], []
        for request in requests:
            context, given = request.args
            options = dict(normalize_gen_kwargs(given, self.max_gen_toks))
            stop = [text for text in handle_stop_sequences(options.pop("until", None), eos=end) if text]
            count = options.pop("max_gen_toks")
            if self.max_length - count <= 0:
                raise EvaluationError(
                    f"a task generates {count} tokens, but texts may have {self.max_length}: "
                    "give --model_args max_gen_toks=N or max_length=N"
                )
            prompts.append(self.tok_encode(context)[count - self.max_length :])
            params.append(_sampling(options, stop, count))
        texts = []
        for request, output in zip(requests, self._run(prompts, params, disable_tqdm), strict=True):
            texts.append(output.outputs[0].text)
            self.cache_hook.add_partial("generate_until", request.args, texts[-1])
        return texts

    def _loglikelihood_tokens(
        self,
        requests: Sequence[tuple[Any, list[int], list[int]]],  # type: ignore[override]
        disable_tqdm: bool = False,
        **kwargs: Any,
    ) -> list[tuple[float, bool]]:
        """(log-probability of the continuation, whether greedy decoding would give it) of each (texts, context,
        continuation)."""
        prompts, params = [], []
        for _, context, continuation in requests:
            tokens = (context + continuation)[-(self.max_length + 1) :]
            prompts.append(tokens)
            start = max(len(tokens) - len(continuation), 1)
            params.append(SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=1, prompt_logprobs_start=start))
        results = []
        for (texts, _, _), chosen, output in zip(
            requests, params, self._run(prompts, params, disable_tqdm), strict=True
        ):
            start = chosen.prompt_logprobs_start or 1
            tokens = output.prompt_token_ids[start:]
            places = (output.prompt_logprobs or [])[start:]
            scored = [(place[token], place) for token, place in zip(tokens, places, strict=True) if place is not None]
            total = sum(entry.logprob for entry, _ in scored)
            greedy = all(entry.logprob >= max(other.logprob for other in place.values()) for entry, place in scored)
            results.append((total, greedy))
            if texts is not None:
                self.cache_hook.add_partial("loglikelihood", texts, results[-1])
        return results

    def _run(self, prompts: list[list[int]], params: list[SamplingParams], quiet: bool) -> list[RequestOutput]:
        outputs = self._llm.generate(prompts, params, use_tqdm=not quiet)
        for output in outputs:
            if output.error is not None:
                raise EvaluationError(output.error)
        return outputs


def _sampling(options: dict[str, Any], stop: list[str], count: int) -> SamplingParams:
    """Greedy unless the task says `do_sample`; other options of a task must be the engine's."""
    if not options.pop("do_sample", False):
        options["temperature"] = 0.0
    unknown = sorted(options.keys() - set(_SAMPLING))
    if unknown:
        raise EvaluationError(f"the generation option {unknown[0]!r} of a task is not supported")
    return SamplingParams(max_tokens=count, stop=stop, **options)
