# make demo   install into .venv, pretrain on synthetic textures, evaluate, report: 3 to 4 minutes on two cores, plus the install
# make test   lint, type-check and test
# make lint   lint, type-check, and check the licences of what is installed
# make docs   check the spelling of the documents and build the site into site/; nothing is fetched but the tools, once
# make test-faults   the tests of faults and hostile input at full scale, with counts: kills, flipped bits, inputs; those that a
#             coverage-guided fuzzer finds if atheris is installed (.venv/bin/pip install atheris), and otherwise says so
# make test-distributed   training on two hosts (network namespaces) that die, hang and vanish; needs root and iproute2
# make test-slurm   jobs of a SLURM cluster of one machine that are warned, pushed aside and cancelled; needs root and
#             Debian's packages slurmctld, slurmd, slurm-client, munge
# make dist   build sdist and wheel into dist/; make test-dist installs and runs both outside the repository. Both need the network
# make audit  look up known vulnerabilities of what is installed; needs the network
.PHONY: demo docs test test-faults test-distributed test-slurm dist test-dist lint audit clean
PYTHON ?= python3
CONSTRAINTS ?= constraints.txt
BIN = .venv/bin

demo: .venv/.installed
	$(BIN)/tico pretrain --resume
	$(BIN)/tico evaluate runs/demo knn linear rankme
	$(BIN)/tico report runs/demo

docs: .venv/.installed-docs
	$(BIN)/typos README.md CHANGELOG.md CONTRIBUTING.md CODE_OF_CONDUCT.md SECURITY.md benchmarks/README.md docs/*.md docs/*/*.md
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

test: lint
	$(BIN)/python -m pytest -n auto --dist worksteal

test-faults: .venv/.installed-dev
	TICO_FAULTS=$${TICO_FAULTS:-20} $(BIN)/python -m pytest -m faults -s -rs

test-distributed: .venv/.installed-dev
	$(BIN)/python -m pytest -s -rs -o faulthandler_timeout=900 tests/distributed/two_hosts.py

test-slurm: .venv/.installed-dev
	$(BIN)/python -m pytest -s -rs -o faulthandler_timeout=900 tests/slurm/one_machine.py

dist: .venv/.installed-dev
	$(BIN)/pip install --quiet build
	rm -rf dist
	$(BIN)/python -m build --outdir dist

test-dist: dist
	$(BIN)/python -m pytest -s -rs tests/dist/clean_install.py

audit: .venv/.installed-dev
	$(BIN)/pip install --quiet pip-audit
	$(BIN)/pip-audit --skip-editable

lint: .venv/.installed-dev
	$(BIN)/ruff check src tests examples benchmarks docs/_build
	$(BIN)/ruff format --check src tests examples benchmarks docs/_build
	$(BIN)/mypy
	$(BIN)/python tests/licences.py

# Stamp files: pip runs again only if pyproject.toml or constraints.txt changed.
.venv/.installed: pyproject.toml $(CONSTRAINTS)
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --constraint $(CONSTRAINTS) --editable .
	touch $@

.venv/.installed-dev: .venv/.installed
	$(BIN)/pip install --quiet --constraint $(CONSTRAINTS) --editable ".[dev,docs,parquet,tiff,dicom,onnx,hub,lightning,wandb,mlflow,cloud,slurm]"
	touch $@

.venv/.installed-docs: .venv/.installed
	$(BIN)/pip install --quiet --constraint $(CONSTRAINTS) --editable ".[docs]"
	touch $@

clean:
	rm -rf .venv runs site dist .pytest_cache .mypy_cache .ruff_cache
