"""Batches by OpenVINO GenAI's continuous batching, in its own environment; prints a line of JSON for each.

    PEER_ENV/bin/optimum-cli export openvino -m MODEL_DIR --task text-generation-with-past --weight-format fp16 \
        MODEL_DIR-openvino
    PEER_ENV/bin/python peer_openvino.py MODEL_DIR THREADS REQUESTS.jsonl ...

`PEER_ENV`: a virtual environment with openvino-genai, optimum-intel[openvino] and psutil.
"""

import sys

from peer_clock import Clock, requests_of

SEQUENCES = 256

if __name__ == "__main__":
    clock = Clock()
    model, threads, files = sys.argv[1], int(sys.argv[2]), sys.argv[3:]
    import openvino_genai

    scheduler = openvino_genai.SchedulerConfig()
    scheduler.cache_size, scheduler.max_num_seqs, scheduler.dynamic_split_fuse = 6, SEQUENCES, True
    scheduler.max_num_batched_tokens = 4096
    settings = {"INFERENCE_NUM_THREADS": threads, "PERFORMANCE_HINT": "THROUGHPUT", "NUM_STREAMS": 1}
    engine = openvino_genai.ContinuousBatchingPipeline(f"{model}-openvino", scheduler, "CPU", settings)
    tokenizer = engine.get_tokenizer()

    def parameters(tokens: int):  # type: ignore[no-untyped-def]
        config = openvino_genai.GenerationConfig()
        config.max_new_tokens = config.min_new_tokens = tokens
        config.ignore_eos, config.do_sample, config.apply_chat_template = True, False, False
        return config

    engine.generate([requests_of(files[0])[0]["prompt"]], [parameters(1)])
    clock.loaded()
    for file in files:
        requests = requests_of(file)
        clock.start()
        outputs = engine.generate([r["prompt"] for r in requests], [parameters(r["max_tokens"]) for r in requests])
        assert len(outputs) == len(requests)
        clock.done(
            sum(tokenizer.encode(r["prompt"]).input_ids.shape[1] for r in requests),
            sum(r["max_tokens"] for r in requests),  # it returns texts, not tokens: what was asked for
        )
