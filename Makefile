# The few commands that people type. `.ci/run` does all of it in a new environment.

.PHONY: install check unit test docs wheel

install:
	pip install -e '.[test,docs]' pre-commit build

check:
	ruff check .
	ruff format --check .
	mypy
	lint-imports

unit:
	pytest -n 3 -m unit

test:
	pytest -n 3

docs:
	mkdocs build --strict

wheel:
	python -m build --wheel
