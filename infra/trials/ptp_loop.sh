#!/usr/bin/env bash
# Generate, train, generate faster with the same outputs, on one screen (docs/ptp.md, b): ptp_loop.sh [ARM]
# Two and a half hours of one core; everything goes to out/ptp, and what is trained there already is not trained again.
set -euo pipefail
cd "$(dirname "$0")/../.."
export PATH="$PWD/.venv/bin:$PATH"
ARM=${1:-o-0}

[ -e out/ptp/corpus/bench.parquet ] || python infra/trials/ptp_corpus.py out/ptp/corpus
sevenleague train configs/ptp/code.yaml --output out/ptp/code --arms base --json out/ptp/code_base.json
sevenleague run configs/ptp/code_samples.yaml
sevenleague train configs/ptp/code.yaml --output out/ptp/code --json out/ptp/code.json --arms o-0,o-1,constant-0,constant-1

# prompts of files that neither the model nor the adapter has seen; the same seeds before and after
sevenleague run configs/ptp/code_bench.yaml --output out/ptp/before --set decoding=autoregressive
for mode in serial one_pass; do
    adapter=(--set "decoding.adapter=out/ptp/code/$ARM/adapter" --set "decoding.mode=$mode")
    sevenleague run configs/ptp/code_bench.yaml --output "out/ptp/after-$mode" "${adapter[@]}"
    python infra/trials/same_outputs.py out/ptp/before "out/ptp/after-$mode"
    sevenleague bench --model out/ptp/code/base --prompts out/ptp/corpus/bench.parquet --limit 24 --max-tokens 128 \
        --batch 1 --rounds 3 --dtype bfloat16 --temperature 0.7 --coupling inverse_cdf \
        --contestants autoregressive,auto,ptp "${adapter[@]}" --json "out/ptp/bench-$mode.json"
done
