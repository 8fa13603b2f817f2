# `make demo` and `make test` need python3 (3.11 or newer) and nothing prepared. All paths are relative: the
# checkout may lie in a directory with spaces.

ARGS ?=

# ARGS goes to pytest as it is, and then nothing else is chosen: no division into passes, no parallel workers.
SUITE = .venv/bin/python $(if $(ARGS),-m pytest $(ARGS),scripts/suite.py $(1))

.PHONY: help demo test test-quick test-long test-all lint format docs bench chaos soak lock clean
.DEFAULT_GOAL := help

help:
	@echo 'make demo     set up keylane and Spark and run the demo on an embedded server (ARGS=--without-spark)'
	@echo 'make test     set up everything and run the tests   (ARGS="tests/core -x" for some of them)'
	@echo 'make test-quick  rules, properties and the simulation: for the edit loop'
	@echo 'make test-long   what make test leaves out: benchmarks, chaos, clusters, packing, pipelines'
	@echo 'make test-all    both'
	@echo 'make lint     ruff and mypy'
	@echo 'make format   let ruff format the code'
	@echo 'make docs     build the documentation site in .site  (ARGS=serve shows it on a local port)'
	@echo 'make bench    run the benchmarks                    (ARGS="feed --json")'
	@echo 'make chaos    make trouble and judge what comes of it (ARGS="rebalance --seconds 60 --seed 1")'
	@echo 'make soak     two million messages through one member: does its memory stay flat?'
	@echo 'make lock     take the newest versions into constraints.txt'
	@echo 'make clean    remove everything that make made'
	@echo 'PYTHON=...    use this Python instead of the first one found that is 3.11 or newer'

demo:
	@sh scripts/setup demo $(filter --without-spark,$(ARGS))
	@.venv/bin/python -m keylane.cli.main demo $(ARGS)

test:
	@sh scripts/setup test
	@$(call SUITE,test)

test-quick:
	@sh scripts/setup dev
	@$(call SUITE,quick)

test-long:
	@sh scripts/setup test
	@$(call SUITE,long)

test-all:
	@sh scripts/setup test
	@$(call SUITE,test long)

lint:
	@sh scripts/setup dev
	@.venv/bin/python -m ruff check .
	@.venv/bin/python -m ruff format --check .
	@.venv/bin/python -m mypy
	@.venv/bin/python scripts/lock.py --check

format:
	@sh scripts/setup dev
	@.venv/bin/python -m ruff format .
	@.venv/bin/python -m ruff check --fix .

docs:
	@sh scripts/setup dev
	@NO_MKDOCS_2_WARNING=1 .venv/bin/python -m mkdocs $(if $(ARGS),$(ARGS),build --quiet && echo 'open .site/index.html')

bench:
	@sh scripts/setup test
	@.venv/bin/python -m bench $(ARGS)

chaos:
	@sh scripts/setup test
	@.venv/bin/python -m chaos $(or $(ARGS),rebalance)

soak:
	@sh scripts/setup test
	@.venv/bin/python -m chaos memory $(ARGS)

lock:
	@sh scripts/setup dev
	@.venv/bin/python scripts/lock.py
	@sh scripts/setup dev

clean:
	@rm -rf .venv .peers .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist
	@find . -type d -name __pycache__ -prune -exec rm -rf {} +
