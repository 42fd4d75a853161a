# Everything that a person or CI runs. `make` alone lists it.

PYTHON ?= python3
VENV ?= .venv
# Version of SGLang that its tests run, and the environment that they run it in.
SGLANG ?= 0.5.21
SGLANG_VENV ?= .venv-sglang
# Torch as pip sees it. Without a GPU a CPU build is smaller by gigabytes: TORCH_INDEX may name a
# package index that has one, or TORCH the path of a wheel.
TORCH ?= torch==2.13.0
TORCH_INDEX ?=
# Test processes that run side by side.
JOBS ?= 2
# More arguments for pytest, such as ARGS='-k broker -x'.
ARGS ?=
# Modules of bench/; those other than broker need a GPU.
BENCH ?= broker
# local: the supervisor on this machine. k8s: the cluster that kubectl points at.
TARGET ?= local
# Deployment file of TARGET=local.
CONFIG ?= deploy/local/rollplex.toml
# Kustomization of TARGET=k8s.
KUSTOMIZATION ?= deploy/k8s/base

PY := $(VENV)/bin/python
STAMP := $(VENV)/.installed
SGLANG_BARE := tests/sglang/requirements-$(SGLANG).txt
SGLANG_STAMP := $(SGLANG_VENV)/.installed-$(SGLANG)
PROTOS := $(sort $(wildcard protos/rollplex/v1/*.proto))
PROTOC = $(PY) -m grpc_tools.protoc -I. --python_out=$(1) --grpc_python_out=$(1) \
	--mypy_out=quiet:$(1) --mypy_grpc_out=quiet:$(1) $(PROTOS)
KUBECTL := kubectl --namespace rollplex
WORKLOADS := --selector app.kubernetes.io/part-of=rollplex

# Several test processes share the cores; one thread each is faster than many that fight.
export OMP_NUM_THREADS ?= 1

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help setup protos protos-check demo fmt lint type test test-gpu test-nightly test-sglang \
	bench up status logs down clean

help: ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  %-14s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(STAMP) ## Make .venv and install everything (PYTHON=, TORCH=, TORCH_INDEX=)

$(STAMP): pyproject.toml
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(0 if v >= (3, 11) else \
		f"PYTHON={sys.executable} is {v.major}.{v.minor}; Rollplex needs 3.11 or newer: make setup PYTHON=python3.12")'
	$(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --quiet $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) '$(TORCH)'
	$(PY) -m pip install --quiet --editable '.[dev]'
	@touch $@

protos: $(STAMP) ## Compile protos/
	PATH="$(abspath $(VENV)/bin):$$PATH" $(call PROTOC,.)

protos-check: $(STAMP) ## Fail if the compiled protos are not those of the .proto files
	@out=$$(mktemp -d) && trap 'rm -rf "$$out"' EXIT && \
	PATH="$(abspath $(VENV)/bin):$$PATH" $(call PROTOC,"$$out") && \
	diff --recursive --exclude='*.proto' --exclude=__init__.py --exclude=__pycache__ \
		protos/rollplex "$$out/protos/rollplex" || \
	{ echo 'protos/ and its compiled code differ: run make protos and commit'; exit 1; }

demo: $(STAMP) ## Train a small vision-language model on this machine and show what was learned
	$(PY) -m examples.demo $(ARGS)

fmt: $(STAMP) ## Format, and mend what can be mended
	$(PY) -m ruff format
	$(PY) -m ruff check --fix

lint: $(STAMP) protos-check ## Check style, spelling and protos
	$(PY) -m ruff check
	$(PY) -m ruff format --check
	$(PY) -m codespell_lib
	$(VENV)/bin/buf lint --config protos/buf.yaml --path protos .

type: $(STAMP) ## Check types
	$(PY) -m mypy

# Files in the order of their folders: those that start nodes come first, and no long one is last.
test: $(STAMP) ## Run the whole CPU suite (JOBS=, ARGS=)
	$(PY) -m pytest --numprocesses $(JOBS) --dist loadfile --no-loadscope-reorder $(ARGS)

test-gpu: $(STAMP) ## Run the GPU tests; running none is a failure
	$(PY) -m pytest -m 'gpu or multigpu' --require-run $(ARGS)

test-nightly: $(STAMP) ## Run the kill matrix and the long runs; running none is a failure
	$(PY) -m pytest -m nightly --require-run $(ARGS)

test-sglang: $(STAMP) $(SGLANG_STAMP) ## Run the tests on SGLang's real engine, on a CPU (SGLANG=0.5.17|0.5.21)
	$(PY) -m pytest -m sglang --require-run --timeout 600 \
		--sglang-python $(SGLANG_VENV)/bin/python $(ARGS) tests/sglang

# Not with its dependencies: those bring builds and kernels for GPUs, gigabytes of them.
$(SGLANG_STAMP): tests/sglang/requirements.txt $(SGLANG_BARE)
	$(PYTHON) -m venv $(SGLANG_VENV)
	$(SGLANG_VENV)/bin/python -m pip install --quiet $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) '$(TORCH)'
	$(SGLANG_VENV)/bin/python -m pip install --quiet --requirement tests/sglang/requirements.txt
	$(SGLANG_VENV)/bin/python -m pip install --quiet --no-deps --requirement $(SGLANG_BARE)
	@rm -f $(SGLANG_VENV)/.installed-*
	@touch $@

bench: $(STAMP) ## Run benchmarks of bench/, one JSON document each (BENCH=)
	@for name in $(BENCH); do $(PY) -m bench.$$name || exit 1; done

ifeq ($(TARGET),local)
up status logs down: $(STAMP)
UP = $(PY) -m deploy.local up --config $(CONFIG)
STATUS = $(PY) -m deploy.local status --config $(CONFIG)
LOGS = $(PY) -m deploy.local logs --config $(CONFIG)
DOWN = $(PY) -m deploy.local down --config $(CONFIG)
else ifeq ($(TARGET),k8s)
UP = kubectl apply --kustomize $(KUSTOMIZATION)
STATUS = $(KUBECTL) get pods,services,persistentvolumeclaims
LOGS = $(KUBECTL) logs $(WORKLOADS) --all-containers --prefix --tail 100
DOWN = $(KUBECTL) delete statefulsets,deployments $(WORKLOADS)
else
$(error TARGET=$(TARGET): legal are local and k8s)
endif

up: ## Start every service (TARGET=local|k8s)
	$(UP)

status: ## Show what runs, and how it is
	$(STATUS)

logs: ## Show the logs of the services
	$(LOGS)

down: ## Stop what up has started; runs and other data stay
	$(DOWN)

clean: ## Remove what the build and the tests leave; not .venv, runs or .rollplex
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .benchmarks
	find . -path ./$(VENV) -prune -o -name __pycache__ -type d -print0 | xargs -0 rm -rf
