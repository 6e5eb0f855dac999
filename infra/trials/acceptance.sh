#!/usr/bin/env bash
# Tokens per step of each strategy on 48 Spec-Bench prompts (8 a task), greedy, one sequence at a time.
# usage: acceptance.sh SPEC_BENCH.parquet OUTPUT_FOLDER [STRATEGY ..]
set -euo pipefail
spec=$1 out=$2
shift 2
chosen=${*:-lookahead suffix recycling auto}
here=$(dirname "$0")
bin=$here/../../.venv/bin
mkdir -p "$out"
"$bin/python" "$here/pick_prompts.py" "$spec" 8 "$out/prompts.parquet"

run() {
    local name=$1 decoding=$2
    "$bin/sevenleague" run "$here/acceptance.yaml" --input "$out/prompts.parquet" --output "$out/$name" \
        --set "decoding=$decoding" 2> "$out/$name.log" > /dev/null
    "$bin/python" - "$name" "$("$bin/sevenleague" status "$out/$name" --json)" << 'PYTHON'
import json, sys
name, status = sys.argv[1], json.loads(sys.argv[2])
print(f"{name:22} rows {status['rows']['ok']:3}  tokens per step {status['mean_acceptance_length']:.3f}")
PYTHON
}

declare -A decoding=(
    [lookahead]="{strategy: lookahead, width: 5, ngram: 4, candidates: 5, min_window: 15, max_window: 15}"
    [suffix]="{strategy: suffix}"
    [recycling]="{strategy: recycling, min_window: 15, max_window: 15}"
    [auto]="{strategy: auto}"
)
for name in $chosen; do
    run "$name" "${decoding[$name]}"
    "$bin/sevenleague" status "$out/$name" --by task
    "$bin/python" "$here/check_metrics.py" "$out/$name"
done
