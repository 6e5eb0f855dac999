#!/usr/bin/env bash
# How good a separate draft model of a size is (docs/ptp.md, b): ptp_draft_sizes.sh, after the first half of ptp_loop.sh
# made the code model and its samples. Half an hour of one core; what is trained there already is not trained again.
set -euo pipefail
cd "$(dirname "$0")/../.."
export PATH="$PWD/.venv/bin:$PATH"

while read -r name hidden layers heads intermediate; do
    sevenleague train configs/ptp/code_draft.yaml --output "out/ptp/code-$name" --json "out/ptp/code_$name.json" \
        --set "base.pretrain.shape.hidden=$hidden" --set "base.pretrain.shape.layers=$layers" \
        --set "base.pretrain.shape.heads=$heads" --set "base.pretrain.shape.intermediate=$intermediate" < /dev/null
    sevenleague bench --model out/ptp/code/base --prompts out/ptp/corpus/bench.parquet --limit 24 --max-tokens 128 \
        --batch 1 --rounds 3 --dtype bfloat16 --temperature 0.7 --coupling inverse_cdf \
        --contestants autoregressive,ptp --set "decoding.adapter=out/ptp/code-$name/o/adapter" \
        --set "decoding.model=out/ptp/code-$name/base" --json "out/ptp/bench-$name.json" < /dev/null
done <<'SHAPES'
tiny 32 3 2 96
small 64 4 2 176
medium 128 6 4 352
SHAPES
