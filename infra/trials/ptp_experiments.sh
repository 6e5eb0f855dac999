#!/usr/bin/env bash
# The experiments of docs/ptp.md, a, b, d and e: ptp_experiments.sh
# Some four hours, most of it of one core. Everything goes to out/ptp; what is done there already is not done again.
set -euo pipefail
cd "$(dirname "$0")/../.."
export PATH="$PWD/.venv/bin:$PATH"

sevenleague train configs/ptp/markov.yaml --output out/ptp/markov --json out/ptp/markov.json
python infra/trials/ptp_many_drafts.py configs/ptp/markov.yaml out/ptp/markov o out/ptp/many_drafts.json
sevenleague train configs/ptp/inverse.yaml --output out/ptp/markov --json out/ptp/inverse.json
sevenleague train configs/ptp/markov_embeddings.yaml --output out/ptp/markov --json out/ptp/markov_embeddings.json
sevenleague train configs/ptp/markov_beta.yaml --output out/ptp/markov --json out/ptp/markov_beta.json
sevenleague train configs/ptp/hmm.yaml --output out/ptp/hmm --json out/ptp/hmm.json
infra/trials/ptp_loop.sh
infra/trials/ptp_draft_sizes.sh
