# make demo   install into .venv, pretrain on drawn textures, evaluate, report; three minutes on two cores, and the install
# make test   lint, type-check and test
# make lint   only lint and type-check
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

# The stamps make a second start quick: pip runs again only when what it reads has changed.
.venv/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --constraint constraints.txt --editable .
	touch $@

.venv/.installed-dev: .venv/.installed
	$(BIN)/pip install --quiet --constraint constraints.txt --editable ".[dev,parquet,tiff]"
	touch $@

clean:
	rm -rf .venv runs .pytest_cache .mypy_cache .ruff_cache
