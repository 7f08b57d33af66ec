# `make demo` and `make test` need Python 3.11 to 3.13 and make, nothing else.
# pip's own settings (PIP_INDEX_URL, PIP_FIND_LINKS, ...) are honoured.
PYTHON ?= python3
BIN := .venv/bin
CONSTRAINTS ?= constraints.txt
# What Python compiles is kept for the next run and for the interpreters that tests start, whatever the shell says.
TESTS := OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -q -n 2 --dist loadfile

.PHONY: setup demo test check bench faults mutants tables docs clean

setup: .venv/installed

.venv/installed: setup.cfg $(CONSTRAINTS)
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet -c $(CONSTRAINTS) -e '.[cpu,test]'
	touch $@

# The lowest versions that setup.cfg allows, each as a pin.
build/lowest.txt: setup.cfg
	mkdir -p build
	sed -nE 's/^    ([A-Za-z0-9-]+)(\[.*\])?>=([0-9.]+).*/\1==\3/p' $< > $@

demo: setup
	$(BIN)/lam demo

test: setup
	$(TESTS)

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/pyright
	$(TESTS) -m "long and not slow"

bench: setup
	$(BIN)/python benchmarks/ggn.py
	$(BIN)/python benchmarks/embed.py
	$(BIN)/python benchmarks/online.py
	$(BIN)/python benchmarks/gallery.py

faults: setup
	$(BIN)/python benchmarks/faults.py

mutants: setup
	$(BIN)/python benchmarks/mutants.py

tables: setup
	$(BIN)/python benchmarks/table.py

docs: setup
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[docs]'
	$(BIN)/mkdocs build --strict --site-dir build/docs

clean:
	rm -rf .venv build dist *.egg-info
