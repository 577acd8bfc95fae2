"""Chooses how tokens go to their experts: DeepEP between GPUs that have it, MPI everywhere else."""

from __future__ import annotations

from contextlib import ExitStack
from importlib import import_module
from types import ModuleType

import torch

from hpcgen.cluster.dispatch import AlltoallvDispatcher
from hpcgen.cluster.process_group import process_group
from hpcgen.cluster.world import World
from hpcgen.kernels.dispatch.deep_ep import DeepEPDispatcher
from hpcgen.kernels.dispatch.interface import Dispatcher
from hpcgen.model.causal import CausalModel


def open_dispatcher(world: World, model: CausalModel, experts: int, max_tokens: int, closing: ExitStack) -> Dispatcher:
    """For the experts of `model`, spread over all ranks. Collective; `closing` gives back what it opens.

    Args:
        max_tokens: most tokens that a rank dispatches at once.
    """
    comm = world.own_comm()
    deep_ep = _deep_ep(model)
    devices = comm.allgather(_device_of(model) if deep_ep is not None else None)
    # NCCL takes no two ranks on one GPU.
    if deep_ep is None or None in devices or len(set(devices)) < world.size:
        return AlltoallvDispatcher(comm, experts)
    config = model.config.get_text_config()
    group = closing.enter_context(process_group(comm, model.device))
    dispatcher = DeepEPDispatcher(
        deep_ep, group, experts, max_tokens, config.hidden_size, config.num_experts_per_tok, model.device
    )
    closing.callback(dispatcher.close)
    return dispatcher


def _deep_ep(model: CausalModel) -> ModuleType | None:
    """The package, where it is installed and takes the model's tokens."""
    if model.device.type != "cuda" or model.dtype is not torch.bfloat16:
        return None
    try:
        return import_module("deep_ep")
    except ImportError:
        return None


def _device_of(model: CausalModel) -> str:
    """What no other GPU is called."""
    return str(torch.cuda.get_device_properties(model.device).uuid)
