"""Slurm: whether it answers, and how it stops and requeues jobs."""

from collections.abc import Callable, Mapping

from hpcgen.jobs import slurm
from hpcgen.jobs.doctor.check import Check, Level

_ASK = "no job can be submitted from here now: `scontrol ping` must say that the controller is UP; ask your site"


def slurm_checks(
    client: Callable[..., str] = slurm.client, available: Callable[[], bool] = slurm.available
) -> list[Check]:
    """Whether Slurm answers, and tells jobs before it stops them."""
    if not available():
        return [Check("Slurm", Level.SKIPPED, "no sbatch and scontrol on this machine")]
    try:
        answer = client("scontrol", "ping")
        configuration = client("scontrol", "show", "config")
        partitions = client("scontrol", "--oneliner", "show", "partition")
    except slurm.SlurmError as error:
        return [Check("Slurm", Level.WARNING, str(error).splitlines()[-1], _ASK)]
    up = " is UP" in answer
    found = [
        Check("Slurm", Level.OK, "the controller answers")
        if up
        else Check("Slurm", Level.WARNING, answer.strip(), _ASK)
    ]
    settings = _settings(configuration)
    return [*found, *slurm_configuration(settings), *grace(settings, partitions)]


def slurm_configuration(settings: Mapping[str, str]) -> list[Check]:
    """What Slurm's configuration says of preemption and requeueing."""
    found = []
    if settings.get("PreemptMode", "OFF") == "OFF":
        found.append(Check("preemption", Level.OK, "jobs are not preempted"))
    elif "preempt_send_user_signal" in settings.get("SlurmctldParameters", ""):
        found.append(Check("preemption", Level.OK, "the stop signal comes before the grace time ends"))
    else:
        remedy = (
            "only SIGTERM announces it; hpcgen handles that, but the GraceTime of the partition is then all the "
            "time for a checkpoint. Better: SlurmctldParameters=preempt_send_user_signal"
        )
        found.append(Check("preemption", Level.WARNING, "jobs are preempted without the user's signal", remedy))
    if settings.get("JobRequeue", "1") == "0":
        remedy = "stopped jobs stay stopped: continue them with hpcgen resume RUN_DIR, or ask for JobRequeue=1"
        found.append(Check("requeue", Level.WARNING, "jobs are not requeued unless they ask", remedy))
    wait = settings.get("KillWait", "").split()
    if wait and wait[0].isdigit() and int(wait[0]) < 10:
        remedy = "ask your site for 30 s or more, or submit with a larger --signal-seconds"
        found.append(Check("KillWait", Level.WARNING, f"{wait[0]} s from the end of a job to its kill", remedy))
    return found


def grace(settings: Mapping[str, str], partitions: str) -> list[Check]:
    """The time that a preempted job has, partition by partition.

    Args:
        partitions: lines of `scontrol --oneliner show partition`.
    """
    if settings.get("PreemptMode", "OFF") == "OFF":
        return []
    short = []
    for line in partitions.splitlines():
        fields = dict(pair.partition("=")[::2] for pair in line.split())
        if fields.get("PreemptMode", "OFF") != "OFF" and fields.get("GraceTime") == "0":
            short.append(fields.get("PartitionName", "?"))
    if not short:
        return [Check("grace", Level.OK, "partitions whose jobs are preempted have a GraceTime")]
    remedy = (
        "tokens are saved first, so little is lost; KV as far as KillWait allows. Ask your site for a GraceTime of a "
        "minute or more, or checkpoint more often (--checkpoint-interval)"
    )
    return [Check("grace", Level.WARNING, f"GraceTime is 0 in {', '.join(short)}", remedy)]


def _settings(text: str) -> dict[str, str]:
    """Lines `Name = value` of `scontrol show config`."""
    pairs = (line.partition("=") for line in text.splitlines() if "=" in line)
    return {name.strip(): value.strip() for name, _, value in pairs}
