# `make test` and `make demo` do all of their set-up: they make .venv when there is none, and install again
# only when pyproject.toml or TORCH has changed. To begin again from nothing: rm -rf .venv

PYTHON ?= python3
TORCH ?= torch==2.13.0
PYTEST_ARGS ?=
MUTANTS_ARGS ?=
BENCH_ARGS ?=
DEMO_ARGS ?=
SECONDS ?= 600
JOBS ?= 2
GPU_PYTHON ?= 3.12

VENV_PYTHON := .venv/bin/python
PIP := $(VENV_PYTHON) -m pip -qq --disable-pip-version-check --no-input
INSTALLED := .venv/.installed
MKDOCS := NO_MKDOCS_2_WARNING=1 $(VENV_PYTHON) -m mkdocs

.DEFAULT_GOAL := help
.PHONY: help setup test lint format coverage mutants bench bench-compare demo demo-distributed clean FORCE

help:  ## show this text
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-17s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))
	@echo
	@echo 'Variables: PYTHON (now: $(PYTHON)), TORCH (now: $(TORCH)), PYTEST_ARGS, MUTANTS_ARGS, BENCH_ARGS, DEMO_ARGS, MATRIX,'
	@echo '  SECONDS, JOBS, GPU_PYTHON'

setup: $(INSTALLED)  ## make .venv and install what all other commands need

# The linters come last: with another torch or Python they may find what the tests do not mind.
test: $(INSTALLED)  ## run the tests, then lint; PYTEST_ARGS='-k name' picks some
	$(VENV_PYTHON) -m pytest -n auto --dist loadfile $(PYTEST_ARGS)
	@$(MAKE) --no-print-directory lint

lint: $(INSTALLED)  ## ruff, mypy and the style sheet; changes nothing
	$(VENV_PYTHON) -m ruff check .
	$(VENV_PYTHON) -m ruff format --check .
	$(VENV_PYTHON) -m mypy torch_remat
	$(VENV_PYTHON) .ci/prose.py

format: $(INSTALLED)  ## let ruff repair and format the code
	$(VENV_PYTHON) -m ruff check --fix .
	$(VENV_PYTHON) -m ruff format .

coverage: $(INSTALLED)  ## run the tests and show the branches that they miss
	$(VENV_PYTHON) -m coverage run -m pytest $(PYTEST_ARGS)
	$(VENV_PYTHON) -m coverage report

.PHONY: docs docs-serve gpu-wheels matrix release-check soak

soak: $(INSTALLED)  ## judge fresh drawn programs for SECONDS in JOBS processes
	$(VENV_PYTHON) -m tests.programs --seconds $(SECONDS) --jobs $(JOBS)


docs: .venv/.docs  ## build the site into site/; warnings and broken links are errors
	$(MKDOCS) build --strict

docs-serve: .venv/.docs  ## show the site, and build it again when a page changes
	$(MKDOCS) serve

release-check: .venv/.release  ## build wheel and sdist, install them in a clean environment, test them there
	.ci/release-check $(VENV_PYTHON) '$(TORCH)'

mutants: $(INSTALLED)  ## break the runtime in many places, one at a time: which test notices? MUTANTS_ARGS='--only NAME'
	$(VENV_PYTHON) -m tests.mutants $(MUTANTS_ARGS)

matrix:  ## run the tests on several versions of Python and torch; the environments stay in .matrix/
	.ci/matrix $(MATRIX)

bench: .venv/.bench  ## run the benchmarks; BENCH_ARGS=--help lists their options
	$(VENV_PYTHON) -m benchmarks $(BENCH_ARGS)

bench-compare: .venv/.bench  ## compare the newest two results; BENCH_ARGS=--quick compares a fresh run with the newest
	$(VENV_PYTHON) -m benchmarks.compare $(BENCH_ARGS)

gpu-wheels: .venv/bin/pip  ## fetch into .gpu-wheels/ what .ci/gpu needs besides torch, for Python GPU_PYTHON (3.12)
	$(PIP) download --only-binary :all: --python-version $(GPU_PYTHON) --dest .gpu-wheels \
		numpy optree expecttest hypothesis pytest pytest-xdist

demo: $(INSTALLED)  ## run docs/examples/demo.py
	$(VENV_PYTHON) docs/examples/demo.py $(DEMO_ARGS)

demo-distributed: $(INSTALLED)  ## run docs/examples/train_distributed.py on two processes; DEMO_ARGS='--parallel sp'
	$(VENV_PYTHON) -m torch.distributed.run --standalone --nproc-per-node 2 docs/examples/train_distributed.py $(DEMO_ARGS)

clean:  ## remove caches and build output; .venv stays
	rm -rf build dist site *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis .coverage .coverage.* htmlcov
	find benchmarks docs tests torch_remat -name __pycache__ -type d -prune -exec rm -rf {} +

# pip is the last thing that venv installs, so a half-made .venv is completed on the next call.
.venv/bin/pip:
	$(PYTHON) -m venv .venv

# Written anew only when TORCH differs from the one before, so `make test TORCH=...` installs that torch.
.venv/.torch: FORCE | .venv/bin/pip
	@echo '$(TORCH)' | cmp -s - $@ || echo '$(TORCH)' > $@

# The pinned torch goes first: the package asks only for a range, and pip would take the newest build in it.
$(INSTALLED): pyproject.toml .venv/.torch | .venv/bin/pip
	@echo 'Installing $(TORCH) and the tools into .venv, without further output: one to three minutes ...'
	$(PIP) install '$(TORCH)'
	$(PIP) install --editable '.[dev,plot,demo]'
	@touch $@

# Real models to measure; large, so only where they are asked for.
.venv/.bench: $(INSTALLED)
	$(PIP) install --editable '.[bench]'
	@touch $@

# What builds the site; the tests need nothing of it.
.venv/.docs: $(INSTALLED)
	$(PIP) install --editable '.[docs]'
	@touch $@

# What builds and checks a release.
.venv/.release: $(INSTALLED)
	$(PIP) install --editable '.[release]'
	@touch $@
