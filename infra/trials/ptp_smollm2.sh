#!/usr/bin/env bash
# Generate, train, generate faster with SmolLM2-135M and product texts (docs/ptp.md, c): ptp_smollm2.sh
# About an hour on two cores, most of it training; everything goes to out/ptp, and what is trained there is not trained again.
set -euo pipefail
cd "$(dirname "$0")/../.."
export PATH="$PWD/.venv/bin:$PATH"
domain=out/ptp/domain

[ -e $domain/bench.parquet ] || python infra/trials/templated_prompts.py $domain
sevenleague run configs/ptp/smollm2_samples.yaml --set input.limit=null
sevenleague train configs/ptp/smollm2_cpu.yaml --output out/ptp/smollm2 --json out/ptp/smollm2.json --arms o
adapter=out/ptp/smollm2/o/adapter

# held-out prompts, the same seeds before and after, one sample at a time
job=(configs/ptp/smollm2_samples.yaml --set "input.path=$domain/bench.parquet" --set engine.max_sequences=1)
sevenleague run "${job[@]}" --output out/ptp/smollm2-before --set decoding=autoregressive
sevenleague run "${job[@]}" --output out/ptp/smollm2-after \
    --set decoding.strategy=ptp --set "decoding.adapter=$adapter" --set decoding.branches=3
python infra/trials/same_outputs.py out/ptp/smollm2-before out/ptp/smollm2-after

bench() {
    local name=$1
    shift
    sevenleague bench --model builtin:smollm2-135m --prompts $domain/bench.parquet --limit 32 --max-tokens 96 --batch 1 \
        --rounds 3 --dtype bfloat16 --temperature 0.2 --top-p 0.9 --coupling inverse_cdf --no-ignore-eos "$@" \
        --json "out/ptp/smollm2_bench_$name.json"
}
with=(--set "decoding.adapter=$adapter")
bench branch --contestants autoregressive,ptp "${with[@]}" --set decoding.branches=1
bench branches --contestants autoregressive,ptp,auto "${with[@]}" --set decoding.branches=3
bench serial --contestants autoregressive,ptp "${with[@]}" --set decoding.mode=serial
bench without --contestants autoregressive,auto
python infra/trials/ptp_modes.py builtin:smollm2-135m $adapter $domain/bench.parquet
