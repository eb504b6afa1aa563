# `make demo` and `make test` set up everything they need; `make help` lists the rest.
#   PYTHON=python3.12   interpreter to make the environment with (3.11 or later)
#   VENV=.venv          folder of the environment
#   JOBS=2              tests that run at the same time
#   TORCH=2.14          of `make newest`, in place of the newest one
#   STAGE=all           of `make gpu`: tests, memory or time; GPU_ARGS are passed on (--cases, --seconds, --folder)

PYTHON ?= python3
VENV ?= .venv
JOBS ?= 2
STAGE ?= all

BIN := $(VENV)/bin
BUILD := build/$(VENV)
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet
TOOLS := $(VENV)/.tools
PACKAGE := $(VENV)/.package
GPU_PACKAGE := $(VENV)-gpu/.package
DOCS_TOOLS := $(VENV)-docs/.tools
WHEEL_TOOLS := $(VENV)-wheel/.tools
WHEELS := wheelhouse/gpu
BEGUN := $(shell date +%s)
# The folders too: their times change when a file is added or removed.
SOURCES := CMakeLists.txt pyproject.toml $(shell find cpp/olla cpp/bindings cpp/torch python -not -path '*/__pycache__*')
CXX_FILES = $(shell find $(wildcard cpp bench tests) -name '*.[ch]pp')
# Code that hangs where no Python runs: its worker says where, and ends.
HANGS := -o faulthandler_timeout=660 -o faulthandler_exit_on_timeout=true
say = @printf '\n== %s\n' $(1)

SHELL := /bin/bash
export PATH := $(CURDIR)/$(BIN):$(PATH)
.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help demo test env lint stub-check stubs format cpp-test thread-test py-test cuda-test cuda-coverage slow-test newest newest-env gpu gpu-wheels wheel wheel-test bench bench-native pins docs clean

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-13s %s\n", $$1, $$2 }' Makefile

demo: $(PACKAGE)  ## capture, plan and report GPT-2 small and ResNet-50
	$(call say,'Demo')
	$(BIN)/python bench/pytorch/demo.py

test: lint cpp-test py-test  ## lint, types, stubs, C++ tests (plain and sanitized), Python tests

# Environment ---------------------------------------------------------------------------------------------------------

env: $(PACKAGE)  ## the environment with tools and the package, nothing else

$(TOOLS): requirements-dev.txt constraints.txt
	$(call say,'Environment $(VENV)')
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo 'olla needs Python 3.11 or later; $(PYTHON) is not. Name one: make PYTHON=python3.12 ...' >&2; exit 1; }
	@echo '#include <span>' | $${CXX:-c++} -std=c++20 -fsyntax-only -x c++ - || { \
	  echo 'olla needs a C++20 compiler (GCC 11, Clang 14, Xcode 15 or later). Install one, or name it: CXX=g++-12 make ...' >&2; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) install --constraint constraints.txt pip
	$(PIP) install --constraint constraints.txt --requirement requirements-dev.txt
	@touch $@

$(PACKAGE): $(TOOLS) $(SOURCES)
	$(call say,'Build and install the package')
	$(PIP) install --constraint constraints.txt --no-build-isolation --config-settings build-dir=$(BUILD) '.[torch]'
	@touch $@

pins:  ## constraints.txt from the newest versions, in an environment of its own
	rm -rf $(VENV)-pins && $(PYTHON) -m venv $(VENV)-pins
	$(VENV)-pins/bin/python -m pip install --quiet --upgrade pip
	$(VENV)-pins/bin/python -m pip install --quiet --requirement requirements-dev.txt '.[torch]'
	{ head -n 1 constraints.txt; $(VENV)-pins/bin/python -m pip freeze --all --exclude olla-planner \
	  | grep -v '^nvidia\|^triton' | sed 's/+.*//' | LC_ALL=C sort -f; } > build/constraints.txt
	mv build/constraints.txt constraints.txt

# Checks --------------------------------------------------------------------------------------------------------------

lint: $(PACKAGE) stub-check  ## ruff, clang-format, mypy --strict, stub comparison
	$(call say,'Lint')
	ruff check .
	ruff format --check .
	clang-format --dry-run --Werror $(CXX_FILES)
	mypy

