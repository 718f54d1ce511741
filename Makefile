# Every target does its own set-up: a machine with Python 3.11+ and a package registry is enough.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip --quiet --disable-pip-version-check
READY  := $(VENV)/.ready

.PHONY: help demo test test-slow test-ranks test-cluster test-newcomer test-wheel docs test-trainers bench-trainers test-vllm test-sglang test-llamacpp bench-llamacpp browser lint format clean

help:  ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/' | expand -t 12

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(0 if v >= (3, 11) else f"fledge needs Python 3.11 or newer, {sys.executable} is {v[0]}.{v[1]}: make PYTHON=/path/to/python3.11 ...")'
	@echo "setting up $(VENV) (first time: about two minutes) ..."
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(PIP) install --upgrade pip
	@$(PIP) install -c constraints.txt torch
	@$(PIP) install -c constraints.txt -e '.[dev]'
	@$(PIP) install --no-deps trl==1.16.0  # only its chat templates, as test data; never imported
	-@$(BIN)/python -c 'import triton' 2>/dev/null || $(PIP) install --no-deps triton==3.6.0  # CPU builds of torch bring none; its interpreter runs the kernels' tests
	@touch $@

demo: $(READY)  ## the whole story on a real 135M model
	@$(BIN)/fledge demo

WORKERS ?= 2
AGAIN   ?=  # --lf: only what failed in the last run, as CI tries once more
PYTEST   = -m pytest -o cache_dir=.pytest_cache/$@  # each stage its own: two run at a time
STAGES := not gpu and not engine and not ranks and not cluster and not newcomer and not wheel
test: $(READY)  ## the tests: under ten minutes on two cores
	@$(BIN)/python $(PYTEST) -n $(WORKERS) --dist worksteal -m "$(STAGES) and not slow" $(AGAIN)

test-slow: $(READY)  ## those that take long: kills, memory, real architectures
	@$(BIN)/python $(PYTEST) -n $(WORKERS) --dist worksteal -m "$(STAGES) and slow" $(AGAIN)

test-ranks: $(READY)  ## several processes: sharded targets and drafts, long rows, lost ranks
	@$(BIN)/python $(PYTEST) -n 1 -m ranks $(AGAIN)

$(VENV)/.cluster: $(READY)
	@$(PIP) install -c constraints.txt -e '.[cluster]'
	@touch $@

test-cluster: $(VENV)/.cluster  ## targets and ranks on real Ray clusters of several nodes on this machine
	@$(BIN)/python $(PYTEST) -n 0 -m cluster tests/target/ray $(AGAIN)

test-newcomer: $(READY)  ## the first hour of a newcomer, in a clone and a fresh home
	@$(BIN)/python $(PYTEST) -m newcomer -s tests/newcomer $(AGAIN)

test-wheel: $(READY)  ## the built wheel, alone in a fresh environment: demo, train, eval, export
	@$(BIN)/python $(PYTEST) -m wheel tests/wheel $(AGAIN)

DOCS := .venv-docs
$(DOCS)/.ready: pyproject.toml
	@test -x $(DOCS)/bin/python || $(PYTHON) -m venv $(DOCS)
	@$(DOCS)/bin/python -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["docs"], sep="\n")' >$(DOCS)/docs.txt
	@$(DOCS)/bin/python -m pip --quiet --disable-pip-version-check install -r $(DOCS)/docs.txt  # without fledge, so without torch
	@touch $@

docs: $(DOCS)/.ready  ## the pages as a site, in site/; a dead link fails
	@rm -rf build/pages && mkdir -p build/pages/benchmarks
	@cp -r *.md docs build/pages && cp -r benchmarks/results build/pages/benchmarks
	@NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/mkdocs build --strict  # not --quiet: it would hear no warning

browser:  ## Chromium for the report's tests, where apt may install it; without it they are skipped
	@command -v chromium >/dev/null || command -v google-chrome >/dev/null || \
		{ apt-get update -qq && apt-get install -qq -y --no-install-recommends chromium; } >/dev/null 2>&1 || \
		echo "no Chromium here: the report's browser tests will be skipped"

lint: $(READY)  ## ruff and mypy --strict
	@$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/mypy

format: $(READY)  ## let ruff put things in order
	@$(BIN)/ruff check --fix . && $(BIN)/ruff format .

VLLM_VENV := .venv-vllm
VLLM_PINS := tests/engines/vllm/requirements.txt

$(VLLM_VENV)/.ready: $(VLLM_PINS)
	@echo "setting up $(VLLM_VENV), a CPU build of vLLM (first time: about three minutes) ..."
	@$(PYTHON) -m venv --clear $(VLLM_VENV)
	@$(VLLM_VENV)/bin/python -m pip --quiet --disable-pip-version-check install --no-deps -r $(VLLM_PINS)
	@touch $@

