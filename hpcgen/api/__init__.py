"""The Python API: an engine in this process, under mpirun, or as a job; names are those of vLLM's offline inference."""

from hpcgen.api.llm import LLM
from hpcgen.api.outputs import CompletionOutput, Logprob, RequestOutput
from hpcgen.api.prompts import PromptError
from hpcgen.api.sampling_params import SamplingParams
from hpcgen.api.submission import SubmittedRun, submit, submit_chat

__all__ = [
    "LLM",
    "CompletionOutput",
    "Logprob",
    "PromptError",
    "RequestOutput",
    "SamplingParams",
    "SubmittedRun",
    "submit",
    "submit_chat",
]
