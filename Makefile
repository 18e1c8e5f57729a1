# One target per thing that a person does:
#
#   make demo    the main job on a real model: compile, verify, run here and emulated
#   make test    all tests
#   make lint    format, lint and types
#   make bench   the numbers in benchmarks/, printed as Markdown
#   make conformance   docs/conformance.md: ONNX's own cases for each operator, compiled and run
#   make fuzz    random networks against ONNX Runtime, for MINUTES (10) from SEED (1) on
#   make clean   remove what the others left in this checkout
#
# Each first installs what it needs and does not ask: Python packages into .venv, and, as root,
# system packages through apt-get. Without root it says what is missing and ends.

PYTHON := .venv/bin/python
# Cold, the tests build two emulated boards and compile every model: 25 minutes were seen on two busy
# cores.
TEST_LIMIT_S := 4500

.PHONY: demo test lint bench conformance fuzz clean

demo:
	@sh tools/setup.sh demo
	@$(PYTHON) demo/demo.py

test:
	@sh tools/setup.sh test
	@timeout --kill-after=30 $(TEST_LIMIT_S) $(PYTHON) -m pytest || { code=$$?; \
	    [ $$code -ne 124 ] || echo "make test: over its limit of $(TEST_LIMIT_S) s" >&2; exit $$code; }

lint:
	@sh tools/setup.sh lint
	$(PYTHON) -m ruff format --check .
	$(PYTHON) -m ruff check .
	$(PYTHON) -m mypy
	clang-format --dry-run --Werror \
	    $$(find device_scripts examples tests/device_scripts -name '*.h' -o -name '*.hpp' -o -name '*.cc')

bench:
	@sh tools/setup.sh test
	@$(PYTHON) benchmarks/first_light.py

conformance:
	@sh tools/setup.sh test
	@$(PYTHON) tools/conformance.py

fuzz:
	@sh tools/setup.sh test
	@$(PYTHON) tests/compile/fuzz.py --minutes $(or $(MINUTES),10) --seed $(or $(SEED),1)

clean:
	rm -rf .venv build dist bundles out
	find . -name __pycache__ -prune -exec rm -rf {} +
	rm -rf .pytest_cache .ruff_cache .mypy_cache
