# make demo   compile the small checkpoint in examples/ and generate text with it
# make test   all tests;  make check  lint, types, import directions, tests;  make soak  the long runs;  make test-gpu  on a GPU
PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin
DEMO = build/demo/tiny-r1-wint4.engine
export OMP_NUM_THREADS ?= 1

.PHONY: demo test test-gpu check lint soak clean

$(VENV)/.demo: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable .
	touch $@

$(VENV)/.test: $(VENV)/.demo
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[test]'
	touch $@

demo: $(VENV)/.demo
	mkdir -p $(dir $(DEMO))
	$(BIN)/dsc compile --recipe recipes/tiny-r1-wint4.yaml --model examples/tiny-r1 --output $(DEMO)
	$(BIN)/dsc inspect $(DEMO) --fusion
	$(BIN)/dsc generate $(DEMO) --prompt 'def ' --max-tokens 60 --temperature 0
	@echo
	@echo 'Next: $(BIN)/dsc inspect $(DEMO)            everything about this engine'
	@echo '      $(BIN)/dsc inspect $(DEMO) --layer 1  one layer, node by node'
	@echo '      $(BIN)/dsc compile --recipe r1-wint4  what a real deployment asks for'

test: $(VENV)/.test
	$(BIN)/pytest -n 2 --dist loadfile

check: lint test

lint: $(VENV)/.test
	mkdir -p build/typing && ln -sfn ../.. build/typing/dsc
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	MYPYPATH=build/typing $(BIN)/mypy
	PYTHONPATH=build/typing $(BIN)/lint-imports

# Without atheris, its tests say so and the others run.
soak: $(VENV)/.test
	-$(BIN)/pip install --quiet --disable-pip-version-check --editable '.[soak]'
	$(BIN)/pytest -n 2 --soak tests/soak

# On a machine with a Hopper GPU and the packages of the extras [gpu] and [test].
test-gpu:
	$(PYTHON) -m pip install --quiet --editable '.[gpu,test]'
	pytest tests/gpu

clean:
	rm -rf build
