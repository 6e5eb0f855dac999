#!/usr/bin/env bash
# Takes a Ray node out of a cluster in order, before its machine goes: nothing new is scheduled here, the generation
# workers get a SIGTERM and finish what they hold, then Ray stops. A worker ends within `cluster.grace_s` of its job and
# 16 seconds, mostly sooner; WAIT_S seconds are waited for it.
# usage: drain.sh [WAIT_S=46]
set -uo pipefail
wait_s=${1:-46}
worker='^ray::GenerationWorker' # the title that Ray gives to the process of an actor

node=$(pgrep -af raylet/raylet | grep -oE -m1 -- '--node[_-]id=[0-9a-f]+' | head -n1 | cut -d= -f2)
if [ -n "$node" ]; then
    ray drain-node --node-id "$node" --reason DRAIN_NODE_REASON_PREEMPTION --reason-message "the machine goes" \
        --deadline-remaining-seconds "$wait_s" || echo "Ray did not accept that its node drains" >&2
fi
pkill -TERM -f "$worker"
deadline=$((SECONDS + wait_s + 1)) # SECONDS counts whole ones
while ((SECONDS < deadline)) && pgrep -f "$worker" > /dev/null; do
    sleep 0.2
done
ray stop --grace-period 5