format: $(TOOLS)  ## rewrite all Python and C++ in the project's format
	ruff check --fix --exit-zero .
	ruff format .
	clang-format -i $(CXX_FILES)

stub-check: $(PACKAGE)
	$(call say,'Compare python/olla/_core.pyi with the module')
	@mkdir -p $(BUILD)
	$(BIN)/python -m nanobind.stubgen --quiet --module olla._core --output-file $(BUILD)/_core.pyi
	diff -u python/olla/_core.pyi $(BUILD)/_core.pyi || { echo 'The bindings changed: run `make stubs`.' >&2; exit 1; }

stubs: $(PACKAGE)  ## rewrite python/olla/_core.pyi from the module
	$(BIN)/python -m nanobind.stubgen --quiet --module olla._core --output-file python/olla/_core.pyi

cpp-test: $(TOOLS)  ## C++ tests, once optimized and once with address and undefined-behaviour sanitizers
	$(call say,'C++ tests')
	cmake --workflow --preset test
	$(call say,'C++ tests with sanitizers')
	cmake --workflow --preset sanitize

thread-test: $(TOOLS)  ## C++ tests with the thread sanitizer
	$(call say,'C++ tests with the thread sanitizer')
	cmake --workflow --preset thread

py-test: $(PACKAGE)  ## Python tests; PYTEST_ARGS='-k order' picks some
	$(call say,'Python tests')
	$(BIN)/python -m pytest -n $(JOBS) --timeout 600 $(HANGS) -m 'not slow' $(PYTEST_ARGS)

cuda-test:  ## the tests of CUDA, where there is no GPU under a stand-in; Linux x86-64; gets torch's CUDA build (2.5 GB)
	$(CUDA_ENV)
	$(call say,'CUDA tests')
	$(UNDER_STANDIN) -m pytest -n $(JOBS) --timeout 600 $(HANGS) $(PYTEST_ARGS) tests/cuda

cuda-coverage:  ## the same, and which lines of the code for CUDA they reach: fails below 95 % of a file
	$(CUDA_ENV)
	$(call say,'CUDA tests and the lines they reach')
	$(UNDER_STANDIN) tests/cuda/reached.py --timeout 600 $(HANGS) $(PYTEST_ARGS)

CUDA_ENV = PIP_CONFIG_FILE=/dev/null PIP_FIND_LINKS= PIP_EXTRA_INDEX_URL= $(MAKE) --no-print-directory env VENV=$(VENV)-cuda
UNDER_STANDIN = settings=$$($(VENV)-cuda/bin/python tests/cuda/standin.py) && eval "$$settings" && $(VENV)-cuda/bin/python

# Without network: $(PYTHON) has torch's CUDA build and what is large; the rest travels as wheels, or is there too.
# --no-deps: what is there may lack packages that its metadata ask for and that nothing here needs.
$(GPU_PACKAGE): bench/support/offline.py bench/requirements-gpu.txt $(SOURCES)
	$(call say,'Environment $(VENV)-gpu without network')
	$(PYTHON) bench/support/offline.py environment $(VENV)-gpu
	$(OFFLINE) --requirement bench/requirements-gpu.txt
	$(OFFLINE) --no-build-isolation --config-settings build-dir=build/$(VENV)-gpu .
	@touch $@

OFFLINE = $(VENV)-gpu/bin/python -m pip --disable-pip-version-check install --quiet --no-index --no-deps $(addprefix --find-links ,$(wildcard $(WHEELS)))

gpu: $(GPU_PACKAGE)  ## on a GPU, without network: tests, numbers and memory, times; ten minutes for each STAGE
	$(call say,'On the GPU: $(STAGE)')
	$(VENV)-gpu/bin/python bench/pytorch/bench_gpu.py --stages $(STAGE) --begun $(BEGUN) $(GPU_ARGS)

gpu-wheels:  ## what `make gpu` needs on a machine without network, into wheelhouse/gpu
	$(PYTHON) bench/support/offline.py wheels $(WHEELS)

slow-test: $(PACKAGE)  ## the Python tests that take minutes
	$(BIN)/python -m pytest -m slow $(PYTEST_ARGS)

