# What people do with the repository. The first run of any target sets up what it needs; later ones are quick.
#   make build      the Python environment .venv, the native module, and the installed tree build/site
#   make demo       the main job on two real engines (MODEL=/path takes a real model)
#   make test       everything: build, lint, native tests under sanitizers, unit, integration, engines
#   make test-fast  no engine, no sanitizer builds: under two minutes
SHELL := /bin/bash
.DELETE_ON_ERROR:
MAKEFLAGS += --no-builtin-rules

VENV := .venv
BIN := $(abspath $(VENV))/bin
PYTHON := $(BIN)/python
STAMPS := build/stamps
JOBS ?= $(shell nproc)
FUZZ_SECONDS ?= 60
PYTEST_ARGS ?=
export PATH := $(BIN):$(PATH)
export CMAKE_BUILD_PARALLEL_LEVEL := $(JOBS)
ifneq ($(shell command -v ccache),)
export CMAKE_CXX_COMPILER_LAUNCHER := ccache
# Paths are hashed relative to the clone, so that another clone finds what this one compiled.
export CCACHE_BASEDIR := $(CURDIR)
export CCACHE_NOHASHDIR := 1
endif

NATIVE := $(shell find native -name '*.cpp' -o -name '*.h' -o -name '*.inc')
PACKAGES := $(shell find dfkv_core dfkv_connectors -name '*.py' -o -name '*.pyi' -o -name py.typed)

.PHONY: build demo test test-fast test-all torture bench bench-peers bench-engine bench-lmcache lint format docs clean

build: $(STAMPS)/build

$(VENV)/.stamp: tools/requirements.txt tools/setup.sh
	@tools/setup.sh venv $(VENV)
	@touch $@

$(STAMPS)/tools: tools/setup.sh
	@tools/setup.sh tools
	@mkdir -p $(@D) && touch $@

# One build serves all: the wheel, unpacked into build/site for engine environments (PYTHONPATH), and its native module
# beside the sources for the project's own environment.
$(STAMPS)/build: $(VENV)/.stamp CMakeLists.txt cmake/xxhash.cmake pyproject.toml README.md $(NATIVE) $(PACKAGES)
	@mkdir -p $(@D)
	@echo "building dfkv (a minute or two the first time)"
	@rm -rf build/dist build/site.new
	@$(PYTHON) -m pip wheel -q --disable-pip-version-check --no-build-isolation --no-deps \
	  --config-settings build-dir=build/wheel -w build/dist .
	@$(PYTHON) -m pip install -q --disable-pip-version-check --no-deps --target build/site.new build/dist/dfkv-*.whl
	@rm -rf build/site build/site.new/bin && mv build/site.new build/site
	@cp --remove-destination build/site/dfkv_core/_native*.so dfkv_core/
	@touch $@

demo: build
	@$(PYTHON) -m demo $(if $(MODEL),--model $(MODEL))

# tools/test.py builds and lints too, to report that share's time.
test: $(VENV)/.stamp
	@$(PYTHON) tools/test.py all $(PYTEST_ARGS)

test-fast: $(VENV)/.stamp
	@$(PYTHON) tools/test.py fast $(PYTEST_ARGS)

test-all: test torture

# What is too long for every change: the fuzzers for FUZZ_SECONDS each, and random tests with many more examples.
torture: build $(STAMPS)/tools
	@$(PYTHON) -m tools.torture --seconds $(FUZZ_SECONDS)

bench: build
	@$(BIN)/python -m dfkv_core.cli bench

# Beside Mooncake's store, memcached and redis, where they install. DOCS=1 writes docs/benchmarks.md.
bench-peers: build
	@$(PYTHON) -m bench_peers $(if $(DOCS),--docs)

bench-engine: build
	@$(PYTHON) -m demo.bench_engine

# Beside LMCache's own adapters for redis and for files.
bench-lmcache: build $(STAMPS)/tools
	@$(PYTHON) -m demo.bench_lmcache $(if $(DOCS),--docs)

lint: build $(STAMPS)/tools
	@$(PYTHON) tools/lint.py

format: $(VENV)/.stamp $(STAMPS)/tools
	@ruff check -q --fix . || true
	@ruff format -q .
	@clang-format -i $(filter %.cpp %.h,$(NATIVE))

# The pages that are made from the code.
docs: build
	@$(PYTHON) -m tools.docs

clean:
	@rm -rf build .mypy_cache .ruff_cache .pytest_cache .hypothesis dfkv_core/_native*.so
	@find dfkv_core dfkv_connectors tests -name __pycache__ -type d -prune -exec rm -rf {} +
