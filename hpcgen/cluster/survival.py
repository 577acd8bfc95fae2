"""How the ranks that are left go on when others are gone, where MPI lets them (ULFM).

All lay down their work, agree on who is left, and begin anew in place: host stores, weights and rank 0's books are
there; what depends on the number of ranks (owners of experts, division of devices) is made again.
"""

from collections.abc import Callable

from hpcgen.cluster.assemble import ClusterAssembly
from hpcgen.cluster.errors import ClusterError
from hpcgen.cluster.world import Regrouping, World


def go_on(world: World, assembly: ClusterAssembly, owned: Callable[[Regrouping], list[int]]) -> None:
    """Collective over the ranks that are left; every other rank may go meanwhile. Raises ClusterError, on all of them,
    where rank 0 is gone.

    Args:
        owned: pages of this rank's node that belong to a sequence, as rank 0 says after a regrouping.
    """
    watchdog = assembly.worker.watchdog
    watchdog.enter("recovery from a lost rank")
    assembly.worker.lay_down()
    while True:
        with watchdog.waiting("the other ranks that are left"):
            regrouping = world.regroup()
            if regrouping.ranks[0] != 0:
                # All of them end by themselves, and all would say so: one is enough.
                world.others_ended = True
                gone = "rank 0, which schedules, is gone: what is finished is kept, and the same command continues"
                raise ClusterError(gone if world.leads else "see the message of the first rank")
            try:
                _begin_anew(world, assembly, owned(regrouping))
                return
            except Exception as error:
                if not world.has_lost(error):
                    raise


def _begin_anew(world: World, assembly: ClusterAssembly, owned: list[int]) -> None:
    assert world.node is not None
    assembly.worker.leave_pages()
    free = assembly.pool.free
    retired = set[int]().union(*world.node.allgather(free.retired))
    if world.is_leader:
        free.keep_only(retired.union(owned))
    world.node.Barrier()
    assembly.rebuild()
