#!/usr/bin/env bash
# What a CPU cannot show: tests on the GPU, float32 equivalence there, step times, and the benchmark in bfloat16.
# Needs torch >= 2.11 and transformers >= 5.17, not Ray. Ends within TOTAL_S; every part has a limit of its own, and
# what one part loses the others keep. Without MODEL a random Llama is made, so nothing is downloaded.
# usage: [OUT=FOLDER] [MODEL=FOLDER] [PROMPTS=FILE] [WHEELS=FOLDER] [DEVICE=cuda|cpu] [TOTAL_S=460] gpu_check.sh [JSON]
# DEVICE=cpu is a rehearsal with a tiny model. WHEELS are installed into a temporary folder first.
set -uo pipefail
cd "$(dirname "$0")/.." || exit 1
here=infra/gpu_check
json=${1:-${OUT:-.}/gpu_check.json}
device=${DEVICE:-cuda}
total_s=${TOTAL_S:-460}
python=${PYTHON:-python3}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
# `bench` reports the version of the package, which need not be installed here
mkdir -p "$work/site/sevenleague-0.dist-info" "$work/parts"
printf 'Metadata-Version: 2.1\nName: sevenleague\nVersion: 0+checkout\n' > "$work/site/sevenleague-0.dist-info/METADATA"
if [ -n "${WHEELS:-}" ]; then
    "$python" -m pip install -q --no-index --no-deps --no-compile --target "$work/site" "$WHEELS"/*.whl || exit 2
fi
export PYTHONPATH="$work/site:$PWD" PYTHONUNBUFFERED=1 TOKENIZERS_PARALLELISM=false

# part NAME SECONDS COMMAND..: its log, exit code and time go into the JSON, also when it fails or is stopped
part() {
    local name=$1 limit=$2 began=$SECONDS
    shift 2
    local left=$((total_s - began))
    ((limit > left)) && limit=$left
    if ((limit < 5)); then
        echo "no time was left for it" > "$work/parts/$name.log"
        echo "-1 0" > "$work/parts/$name.status"
    else
        timeout -k 5 "$limit" "$@" > "$work/parts/$name.log" 2>&1
        echo "$? $((SECONDS - began))" > "$work/parts/$name.status"
    fi
    "$python" $here/collect.py "$work/parts" "$json"
}

"$python" $here/environment.py "$work/parts/environment.json" "$device" || exit 2
if [ "$device" = cpu ]; then
    size=tiny batches=(1:2:8 2:2:8) tokens=16 steps=1,2
else
    # batch:prompts:new tokens, so that each turn takes seconds
    size=1b batches=(1:4:128 8:16:128 32:64:128 128:256:96) tokens=64 steps=1,8,32,128
fi
model=${MODEL:-$work/model}
prompts=${PROMPTS:-$work/prompts.jsonl}
part setup 60 "$python" $here/make_model.py "$work/model" "$work/prompts.jsonl" "$([ -n "${MODEL:-}" ] && echo none || echo $size)"
part tests 100 "$python" -m pytest -m gpu tests/gpu -q -p no:cacheprovider
part equivalence 80 "$python" $here/equivalence.py "$model" "$prompts" "$work/parts/equivalence.json" "$device" "$tokens"
part steps 60 "$python" $here/steps.py "$model" "$work/parts/steps.json" "$device" "$steps"
for entry in "${batches[@]}"; do
    IFS=: read -r batch limit new <<< "$entry"
    part "bench_$batch" 70 "$python" -c 'from jobs.cli import entry; entry()' bench --model "$model" \
        --prompts "$prompts" --limit "$limit" --max-tokens "$new" --batch "$batch" --rounds 2 --dtype bfloat16 \
        --contestants autoregressive,auto,hf-generate --set "model.device=$device" --json "$work/parts/bench_$batch.json"
done
echo "$json"
