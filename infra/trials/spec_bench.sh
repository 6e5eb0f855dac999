#!/usr/bin/env bash
# All 480 prompts of Spec-Bench, 64 new tokens, strategy auto, two workers, greedy and at temperature 0.7; then 32 samples
# of each are decoded again, one at a time without drafts.
# usage: spec_bench.sh SPEC_BENCH.parquet OUTPUT_FOLDER
set -euo pipefail
spec=$1 out=$2
here=$(dirname "$0")
bin=$here/../../.venv/bin
mkdir -p "$out"
for temperature in 0 0.7; do
    folder=$out/t$temperature
    echo "temperature $temperature"
    "$bin/sevenleague" run "$here/spec_bench.yaml" --input "$spec" --output "$folder" --temperature "$temperature" \
        2> "$folder.log"
    "$bin/sevenleague" status "$folder" --json
    "$bin/sevenleague" status "$folder" --by task
    "$bin/python" "$here/check_metrics.py" "$folder"
    "$bin/python" "$here/check_prompts.py" "$spec" "$folder"
    "$bin/sevenleague" verify "$folder" --samples 32 --json
done
