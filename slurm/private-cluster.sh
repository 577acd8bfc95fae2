#!/usr/bin/env bash
# A real Slurm cluster of several nodes on this one machine, as any user, without systemd: for tests.
#
#   private-cluster.sh up | down | status | environment
#   private-cluster.sh fail NODE       kill a node's daemon and everything that runs on it, as a power cut would
#   private-cluster.sh recover NODE    start the node's daemon again
#
# Settings, from the environment:
#   CLUSTER_ROOT        directory of all its files          (default /tmp/hpcgen-cluster-$UID)
#   CLUSTER_NODES       nodes n1, n2, ...                   (default 3)
#   CLUSTER_CPUS        CPUs that each node claims to have  (default 4)
#   CLUSTER_PORT        first of NODES + 1 TCP ports        (default 16900)
#   CLUSTER_GRACE       GraceTime of partition `low`, s     (default 5)
#   CLUSTER_USER_SIGNAL 1: preemption sends the user signal of sbatch --signal; 0: SIGTERM alone   (default 1)
#
# Jobs in partition `high` preempt those in `low`, which are requeued. Needs the packages (Debian, Ubuntu):
#   apt-get install --no-install-recommends slurmctld slurmd slurm-client slurm-wlm-basic-plugins
set -euo pipefail

root=${CLUSTER_ROOT:-/tmp/hpcgen-cluster-$UID}
nodes=${CLUSTER_NODES:-3}
cpus=${CLUSTER_CPUS:-4}
port=${CLUSTER_PORT:-16900}
grace=${CLUSTER_GRACE:-5}
export SLURM_CONF=$root/slurm.conf
PATH=$PATH:/usr/sbin:/sbin

write_configuration() {
  mkdir -p "$root"/{run,log,state,spool}
  local user host parameters=
  user=$(id -un) host=$(hostname -s)
  if [ "${CLUSTER_USER_SIGNAL:-1}" = 1 ]; then parameters=SlurmctldParameters=preempt_send_user_signal; fi
  cat > "$SLURM_CONF" <<CONF
ClusterName=private
SlurmctldHost=$host(127.0.0.1)
SlurmctldPort=$port
SlurmUser=$user
SlurmdUser=$user
# No munge: whoever reaches the port may submit. Credentials that expire soon let a requeued job start soon.
AuthType=auth/none
CredType=cred/none
AuthInfo=cred_expire=5
SlurmctldPidFile=$root/run/slurmctld.pid
SlurmdPidFile=$root/run/%n.pid
SlurmctldLogFile=$root/log/slurmctld.log
SlurmdLogFile=$root/log/%n.log
StateSaveLocation=$root/state
SlurmdSpoolDir=$root/spool/%n
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SwitchType=switch/none
MpiDefault=pmi2
MailProg=/bin/true
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerType=sched/backfill
SchedulerParameters=bf_interval=1,bf_resolution=1,sched_interval=1,sched_min_interval=0,batch_sched_delay=0
PriorityType=priority/basic
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
$parameters
JobRequeue=1
ReturnToService=2
SlurmdParameters=config_overrides
SlurmctldTimeout=10
SlurmdTimeout=5
KillWait=2
MinJobAge=300
MessageTimeout=5
TCPTimeout=2
BatchStartTimeout=10
UnkillableStepTimeout=10
NodeName=n[1-$nodes] NodeHostname=$host NodeAddr=127.0.0.1 Port=[$((port + 1))-$((port + nodes))] CPUs=$cpus RealMemory=4000 State=UNKNOWN
PartitionName=low Nodes=ALL Default=YES MaxTime=60 PriorityTier=1 PreemptMode=REQUEUE GraceTime=$grace
PartitionName=high Nodes=ALL MaxTime=60 PriorityTier=10 PreemptMode=OFF
CONF
  echo CgroupPlugin=cgroup/v1 > "$root/cgroup.conf"
  local i
  for i in $(seq 1 "$nodes"); do mkdir -p "$root/spool/n$i"; done
}

up() {
  write_configuration
  slurmctld -c
  local i
  for i in $(seq 1 "$nodes"); do slurmd -N "n$i"; done
  for _ in $(seq 1 150); do
    if [ "$(timeout 5 sinfo --noheader --Node --partition low --states idle | wc -l)" -ge "$nodes" ]; then
      echo "up: export SLURM_CONF=$SLURM_CONF"
      return
    fi
    sleep 0.1
  done
  echo "the nodes did not come up; see $root/log" >&2
  tail -n 5 "$root/log/slurmctld.log" >&2
  exit 1
}

down() {
  [ -f "$SLURM_CONF" ] || return 0
  # Jobs first: they outlive the daemons.
  timeout 5 scancel --hurry --user "$(id -un)" 2>/dev/null || true
  for _ in $(seq 1 60); do
    [ -n "$(timeout 5 squeue --noheader --format %i 2>/dev/null)" ] || break
    sleep 0.1
  done
  local file pid pids=()
  for file in "$root"/run/*.pid; do
    if [ -f "$file" ] && pid=$(cat "$file") && kill -TERM "$pid" 2>/dev/null; then pids+=("$pid"); fi
  done
  for _ in $(seq 1 100); do
    kill -0 "${pids[@]}" 2>/dev/null || break
    sleep 0.1
  done
  kill -KILL "${pids[@]}" 2>/dev/null || true
}

# Processes of the node's jobs, found by their environment, and the slurmstepd above each.
processes_on() {
  local directory environment parent
  for directory in /proc/[0-9]*; do
    environment=$({ tr '\0' '\n' < "$directory/environ"; } 2>/dev/null) || continue
    grep -qx "SLURMD_NODENAME=$1" <<< "$environment" || continue
    grep -qx "SLURM_CONF=$SLURM_CONF" <<< "$environment" || continue
    echo "${directory#/proc/}"
    parent=$(awk '/^PPid:/ { print $2 }' "$directory/status" 2>/dev/null) || continue
    case $({ tr '\0' ' ' < "/proc/$parent/cmdline"; } 2>/dev/null) in slurmstepd:*) echo "$parent" ;; esac
  done
}

fail() {
  kill -KILL "$(cat "$root/run/$1.pid")"
  local pids
  mapfile -t pids < <(processes_on "$1" | sort -u)
  [ ${#pids[@]} = 0 ] || kill -KILL "${pids[@]}" 2>/dev/null || true
}

case ${1:-} in
  up) up ;;
  down) down ;;
  status) timeout 5 sinfo --Node --long && timeout 5 squeue ;;
  environment) echo "export SLURM_CONF=$SLURM_CONF" ;;
  fail) fail "$2" ;;
  recover) slurmd -N "$2" ;;
  *) sed -n '2,/^set/{/^set/!p}' "$0" | sed 's/^# \{0,1\}//' >&2; exit 2 ;;
esac
