# Two commands set everything up on a fresh machine: `make demo` and `make test`.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# On a machine without a GPU a fixed release is taken, of which a CPU build exists; with one, any recent release.
TORCH ?= $(shell if command -v nvidia-smi >/dev/null 2>&1; then echo 'torch>=2.11'; else echo 'torch==2.13.0'; fi)
MODEL := models/SmolLM2-135M-Instruct-q4_1

.PHONY: setup demo test check format perplexity clean

setup: $(VENV)/.ready

$(VENV)/.ready: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet '$(TORCH)'
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	touch $@

$(MODEL)/model.safetensors: | setup
	$(BIN)/python examples/fetch_smollm2.py $(MODEL)

# Fetch the real SmolLM2-135M-Instruct and let it answer through the server, quantized at load, in each format.
demo: setup $(MODEL)/model.safetensors
	$(BIN)/python examples/demo.py --model $(MODEL)

# All tests that this machine can run; those that need a GPU, or the demo's model, say so and are skipped.
test: setup
	$(BIN)/python -m pytest

# Lint, format and types, as CI runs them.
check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# The README's table: perplexity of the demo model in every format.
perplexity: setup $(MODEL)/model.safetensors
	$(BIN)/python benchmarks/perplexity.py --model $(MODEL)

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache
