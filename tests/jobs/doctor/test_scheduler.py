import pytest

from hpcgen.jobs.doctor.check import Check, Level
from hpcgen.jobs.doctor.scheduler import grace, slurm_checks, slurm_configuration
from hpcgen.jobs.slurm import SlurmError

CONFIGURATION = """Configuration data as of 2026-01-01T00:00:00
JobRequeue              = 1
KillWait                = 30 sec
PreemptMode             = REQUEUE
SlurmctldParameters     = preempt_send_user_signal,enable_configless
"""


PARTITIONS = "PartitionName=low PreemptMode=REQUEUE GraceTime=60\nPartitionName=high PreemptMode=OFF GraceTime=0\n"


def client(configuration: str = CONFIGURATION, ping: str = "Slurmctld(primary) at c1 is UP"):  # type: ignore[no-untyped-def]
    answers = {"ping": ping, "config": configuration, "partition": PARTITIONS}
    return lambda *command: answers[command[-1]]


def levels(found: list[Check]) -> dict[str, Level]:
    return {check.name: check.level for check in found}


def test_a_well_configured_cluster_has_nothing_to_mend() -> None:
    found = slurm_checks(client(), lambda: True)
    assert levels(found) == {"Slurm": Level.OK, "preemption": Level.OK, "grace": Level.OK}


def test_without_slurm_there_is_nothing_to_check() -> None:
    assert levels(slurm_checks(client(), lambda: False)) == {"Slurm": Level.SKIPPED}


def test_a_controller_that_does_not_answer_is_a_warning_of_one_line() -> None:
    def broken(*command: str) -> str:
        raise SlurmError("scontrol ping failed: a\nb\nthe last line")

    (check,) = slurm_checks(broken, lambda: True)
    assert check.level is Level.WARNING and check.finding == "the last line"


def test_a_controller_that_is_down_is_a_warning() -> None:
    assert levels(slurm_checks(client(ping="Slurmctld(primary) at c1 is DOWN"), lambda: True))["Slurm"] is Level.WARNING


@pytest.mark.parametrize(
    ("settings", "name", "level"),
    [
        ({"PreemptMode": "REQUEUE"}, "preemption", Level.WARNING),
        ({"PreemptMode": "OFF"}, "preemption", Level.OK),
        ({"JobRequeue": "0"}, "requeue", Level.WARNING),
        ({"KillWait": "5 sec"}, "KillWait", Level.WARNING),
    ],
)
def test_settings_that_cost_checkpoints_are_warnings(settings: dict[str, str], name: str, level: Level) -> None:
    assert levels(slurm_configuration(settings))[name] is level


def test_partitions_that_give_no_time_are_named() -> None:
    settings = {"PreemptMode": "REQUEUE"}
    (check,) = grace(settings, PARTITIONS.replace("GraceTime=60", "GraceTime=0"))
    assert check.level is Level.WARNING and check.finding == "GraceTime is 0 in low"
    assert grace({"PreemptMode": "OFF"}, PARTITIONS) == []
