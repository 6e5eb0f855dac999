#!/usr/bin/env bash
# The benchmark runs of docs/performance.md: strategies against each other, then against other systems, the tail of a
# job, and where a step's time goes. Nothing else may run meanwhile. About an hour on two cores.
# usage: [VLLM_PYTHON=PATH] bench.sh SPEC_BENCH.parquet OUTPUT_FOLDER
set -euo pipefail
spec=$1 out=$2
bin=$(dirname "$0")/../../.venv/bin
mkdir -p "$out"
common=(--model builtin:smollm2-135m --prompts "$spec" --max-prompt-chars 1000 --spread --max-tokens 128
    --dtype bfloat16 --threads 2)

bench() {
    local name=$1
    shift
    "$bin/sevenleague" bench "${common[@]}" "$@" --json "$out/$name.json" --chart "$out/$name.png"
}

bench greedy --limit 64 --batch 1,2,4,8,16,32 --contestants autoregressive,auto --rounds 2
bench sampled --limit 64 --batch 1,8,16 --contestants autoregressive,auto --rounds 2 --temperature 0.7 --top-p 0.95
"$bin/python" "$(dirname "$0")/paired_steps.py" "$spec" "$out/paired.json" --batch 1,2,4,8,16,32
"$bin/python" "$(dirname "$0")/paired_steps.py" "$spec" "$out/paired_sampled.json" --batch 1,8,16 \
    --temperature 0.7 --top-p 0.95
bench siblings --limit 12 --n 8 --batch 8 --contestants autoregressive,auto --rounds 3 --temperature 0.7
# samples of 64 tokens, so that few go on behind the end of their text, where greedy models repeat themselves
"$bin/python" "$(dirname "$0")/templated_prompts.py" "$out/prompts"
for temperature in 0 0.7; do
    bench "templated-$temperature" --prompts "$out/prompts/prompts.parquet" --max-tokens 64 --temperature "$temperature" \
        --limit 64 --batch 8,16 --contestants autoregressive,auto --rounds 3
done
peers=hf-generate,hf-generate-batch,hf-prompt-lookup
if [[ -n ${VLLM_PYTHON:-} ]]; then
    peers+=,vllm,vllm-ngram
fi
bench peers --limit 64 --batch 1,8,16 --contestants "autoregressive,auto,$peers" --rounds 1 \
    ${VLLM_PYTHON:+--peer-python "vllm=$VLLM_PYTHON"}
"$bin/python" "$(dirname "$0")/tail.py" "$spec" "$out/tail.json" "$out/tail.png"
"$bin/python" "$(dirname "$0")/profile_step.py" "$spec" "$out/profile.json"
