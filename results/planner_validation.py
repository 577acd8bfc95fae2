"""Predicted against measured completion times of real batches on this machine: `python results/planner_validation.py`.

Each model is profiled once; then batches that the profile did not see are run by the engine, and simulated with the
same limits. With one thread, times are processor time of the process: other processes disturb them least. Models
are those of --model (a directory with weights) and a small random mixture of experts that the script makes.
"""

import argparse
import dataclasses
import tempfile
import time
from array import array
from pathlib import Path

import numpy as np
import torch
import transformers

from hpcgen.engine.build import Assembly, EngineOptions, build_engine, device_needs
from hpcgen.memory.device_plan import PhaseMemory
from hpcgen.memory.host_capacity import available_bytes
from hpcgen.model.causal import CausalModel
from hpcgen.model.weight_cache import cached_weight_file
from hpcgen.model.weight_file import WeightFile
from hpcgen.planner.configuration import Configuration, PhaseConfiguration, layer_bytes
from hpcgen.planner.model_shape import ModelShape
from hpcgen.planner.profile import measure, sized_as
from hpcgen.planner.profile_file import Profile
from hpcgen.planner.simulator import Simulation
from hpcgen.planner.workload import Workload, draw
from hpcgen.scheduler.plan import Phase
from hpcgen.sequence import SamplingParams, Sequence

DECISION_STEPS = 16
BUDGETS = (0.75, 0.5)
"""Device budgets, as shares of what the model and the largest batch would take."""
BUDGETED = [(64, "fixed:128", "fixed:64", 512, 1024), (96, "lognormal:100:0.5:400", "uniform:8:96", 512, 1024)]
BATCHES = [  # sequences, prompts, outputs, B_attn, B_moe
    (64, "fixed:128", "fixed:64", 1024, 4096),
    (128, "uniform:16:256", "lognormal:40:0.8:200", 1024, 4096),
    (32, "fixed:512", "fixed:16", 1024, 4096),
    (200, "fixed:32", "lognormal:30:1.0:256", 256, 1024),
    (96, "lognormal:100:0.5:400", "uniform:8:96", 512, 2048),
    (16, "fixed:64", "fixed:128", 1024, 4096),
    (256, "fixed:48", "fixed:24", 128, 128),
]


def mixture_of_experts(directory: Path) -> Path:
    """A random Qwen3-MoE of 0.2 G parameters."""
    config = transformers.Qwen3MoeConfig(
        vocab_size=8192, hidden_size=512, intermediate_size=1024, moe_intermediate_size=256, num_hidden_layers=12,
        num_attention_heads=8, num_key_value_heads=2, head_dim=64, num_experts=32, num_experts_per_tok=4,
        max_position_embeddings=4096, torch_dtype=torch.bfloat16,
    )  # fmt: skip
    transformers.Qwen3MoeForCausalLM(config).to(torch.bfloat16).save_pretrained(directory)
    return directory


def workload(count: int, prompts: str, outputs: str) -> Workload:
    return Workload.of(draw(prompts, count, 1), draw(outputs, count, 2))


def run(
    model: Path, load: Workload, microbatch: int, batch: int, host: int, threads: int, budget: float | None = None
) -> tuple[float, Assembly]:
    """Seconds of a real batch, loading excluded. `budget`: share of the model's bytes that the device has."""
    clock = time.process_time if threads == 1 else time.perf_counter
    built = CausalModel.build(model, torch.bfloat16, torch.device("cpu"))
    weights = WeightFile(cached_weight_file(model, torch.bfloat16, "packed"))
    options = EngineOptions(
        max_model_len=int((load.prompts + load.most).max()), host_memory=host, attention_microbatch=microbatch,
        expert_batch=batch, decision_steps=DECISION_STEPS, device_memory=None,
    )  # fmt: skip
    if budget is not None:
        needs = device_needs(built, weights, options)
        kv = needs.layout.page_bytes * len(load) * int(load.mean_context / 64 + 2)
        whole = sum(needs.unit_bytes.values()) + needs.decode_activations + kv
        options = dataclasses.replace(options, device_memory=int(budget * whole))
    assembly = build_engine(built, weights, options, lambda sequence: None)
    draw_tokens = np.random.default_rng(0)
    for index, (length, output) in enumerate(zip(load.prompts.tolist(), load.outputs.tolist(), strict=True)):
        prompt = array("I", draw_tokens.integers(0, built.vocabulary, length).tolist())
        sampling = SamplingParams(max_tokens=output, temperature=0.0)
        assembly.engine.add(Sequence(index, index, 0, prompt, sampling))
    begin = clock()
    while assembly.engine.pending:
        assembly.engine.step()
    seconds = clock() - begin
    assembly.device.close()
    return seconds, assembly


