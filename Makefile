# Needs GNU make and Python 3.11 to 3.14. Name an interpreter with PYTHON=...

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PYTHON ?=
CANDIDATES := $(if $(PYTHON),$(PYTHON),python3 python3.14 python3.13 python3.12 python3.11)
CHECKED := $(wildcard src tests benchmarks scripts docs)
LOCK_VENV := .venv-lock
LOCK_UV := uv==0.13.7
LOCK_FLAGS ?=
IMAGE_FLAGS ?=
VERSION := $(shell sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)
# The folders of unit tests: no server, browser or database, and seconds rather than minutes.
UNITS := $(addprefix tests/,core catalog policies engine control config runtime kubernetes)
PYTEST := $(BIN)/python -m pytest -n auto --dist loadfile --no-loadscope-reorder
STARTED := $(shell date +%s)
TOOK = @echo "make $@: passed in $$(( $$(date +%s) - $(STARTED) )) seconds"

.DEFAULT_GOAL := help
.PHONY: help setup demo reproduction check test test-k8s test-k8s-node test-real control-plane soak lint format bench lock image release clean

help: ## Show this list
	@awk 'BEGIN { FS = ":.*## " } /^[a-z0-9-]+:.*## / { printf "  make %-13s %s\n", $$1, $$2 }' Makefile

setup: $(STAMP) ## Create .venv and install the pinned packages and the project

# The lock file is complete, so pip need not resolve anything (--no-deps): older versions of pip look up
# dependencies with extras again, find a release newer than the pinned one, and refuse it for want of a hash.
# The stamp holds the folder it was made in: an environment that was copied or
# moved along with the tree still points to the old place, so it is made again.
ifneq ($(shell cat $(STAMP) 2>/dev/null),$(CURDIR))
.PHONY: $(STAMP)
endif

$(STAMP): requirements.lock pyproject.toml
	@py=; \
	for candidate in $(CANDIDATES); do \
		if "$$candidate" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 15))' >/dev/null 2>&1; then \
			py=$$candidate; break; \
		fi; \
	done; \
	if [ -z "$$py" ]; then \
		echo "error: slicewise needs Python 3.11 to 3.14; none found as: $(CANDIDATES)." >&2; \
		echo "       Install one, or name it: make setup PYTHON=/path/to/python3" >&2; \
		exit 1; \
	fi; \
	if ! "$$py" -c 'import ensurepip, venv' >/dev/null 2>&1; then \
		echo "error: $$py has no venv module (on Debian and Ubuntu: apt install python3-venv)." >&2; \
		exit 1; \
	fi; \
	echo "Setting up $(VENV) with $$("$$py" --version): installing the pinned packages (a minute or two the first time)."; \
	"$$py" -m venv --clear $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes --no-deps -r requirements.lock
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-build-isolation --no-deps -e .
	@echo "$(CURDIR)" > $(STAMP)
	@echo "$(VENV) is ready."

demo: setup ## Start the service with a simulated cluster and live traffic; Ctrl-C ends it
	@$(BIN)/slicewise demo $(DEMO)

reproduction: setup ## Run the published experiment and write demo-report/
	$(BIN)/slicewise reproduce --runs 20 --seed 1 --out demo-report

check: lint ## The inner loop: lint, types, import rules and unit tests, in about two minutes
	$(PYTEST) -q $(UNITS)
	$(TOOK)

test: lint control-plane ## The gate: lint, types, import rules, every test, the coverage gate
	$(PYTEST) --cov --cov-report=term --cov-report=json:coverage.json
	$(BIN)/python scripts/coverage_gate.py coverage.json
	$(TOOK)

test-k8s: control-plane ## The Kubernetes tests alone, with NVIDIA's driver (Go 1.26; the driver needs root)
	$(BIN)/python -m pytest tests/kubernetes_e2e
	$(TOOK)

test-k8s-node: setup ## A real node for Kubernetes: kubelet, containerd, runc and NVIDIA's driver (Go 1.26, root)
	@$(BIN)/python -m tests.kubernetes_e2e.programs --node
	$(BIN)/python -m pytest tests/kubernetes_e2e/check_real_node.py
	$(TOOK)

# Tests against large builds of foreign software belong here, and fail where the build does.
test-real: setup ## Tests against foreign software built from source: Kubernetes, a node of it, NVIDIA's driver
	@$(BIN)/python -m tests.kubernetes_e2e.programs --node
	$(BIN)/python -m pytest tests/kubernetes_e2e tests/kubernetes_e2e/check_real_node.py
	$(TOOK)

# What the Kubernetes tests start. Without Go they are skipped, but in CI nothing is.
control-plane: setup
	@$(BIN)/python -m tests.kubernetes_e2e.programs || \
		{ [ -z "$$CI" ] && echo "The Kubernetes tests will be skipped."; }

lint: setup ## Check style, formatting, types and import rules
	$(BIN)/python scripts/unasync.py --check
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy $(CHECKED)
	$(BIN)/lint-imports --no-logo

format: setup ## Fix what can be fixed automatically and format the code
	$(BIN)/ruff check --fix-only
	$(BIN)/ruff format

