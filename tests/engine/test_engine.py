"""The engine end to end on tiny models: its tokens are those of transformers, whatever the memory."""

from pathlib import Path

import pytest
import torch

from hpcgen.coroutine.call import ModuleCall, Stage
from hpcgen.coroutine.hub import Primitives
from hpcgen.engine.build import build_engine
from hpcgen.errors import HpcgenError
from hpcgen.model.causal import CausalModel
from hpcgen.sequence import Status
from tests.engine.running import OPTIONS, Memory, TinyModel, prompts, run, sequences, tokens
from tests.model.tiny_models import TINY

PROMPTS = prompts((5, 70, 33, 130, 1, 64, 65))


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, TinyModel]:
    """Made when first asked for, once for all tests."""
    directory: Path = tmp_path_factory.mktemp("models")

    class Models(dict):
        def __missing__(self, name: str) -> TinyModel:
            self[name] = TinyModel(name, directory)
            self[name].expected = [self[name].greedy(prompt, 12) for prompt in PROMPTS]
            return self[name]

    return Models()


@pytest.mark.parametrize("name", TINY)
def test_greedy_tokens_are_those_of_transformers(models: dict[str, TinyModel], name: str) -> None:
    batch = sequences(PROMPTS)
    run(models[name].assemble(), batch)
    assert tokens(batch) == models[name].expected


@pytest.mark.parametrize("name", ["llama_tied", "qwen3_moe", "deepseek_v3", "gpt_oss"])
@pytest.mark.parametrize("memory", ["resident", "streamed parameters", "streamed parameters and KV"])
def test_a_small_device_streams_and_the_tokens_stay_the_same(
    models: dict[str, TinyModel], name: str, memory: Memory
) -> None:
    assembly, batch = models[name].assemble(memory), sequences(PROMPTS)
    run(assembly, batch)
    assert tokens(batch) == models[name].expected
    assert assembly.budget.limit is not None and assembly.budget.peak <= assembly.budget.limit
    streamed = getattr(assembly.device.parameters, "copied_bytes", 0)
    assert (streamed > 0) == memory.startswith("streamed")


SHORT = prompts((5, 9, 30, 2, 60, 11))
LONGER = prompts((30, 35, 40, 25, 38, 33) * 3)


def test_device_pressure_suspends_sequences_and_resumes_them(models: dict[str, TinyModel]) -> None:
    growing, roomy = sequences(LONGER, max_tokens=130), sequences(LONGER, max_tokens=130)
    page_bytes = models["llama"].assemble().model.kv_layout.page_bytes
    assembly = models["llama"].assemble("streamed parameters", spare=20 * page_bytes, decision_steps=20)
    run(assembly, growing)
    run(models["llama"].assemble(), roomy)
    assert tokens(growing) == tokens(roomy)
    assert assembly.engine.activity.suspended > 0


def test_host_pressure_discards_kv_which_is_computed_again(models: dict[str, TinyModel]) -> None:
    growing, roomy = sequences(SHORT, max_tokens=100), sequences(SHORT, max_tokens=100)
    page_bytes = models["llama"].assemble().model.kv_layout.page_bytes
    assembly = models["llama"].assemble(host_memory=7 * page_bytes, decision_steps=20)
    run(assembly, growing)
    run(models["llama"].assemble(), roomy)
    assert tokens(growing) == tokens(roomy)
    assert assembly.engine.activity.discarded > 0


def test_a_sequence_that_can_never_fit_fails_alone_and_says_what_to_raise(models: dict[str, TinyModel]) -> None:
    page = models["llama"].assemble().model.kv_layout.page_bytes
    batch = sequences([PROMPTS[0], PROMPTS[3], PROMPTS[2]], max_tokens=60)
    run(models["llama"].assemble(host_memory=2 * page), batch)
    assert [s.status for s in batch] == [Status.FINISHED, Status.FAILED, Status.FINISHED]
    assert batch[1].error is not None and "--host-memory" in batch[1].error


def test_the_same_run_twice_draws_the_same_tokens_and_so_does_each_sequence_alone(
    models: dict[str, TinyModel],
) -> None:
    first, second = (sequences(PROMPTS, temperature=1.0, top_p=0.95) for _ in range(2))
    run(models["qwen3"].assemble(), first)
    run(models["qwen3"].assemble(attention_microbatch=11, expert_batch=23, decision_steps=3), second)
    assert tokens(first) == tokens(second)
    for index in (0, 3):
        alone = sequences(PROMPTS, temperature=1.0, top_p=0.95)[index]
        run(models["qwen3"].assemble(), [alone])
        assert tokens([alone]) == tokens([first[index]])
    assert len(set(map(tuple, tokens(first)))) == len(PROMPTS)


def test_sequences_that_arrive_later_join_the_batch(models: dict[str, TinyModel]) -> None:
    assembly, batch = models["llama"].assemble(), sequences(PROMPTS)
    for sequence in batch[:3]:
        assembly.engine.add(sequence)
    for _ in range(2):
        assembly.engine.step()
    run(assembly, batch[3:])
    assert tokens(batch) == models["llama"].expected


def test_states_are_passed_through_in_order_and_callbacks_hear_of_them(models: dict[str, TinyModel]) -> None:
    assembly, heard = models["llama"].assemble(), []
    for status in Status:
        assembly.engine._executor.lifecycle.on(status, lambda sequence, left: heard.append((left, sequence.status)))
    run(assembly, sequences(PROMPTS[:1]))
    assert heard == [
        (Status.WAITING, Status.PREFILLING),
        (Status.PREFILLING, Status.SUSPENDED),
        (Status.SUSPENDED, Status.ACTIVE),
        (Status.ACTIVE, Status.FINISHED),
    ]


def test_a_policy_of_the_user_replaces_the_default_one(models: dict[str, TinyModel]) -> None:
    tiny, calls = models["qwen3_moe"], []

    def by_microbatch(call: ModuleCall, primitives: Primitives) -> object:
        calls.append(call.hidden.shape[-2])
        return primitives.yield_(call)

    model = CausalModel.build(tiny.directory, torch.float32, torch.device("cpu"))
    assembly = build_engine(
        model, tiny.weights, OPTIONS, lambda sequence: None, policies={Stage.EXPERTS: by_microbatch}
    )
    batch = sequences(PROMPTS)
    run(assembly, batch)
    assert tokens(batch) == tiny.expected and max(calls) <= OPTIONS.attention_microbatch


def test_a_budget_that_cannot_hold_a_layer_is_refused_before_any_work(models: dict[str, TinyModel]) -> None:
    tiny = models["llama"]
    with pytest.raises(HpcgenError, match="--device-memory"):
        tiny.assemble(device_memory=10_000)


def test_a_weight_file_of_another_model_is_refused(models: dict[str, TinyModel]) -> None:
    model = CausalModel.build(models["gpt_oss"].directory, torch.float32, torch.device("cpu"))
    with pytest.raises(HpcgenError, match="another model"):
        build_engine(model, models["llama"].weights, OPTIONS, lambda sequence: None)