test-vllm: $(VLLM_VENV)/.ready  ## the vLLM target, and exports in a real vLLM, on this CPU
	@PYTHONPATH=src $(VLLM_VENV)/bin/python $(PYTEST) -m engine tests/engines/vllm $(AGAIN)

LLAMACPP := .venv-llamacpp
$(LLAMACPP)/.ready: pyproject.toml
	@$(PYTHON) -m venv --clear $(LLAMACPP)
	@$(LLAMACPP)/bin/python -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["llama-cpp"], sep="\n")' >$(LLAMACPP)/pins.txt
	@$(LLAMACPP)/bin/python -m pip --quiet --disable-pip-version-check install -r $(LLAMACPP)/pins.txt  # it needs nothing else
	@touch $@

bench-llamacpp: $(READY) $(LLAMACPP)/.ready  ## what drafts are worth in llama.cpp, plain and drafted in turns; run it alone
	@PYTHONPATH=src:benchmarks:$$(echo $(LLAMACPP)/lib/python3*/site-packages) $(BIN)/python benchmarks/bench_llamacpp.py $(ARGS)

test-llamacpp: $(READY) $(LLAMACPP)/.ready  ## GGUF drafts in a real llama.cpp server, on this CPU
	@$(BIN)/python $(PYTEST) -n 0 -m engine tests/engines/llamacpp $(AGAIN)

clean:  ## remove the environment and every tool's cache
	rm -rf .venv* .mypy_cache .ruff_cache .pytest_cache .hypothesis

# transformers 5.18.0 is what AutoModel's precompute imports; triton is what SpecForge imports.
TRAINERS := .venv-trainers
$(TRAINERS)/.ready: pyproject.toml constraints.txt Makefile
	@echo "setting up $(TRAINERS) (about two minutes) ..."
	@test -x $(TRAINERS)/bin/python || $(PYTHON) -m venv $(TRAINERS)
	@$(TRAINERS)/bin/pip install -q --disable-pip-version-check -c constraints.txt torch
	@$(TRAINERS)/bin/pip install -q --disable-pip-version-check -c constraints.txt -e . pytest pytest-timeout \
		aiohttp httpx loguru openai protobuf pydantic-settings
	@$(TRAINERS)/bin/pip install -q --disable-pip-version-check --no-deps \
		nemo-automodel==0.7.0 specforge==0.2.0 speculators==0.9.0 hs-connectors==0.9.0 \
		eagle-llm==1.2.1 nvidia-modelopt==0.47.0 antlr4-python3-runtime==4.9.3 nvidia-ml-py==13.615.71 omegaconf==2.3.0 \
		pulp==3.3.2 scipy==1.17.1 \
		pillow==13.0.0 torchao==0.18.0 transformers==5.18.0 triton==3.6.0  # without their pins of torch, datasets and engines
	@touch $@

test-trainers: $(TRAINERS)/.ready  ## other trainers' own code: their steps against ours, their files and ours
	@$(TRAINERS)/bin/python $(PYTEST) -m engine tests/trainers tests/export/test_export_speculators.py tests/export/test_export_speculators_blocks.py $(AGAIN)

bench-trainers: $(TRAINERS)/.ready  ## the steps of all trainers on this CPU, in turns: about an hour
	@PYTHONPATH=src $(TRAINERS)/bin/python benchmarks/bench_trainers.py

# Each SGLang version has an environment of its own (.venv-sglang-059, -0523): their pins disagree.
SGLANG := 059 0523

.venv-sglang-%/.ready: tests/engines/sglang/requirements-%.txt
	@echo "setting up .venv-sglang-$* (first time: a few minutes) ..."
	@test -x .venv-sglang-$*/bin/python || $(PYTHON) -m venv .venv-sglang-$*
	@.venv-sglang-$*/bin/python -m pip install -q --disable-pip-version-check --upgrade pip
	@.venv-sglang-$*/bin/python -m pip install -q --disable-pip-version-check torch==2.13.0
	@.venv-sglang-$*/bin/python -m pip install -q --disable-pip-version-check --no-deps -r $<
	@touch $@

test-sglang: $(SGLANG:%=.venv-sglang-%/.ready)  ## targets and exports in real SGLang, on a CPU
	@for version in $(SGLANG); do \
	  .venv-sglang-$$version/bin/python -m pip list 2>/dev/null | grep '^sglang '; \
	  PYTHONPATH=src:tests/engines/sglang/cpu_stub .venv-sglang-$$version/bin/python \
	    -m pytest -q -W ignore -o cache_dir=$(CURDIR)/.venv-sglang-$$version/pytest -m engine tests/engines/sglang $(AGAIN) || exit 1; \
	done
