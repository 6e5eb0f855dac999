#!/usr/bin/env bash
#SBATCH --job-name=sevenleague
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
#SBATCH --gpus-per-node=8
#SBATCH --time=24:00:00
#SBATCH --signal=B:TERM@180
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=sevenleague-%j.log
# One job on a Ray cluster of the nodes that Slurm gives. Before the time is up Slurm sends a SIGTERM: the driver commits
# what is finished, and the job is put into the queue again, where it resumes.
# usage: sbatch [OPTIONS] infra/slurm/run.sh JOB.yaml [--set KEY=VALUE ..]     (with sevenleague's environment active)
set -uo pipefail
port=${RAY_PORT:-6379}
here=${SEVENLEAGUE_INFRA:-${SLURM_SUBMIT_DIR:-.}/infra} # Slurm runs a copy of this file, elsewhere
export RAY_USAGE_STATS_ENABLED=0

mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
address=${nodes[0]}:$port
on() { # on NODE COMMAND..
    local node=$1
    shift
    srun --overlap --nodes=1 --ntasks=1 --nodelist="$node" "$@"
}
# The first node is this one. What it starts in the background ends with the job.
on "${nodes[0]}" ray start --block --head --port="$port" --dashboard-host=127.0.0.1 --metrics-export-port=8080 &
for node in "${nodes[@]:1}"; do
    on "$node" ray start --block --address="$address" --metrics-export-port=8080 &
done

python "$here/ray/wait_for_nodes.py" "$address" "${#nodes[@]}" || exit 1
sevenleague run "$@" --set "cluster.address=$address" &
driver=$!
trap 'kill -TERM $driver' TERM
wait "$driver"
code=$?
if ((code > 128)) && kill -0 "$driver" 2> /dev/null; then # the trap ended the first wait; the driver drains
    wait "$driver"
    code=$?
fi
if ((code == 4)); then # interrupted: there is more to do
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
