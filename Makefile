# One word per chore; each does its own set-up in .venv on a machine that has python3 (>= 3.11) and make.
PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt

.PHONY: demo test test-all fuzz soak matrix wheel lock lint format docs bench browser frontend frontend-check screenshots clean
.DELETE_ON_ERROR:

demo: .venv/core
	$(BIN)/unlazy demo

test: .venv/test .venv/cluster
	$(BIN)/python -m pytest -n 2 -m "not slow and not adapters and not browser"

test-all: .venv/test .venv/cluster .venv/adapters .venv/fast .venv/browser
	$(BIN)/python -m pytest -n 2 -m "not browser"
	$(BIN)/python -m pytest -m browser

# New examples for the tests that make their own, ROUNDS times over; make test and make test-all try the same ones every time.
ROUNDS ?= 10
fuzz: .venv/test .venv/cluster .venv/fast
	for round in $$(seq $(ROUNDS)); do HYPOTHESIS_PROFILE=fuzz $(BIN)/python -m pytest -q -n 2 -m hypothesis || exit 1; done

# Random kills of a training, fuzzed calls and damaged runs; ends in one line with what was lost.
KILLS ?= 1000
CALLS ?= 10000
soak: .venv/test .venv/cluster
	$(BIN)/python tests/soak.py --kills $(KILLS) --calls $(CALLS)

# The oldest and the newest packages that we claim, on every Python named.
PYTHONS ?= python3.11
matrix:
	.ci/matrix $(PYTHONS)

# The wheel, and whether it serves alone: a new environment, an empty folder, no checkout.
wheel: .venv/python
	.ci/wheel

# Hashes of what constraints.txt pins, as found on this platform: pip install --require-hashes -r requirements.lock
lock: .venv/python
	$(BIN)/python -m pip install --dry-run --ignore-installed --quiet --constraint constraints.txt --report .venv/report.json '.[studio,cluster,fast]'
	$(BIN)/python .ci/lock.py .venv/report.json > requirements.lock

lint: .venv/lint
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: .venv/lint
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: .venv/docs
	$(BIN)/python docs/generate.py
	$(BIN)/sphinx-build --quiet --fail-on-warning docs docs/_build/html
	@echo "docs/_build/html/index.html"

bench: .venv/core .venv/browser
	$(BIN)/python benchmarks/ensemble.py
	$(BIN)/python benchmarks/overlap.py
	$(BIN)/python benchmarks/panels.py
	$(BIN)/python benchmarks/tangent_operator.py
	$(BIN)/unlazy bench kernels --out results/bench/kernels.json
	$(BIN)/python benchmarks/adaptive.py
	$(BIN)/python benchmarks/scope.py
	$(BIN)/python benchmarks/studio.py

# The page's sources are TypeScript; what they build to is kept with the package, so that nobody else needs Node.
frontend:
	cd frontend && npm ci --no-audit --no-fund && npm run build

frontend-check: frontend
	cd frontend && npm run check && npm test
	git diff --exit-code --stat -- src/unlazy/studio/static/studio

screenshots: .venv/browser
	$(BIN)/unlazy demo
	$(BIN)/python docs/screenshots.py unlazy-demo

# Debian's Chromium for the page tests; UNLAZY_CHROMIUM names another one.
browser:
	command -v chromium || (apt-get update && apt-get install -y --no-install-recommends chromium)

clean:
	rm -rf .venv unlazy-demo docs/_build .mypy_cache .ruff_cache

.venv/python:
	$(PYTHON) -c 'import sys; sys.exit("unlazy needs Python 3.11 or newer, this is " + sys.version) if sys.version_info < (3, 11) else None'
	$(PYTHON) -m venv .venv
	touch $@

.venv/core: .venv/python pyproject.toml constraints.txt
	$(PIP) --editable '.[studio]'
	touch $@

.venv/test .venv/cluster .venv/adapters .venv/fast .venv/browser .venv/lint .venv/docs: .venv/%: .venv/core
	$(PIP) --editable '.[$*]'
	touch $@
