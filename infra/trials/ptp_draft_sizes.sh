#!/usr/bin/env bash
# How good a separate draft model of a size is (docs/ptp.md, b): ptp_draft_sizes.sh, after the first half of ptp_loop.sh
# made the code model and its samples. Half an hour on two cores; what is done there already is not done again.
set -euo pipefail
cd "$(dirname "$0")/../.."
export PATH="$PWD/.venv/bin:$PATH"

while read -r name hidden layers heads intermediate; do
    sevenleague train configs/ptp/code_draft.yaml --output "out/ptp/code-$name" --json "out/ptp/code_$name.json" \
        --set "base.pretrain.shape.hidden=$hidden" --set "base.pretrain.shape.layers=$layers" \
        --set "base.pretrain.shape.heads=$heads" --set "base.pretrain.shape.intermediate=$intermediate" < /dev/null
done <<'SHAPES'
tiny 32 3 2 96
small 64 4 2 176
medium 128 6 4 352
SHAPES
