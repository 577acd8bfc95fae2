"""Greedy tokens in fp32 do not depend on how many ranks work together, nor on how."""

from pathlib import Path

import pytest
import torch

from tests.caches import own_cache
from tests.cluster.launching import needs_mpi, run_program
from tests.model.tiny_models import TINY, save_tiny
from tests.tiny_tokenizer import save_tokenizer

pytestmark = [needs_mpi, pytest.mark.xdist_group("ranks")]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("models")
    for name in TINY:
        save_tiny(name, directory / name, torch.float32)
        save_tokenizer(directory / name)
    return directory


def generate(models: Path, nodes: tuple[int, ...], ways: str, *names: str, **environment: str) -> str:
    cache = {"HPCGEN_CACHE": own_cache(models / "cache")}
    output = run_program("tokens", nodes, ways, *(str(models / name) for name in names), **cache, **environment)
    assert output.count("same") == len(names) * len(ways.split(","))
    return output


def test_every_family_on_two_ranks_gives_the_tokens_of_one_process_also_by_tensor_parallelism(models: Path) -> None:
    generate(models, (2,), "together,partition", *TINY)


def test_every_family_keeps_its_tokens_where_a_device_holds_a_ranks_own_experts_and_its_shard(models: Path) -> None:
    output = generate(models, (2,), "resident", *TINY)
    assert "not split" not in output


def test_ranks_that_do_not_divide_the_experts_and_are_short_of_memory_lose_no_page_and_no_token(models: Path) -> None:
    output = generate(models, (3,), "together,short of memory,partition,streamed", "qwen3_moe", "deepseek_v3")
    assert "not split" not in output


def test_sequences_move_between_nodes_and_keep_their_tokens(models: Path) -> None:
    output = generate(models, (1, 2), "partition,few at once", "llama", "gpt_oss", MPIR_CVAR_NOLOCAL="1")
    assert "llama: 0 migrated" not in output and "gpt_oss: 0 migrated" not in output
