# make demo   install into .venv, pretrain on synthetic textures, evaluate, report: 3 to 4 minutes on two cores, plus the install
# make test   lint, type-check and test
# make lint   lint and type-check only
.PHONY: demo test lint clean
PYTHON ?= python3
BIN = .venv/bin

demo: .venv/.installed
	$(BIN)/tico pretrain --resume
	$(BIN)/tico evaluate runs/demo knn linear rankme
	$(BIN)/tico report runs/demo

test: lint
	$(BIN)/python -m pytest

lint: .venv/.installed-dev
	$(BIN)/ruff check src tests examples benchmarks
	$(BIN)/ruff format --check src tests examples benchmarks
	$(BIN)/mypy

# Stamp files: pip runs again only if pyproject.toml or constraints.txt changed.
.venv/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --constraint constraints.txt --editable .
	touch $@

.venv/.installed-dev: .venv/.installed
	$(BIN)/pip install --quiet --constraint constraints.txt --editable ".[dev,parquet,tiff]"
	touch $@

clean:
	rm -rf .venv runs .pytest_cache .mypy_cache .ruff_cache