soak: export PYTEST_ADDOPTS = --timeout 14400 -o faulthandler_timeout=15000
soak: setup ## Long runs: crashes on each database, 20,000 raw HTTP messages, agents at every call, churn at 10,000 GPUs
	SLICEWISE_CRASH_CYCLES=500 $(BIN)/python -m pytest -q tests/e2e/test_crash.py
	SLICEWISE_FUZZ_MESSAGES=20000 SLICEWISE_PROXY_TRIES=1000 $(BIN)/python -m pytest -q tests/e2e/hostile/test_fuzz.py tests/e2e/hostile/test_proxies.py
	SLICEWISE_TENANT_EXAMPLES=200 $(BIN)/python -m pytest -q tests/e2e/test_tenants.py
	SLICEWISE_QUEUE_EXAMPLES=1000 $(BIN)/python -m pytest -q tests/engine/test_fair_queue.py tests/control/test_promises.py
	SLICEWISE_AGENT_ROUNDS=5 $(BIN)/python -m pytest -q tests/e2e/agents
	SLICEWISE_K8S_ROUNDS=1 $(BIN)/python -m pytest -q tests/kubernetes_e2e/test_never_*.py
	$(BIN)/python -m tests.kubernetes_e2e.churn --pods 2000
	SLICEWISE_K8S_ORDERS=20000 $(BIN)/python -m pytest -q tests/kubernetes/test_any_order.py
	$(BIN)/python -m tests.e2e.soak

bench: setup ## Run every benchmarks/bench_*.py
	@set -e; \
	for file in benchmarks/bench_*.py; do \
		if [ ! -f "$$file" ]; then echo "error: no benchmarks/bench_*.py" >&2; exit 1; fi; \
		echo "$$file"; \
		$(BIN)/python "$$file"; \
	done

lock: ## Recompile requirements.lock (newest versions: LOCK_FLAGS=--upgrade)
	@echo "Compiling requirements.lock."
	@python3 -m venv --clear $(LOCK_VENV)
	@$(LOCK_VENV)/bin/python -m pip install --quiet --disable-pip-version-check $(LOCK_UV)
	@if [ -f requirements.lock ]; then cp requirements.lock $(LOCK_VENV)/pins; fi
	@$(LOCK_VENV)/bin/uv pip compile --quiet --universal --python-version 3.11 --fork-strategy fewest \
		--all-extras --generate-hashes --no-emit-index-url --no-header $(LOCK_FLAGS) \
		pyproject.toml --output-file $(LOCK_VENV)/pins
	@if grep -n '://' $(LOCK_VENV)/pins; then \
		echo "error: the lock file must not hold a URL" >&2; exit 1; \
	fi
	@{ \
		echo "# Every package of the development environment, pinned with hashes, for Python 3.11 to"; \
		echo "# 3.14. Made from pyproject.toml: regenerate with \`make lock\`."; \
		grep -v '^#' $(LOCK_VENV)/pins; \
	} > $(LOCK_VENV)/requirements.lock
	@mv $(LOCK_VENV)/requirements.lock requirements.lock
	@printf 'setuptools>=77\nwheel\n' > $(LOCK_VENV)/build.in
	@$(LOCK_VENV)/bin/uv pip compile --quiet --universal --python-version 3.11 --fork-strategy fewest \
		--extra service --extra postgres --extra oidc --extra k8s --extra agent --constraint requirements.lock --generate-hashes \
		--no-emit-index-url --no-header --no-annotate pyproject.toml $(LOCK_VENV)/build.in \
		--output-file $(LOCK_VENV)/image
	@{ \
		echo "# The packages of the container image and what installs them: those of ../requirements.lock."; \
		echo "# Regenerate with \`make lock\`."; \
		cat $(LOCK_VENV)/image; \
	} > deploy/requirements.lock
	@rm -rf $(LOCK_VENV)

image: ## Build the container image (podman, buildah or docker)
	@for builder in podman buildah docker; do \
		if command -v $$builder >/dev/null; then found=$$builder; break; fi; \
	done; \
	if [ -z "$$found" ]; then echo "error: none of podman, buildah and docker is installed" >&2; exit 1; fi; \
	format=$$([ "$$found" = docker ] || echo "--format docker"); \
	$$found build $$format -f deploy/Containerfile -t slicewise:$(VERSION) $(IMAGE_FLAGS) .

release: setup ## Build and check what a release consists of, in dist/; nothing is uploaded
	@if [ -n "$$(git status --porcelain)" ]; then echo "error: there are changes that are not committed" >&2; exit 1; fi
	@grep -q "^## \[$(VERSION)\] - [0-9]" CHANGELOG.md || \
		{ echo "error: CHANGELOG.md has no date for version $(VERSION)" >&2; exit 1; }
	rm -rf dist
	$(BIN)/python -m build --no-isolation --outdir dist
	rm -rf build src/*.egg-info
	$(BIN)/python -m twine check --strict dist/*
	$(BIN)/python -m pytest -q tests/deploy
	$(MAKE) --no-print-directory image
	@ls -l dist
	$(TOOK)

clean: ## Remove .venv and everything the other targets leave behind
	rm -rf $(VENV) $(LOCK_VENV) build dist demo-report slicewise-demo artefacts htmlcov src/*.egg-info
	rm -rf .coverage .coverage.* coverage.json .hypothesis .import_linter_cache
	rm -rf .mypy_cache .pytest_cache .ruff_cache
	find $(CHECKED) -name __pycache__ -type d -prune -exec rm -rf {} +
