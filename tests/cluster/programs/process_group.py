"""A process group of the ranks: sums over it, and DeepEP's place in the choice of a dispatcher."""

from contextlib import ExitStack
from types import SimpleNamespace

import torch
from torch import distributed

from hpcgen.cluster.open_dispatcher import open_dispatcher
from hpcgen.cluster.process_group import process_group
from hpcgen.cluster.world import open_world


def main() -> None:
    with open_world() as world:
        assert world.comm is not None
        for _ in range(2):  # a second one, for whoever runs two engines one after the other
            with process_group(world.comm, torch.device("cpu")) as group:
                assert (group.rank(), group.size()) == (world.rank, world.size)
                total = torch.tensor([float(world.rank)])
                distributed.all_reduce(total, group=group)
                assert total.item() == sum(range(world.size))
        on_cpu = SimpleNamespace(device=torch.device("cpu"), dtype=torch.bfloat16)
        with ExitStack() as closing:
            assert open_dispatcher(world, on_cpu, 5, 8, closing).name == "alltoallv"  # type: ignore[arg-type]
        if world.leads:
            print("same")


if __name__ == "__main__":
    main()
