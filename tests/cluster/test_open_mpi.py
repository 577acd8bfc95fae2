"""The same ranks under Open MPI, whose wheel is installed in an environment that the tests make."""

import re
from pathlib import Path

import pytest
import torch

from tests.caches import own_cache
from tests.cluster.launching import OpenMPI
from tests.model.tiny_models import save_tiny
from tests.tiny_tokenizer import save_tokenizer

pytestmark = pytest.mark.xdist_group("ranks")


def test_tokens_are_those_of_one_process(open_mpi: OpenMPI, tmp_path: Path) -> None:
    model = tmp_path / "deepseek_v3"
    save_tiny(model.name, model, torch.float32)
    save_tokenizer(model)
    cache = {"HPCGEN_CACHE": own_cache(tmp_path / "cache")}
    output = open_mpi.run_program("tokens", (2, 1), "together,partition", str(model), **cache)
    assert output.count("same") == 2


def test_sequences_cross_in_both_directions_and_no_byte_is_wrong(open_mpi: OpenMPI) -> None:
    output = open_mpi.run_program("storm", (1, 1), "60", "15")
    arrived = [int(count) for count in re.findall(r": (\d+) sequences arrived", output)]
    assert len(arrived) == 2 and sum(arrived) > 800


def test_a_migrate_from_a_stopped_node_is_given_up_and_those_of_others_go_on(open_mpi: OpenMPI) -> None:
    assert "nothing lost" in open_mpi.run_program("stopped_peer", (1, 1, 1))


def test_experts_spread_over_ranks_give_what_one_rank_computes(open_mpi: OpenMPI) -> None:
    assert "same" in open_mpi.run_program("dispatch", (3,))