def phase_of(shape: ModelShape, memory: PhaseMemory, units: dict[str, int], micro: int, batch: int):
    """The engine's division of the device in the planner's terms: what is streamed, counted in layers."""
    streamed = sum(size for unit, size in units.items() if unit not in memory.resident)
    layers = min(round(streamed / layer_bytes(shape, 1)), shape.layers)
    slots = min(memory.ring_slots, layers)
    return PhaseConfiguration(micro, batch, shape.layers - layers, slots, memory.kv_bytes, memory.kv == "layers")


def predict(
    profile: Profile,
    shape: ModelShape,
    load: Workload,
    microbatch: int,
    batch: int,
    host: int,
    ran: Assembly,
    units: dict[str, int],
) -> float:
    layers, micro = shape.layers, min(microbatch, batch)
    prefill = decode = PhaseConfiguration(micro, batch, layers, 0)
    costs = profile.costs(shape)
    if ran.phases is not None:
        costs = dataclasses.replace(costs, streamed=True, copies_compute=True)
        prefill = phase_of(shape, ran.phases[Phase.PREFILL], units, micro, batch)
        decode = phase_of(shape, ran.phases[Phase.DECODE], units, micro, batch)
    configuration = Configuration(
        ranks=1,
        ranks_per_node=1,
        prefill=prefill,
        decode=decode,
        host_pages=int(host // (64 * shape.kv_token_bytes)),
        in_place=ran.phases is None,
    )
    return Simulation(costs, configuration, load, decision_steps=DECISION_STEPS).run().seconds


def described(ran: Assembly) -> str:
    if ran.phases is None:
        return "in place"
    decode = ran.phases[Phase.DECODE]
    assert ran.budget.limit is not None
    return f"{ran.budget.limit / 2**20:,.0f} MiB: {len(decode.resident)} units resident, KV in {decode.kv}"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    host = min(available_bytes() // 4, 2 << 30)
    errors = []
    print("| model | sequences | prompts | outputs | B_attn | B_moe | device | predicted, s | measured, s | error |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as temporary:
        for model in (args.model, mixture_of_experts(Path(temporary))):
            profile = measure(model, dtype="bfloat16")
            shape = sized_as(ModelShape.read(model), torch.bfloat16)
            stored = WeightFile(cached_weight_file(model, torch.bfloat16, "packed"))
            units = {unit: stop - start for unit in stored.units for start, stop in [stored.unit_range(unit)]}
            name = model.name if model == args.model else "random Qwen3-MoE, 0.2 G"
            runs = [(*one, None) for one in BATCHES] + [(*one, share) for one in BUDGETED for share in BUDGETS]
            for count, prompts, outputs, microbatch, batch, budget in runs:
                load = workload(count, prompts, outputs)
                measured, ran = run(model, load, microbatch, batch, host, args.threads, budget)
                predicted = predict(profile, shape, load, microbatch, batch, host, ran, units)
                error = predicted / measured - 1
                errors.append(abs(error))
                print(
                    f"| {name} | {count} | {prompts} | {outputs} | {microbatch} | {batch} | {described(ran)} "
                    f"| {predicted:.2f} | {measured:.2f} | {error:+.1%} |",
                    flush=True,
                )
    print(f"\n{len(errors)} runs: median error {np.median(errors):.1%}, worst {max(errors):.1%}")


if __name__ == "__main__":
    main()