# Without constraints and without pip's configuration of this machine: what a user gets today who pins nothing.
NEWEST := $(VENV)-newest/bin
UNPINNED = env -u PIP_CONSTRAINT -u PIP_BUILD_CONSTRAINT -u PIP_FIND_LINKS PIP_CONFIG_FILE=/dev/null $(NEWEST)/python -m pip --disable-pip-version-check --quiet
NEWEST_TESTS = tests/project/test_readme.py 'tests/project/test_docs.py::test_a_page_runs_as_printed[start.md]' \
  tests/project/test_private_names.py tests/ilp/test_highs.py tests/cli/test_doctor.py \
  'tests/odd/test_odd_loops.py::test_a_goal_changes_nothing_of_that' tests/pytorch/dynamo tests/inductor/test_backend.py

newest: newest-env  ## the wheel beside the newest of everything, nothing pinned: doctor, README and start as printed, odd loops, backend
	$(call say,'olla doctor')
	$(NEWEST)/olla doctor
	$(call say,'Pages as printed and short tests')
	$(NEWEST)/python -m pytest -p no:cacheprovider --timeout 600 $(HANGS) $(PYTEST_ARGS) $(NEWEST_TESTS)

newest-env:  # with TORCH=2.14 the newest of everything beside that torch
	$(call say,'Environment $(VENV)-newest with nothing pinned')
	test -x $(NEWEST)/python || $(PYTHON) -m venv $(VENV)-newest
	rm -rf build/newest
	$(UNPINNED) wheel --no-deps --wheel-dir build/newest .
	$(UNPINNED) install --upgrade --upgrade-strategy eager 'torch$(TORCH:%===%.*)' pytest pytest-timeout hypothesis \
	  "$$(echo build/newest/*.whl)[transformers,plot]"
	$(UNPINNED) install --force-reinstall --no-deps build/newest/*.whl
	@$(NEWEST)/python -m pip list | grep -iE '^(torch|numpy|numba|highspy|transformers) '

# The site --------------------------------------------------------------------------------------------------------------

docs: $(PACKAGE) $(DOCS_TOOLS)  ## the site, into build/site: a broken link or anchor is an error
	$(call say,'Site')
	$(VENV)-docs/bin/python -m sphinx --fail-on-warning --keep-going --quiet --fresh-env -c docs . build/site
	@echo 'Open build/site/index.html'

# Sphinx imports the package from the environment that has it, which comes behind its own.
$(DOCS_TOOLS): docs/requirements.txt | $(PACKAGE)
	$(PYTHON) -m venv $(VENV)-docs
	$(VENV)-docs/bin/python -m pip --disable-pip-version-check install --quiet --requirement docs/requirements.txt
	$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' \
	  > "$$($(VENV)-docs/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/package.pth"
	@touch $@

# Distribution, benchmarks --------------------------------------------------------------------------------------------

wheel: $(WHEEL_TOOLS)  ## the wheel, into dist/; on Linux with the tag of the oldest systems it runs on; PYTHON=python3.12 for the stable ABI
	rm -rf build/wheel
	$(PYTHON) -m pip wheel --no-deps --wheel-dir build/wheel .
	PATH="$(CURDIR)/$(VENV)-wheel/bin:$$PATH" bash tests/project/wheel_repair.sh build/wheel dist

$(WHEEL_TOOLS): tests/project/requirements-wheel.txt
	$(PYTHON) -m venv $(VENV)-wheel
	$(VENV)-wheel/bin/python -m pip --disable-pip-version-check install --quiet --requirement $<
	@touch $@

wheel-test:  ## build the wheel, install it where no compiler is, plan a graph
	$(call say,'Wheel in an empty environment')
	PYTHON='$(PYTHON)' bash tests/project/wheel_smoke.sh

bench: $(PACKAGE)  ## plan graph files, beside the reference and Inductor's orders; BENCH_ARGS are passed on
	$(BIN)/python bench/order/bench_order.py $(BENCH_ARGS)

bench-native: $(TOOLS)  ## scaling of the C++ core on generated graphs; BENCH_ARGS are passed on
	cmake --workflow --preset bench
	build/bench/bench/native/bench_scaling $(BENCH_ARGS)

clean:  ## remove environments, builds and caches
	rm -rf build dist wheelhouse .venv .venv-* .pytest_cache .mypy_cache .ruff_cache .hypothesis
