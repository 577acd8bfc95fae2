"""Sequences and their state: plain data that every other room reads."""

from hpcgen.sequence.sampling import Grammar, SamplingParams
from hpcgen.sequence.sequence import PAGE_TOKENS, Sequence, Status, TokenLogprob, pages_for

__all__ = ["PAGE_TOKENS", "Grammar", "SamplingParams", "Sequence", "Status", "TokenLogprob", "pages_for"]
