# `make demo` and `make test` do all their own set-up in .venv from a bare python3.
PYTHON ?= python3
# One environment an interpreter, so that PYTHON=python3.12 does not reuse another version's.
VENV   ?= .venv$(if $(filter python3,$(PYTHON)),,-$(notdir $(PYTHON)))
BIN    := $(VENV)/bin
DEMO   ?= results/demo
TABLES ?= results/tables
GENERATIONS := v4 v5e v5p v6e v7x

.PHONY: demo test reliability test-slow fuzz lint kernels browser screenshots docs tables clean
.DELETE_ON_ERROR:

$(VENV)/installed: pyproject.toml autotune/__init__.py
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --editable .
	touch $@

$(VENV)/installed-test: $(VENV)/installed
	$(BIN)/python -m pip install --quiet --editable '.[test]'
	touch $@

demo: $(VENV)/installed  ## sweep two small layouts for a TPU v6e that is not here, emit their table
	$(BIN)/autotune sweep --target v6e --preset smoke --out $(DEMO)
	$(BIN)/autotune emit $(DEMO) --allow-modelled -o $(DEMO).py
	@echo 'To type autotune without its path: . $(BIN)/activate. A shape of your own: autotune sweep --help'

test: $(VENV)/installed-test lint  ## everything but the slow suite; what needs a browser is skipped without one
	$(BIN)/python -m pytest -m 'not slow' --numprocesses auto --maxprocesses 4 --dist worksteal

reliability: $(VENV)/installed-test  ## the tables of docs/dev/reliability.md, from kills and faults: half an hour
	AUTOTUNE_RELIABILITY=1 $(BIN)/python -m pytest tests/faults -m 'slow or not slow'

test-slow: $(VENV)/installed-test  ## the programs that take the compiler minutes
	$(BIN)/python -m pytest -m slow

fuzz: $(VENV)/installed-test  ## many hostile inputs for all that reads others' files; what finds something goes to build/fuzz
	$(BIN)/python -m pytest tests/fuzz --hypothesis-profile fuzz --numprocesses auto --dist worksteal

lint: $(VENV)/installed-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

kernels: $(VENV)/installed  ## the kernels of serving stacks that tests compile; without them those tests are skipped
	@test -d build/kernels/tpu_inference || ($(BIN)/python -m pip download --quiet --no-deps --require-hashes \
	  --dest build/wheels --requirement tests/kernels.txt && \
	  $(BIN)/python -m zipfile --extract build/wheels/tpu_inference-*.whl build/kernels) || \
	  echo 'the kernels of serving stacks could not be fetched' >&2

browser:  ## the browser in which tests look at reports, where root may install it from packages
	@command -v chromedriver > /dev/null || test "$$(id -u)" != 0 || ! command -v apt-get > /dev/null || \
	  (apt-get -qq update && DEBIAN_FRONTEND=noninteractive apt-get -qq install --no-install-recommends -y \
	  chromium chromium-driver fonts-dejavu-core) > /dev/null || echo 'no browser could be installed' >&2

screenshots: $(VENV)/installed-test browser  ## the pictures in docs/report, by the tests that look at reports
	AUTOTUNE_SCREENSHOTS=docs/report $(BIN)/python -m pytest tests/analysis/test_report_browser.py -k 'pictures or failures'

docs: $(VENV)/installed-test  ## docs/cli.md, from the commands
	$(BIN)/python -m autotune.cli.reference > docs/cli.md

tables: $(GENERATIONS:%=table-%)  ## the committed tables: hours a generation; goes on where it was stopped

table-%: $(VENV)/installed
	@# A first run goes on from the rows that are committed.
	test -d $(TABLES)/$* || test ! -d autotune/tables/rows/$* || (mkdir -p $(TABLES) && cp -r autotune/tables/rows/$* $(TABLES)/$*)
	for preset in published serving 'long --max-num-seqs 64'; do \
	  $(BIN)/autotune sweep --target $* --preset $$preset --vmem-limit 100MiB --compile-timeout 7200 \
	  --out $(TABLES)/$* > /dev/null || exit; done
	$(BIN)/python tools/make_tables.py $(TABLES)/$* $*

clean:
	rm -rf .venv .venv-* build *.egg-info
