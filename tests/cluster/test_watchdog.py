from hpcgen.cluster.watchdog import PATIENCE_OF_WAITERS, Watchdog
from hpcgen.cluster.world import World


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_silence_longer_than_the_timeout_names_the_rank_and_the_phase() -> None:
    clock = Clock()
    watchdog = Watchdog(World(rank=0, hosts=("node7",)), 10.0, clock)
    watchdog.enter("decode")
    clock.now = 9.0
    assert watchdog.stalled is None
    watchdog.enter("decode")
    clock.now = 18.0
    assert watchdog.stalled is None, "progress was made at 9 s"
    clock.now = 20.0
    assert "rank 0 of 1 on node7 is stuck in decode" in watchdog.stalled


def test_who_waits_for_others_lets_them_speak_first() -> None:
    clock = Clock()
    watchdog = Watchdog(World(), 10.0, clock)
    watchdog.enter("decode")
    with watchdog.waiting("the experts of other ranks"):
        clock.now = 10.0 + PATIENCE_OF_WAITERS - 1
        assert watchdog.stalled is None
        clock.now += 1
        assert "waited 20 s in decode for the experts of other ranks" in watchdog.stalled
    assert watchdog.stalled is None


def test_without_a_timeout_nothing_ends() -> None:
    clock = Clock()
    watchdog = Watchdog(World(), None, clock)
    clock.now = 1e9
    assert watchdog.stalled is None
