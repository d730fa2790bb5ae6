# Thin aliases; the scripts are the real commands.
.PHONY: install quickstart smoke test lint ci

install:
	bash scripts/install.sh retrieval train dev

quickstart:
	bash scripts/quickstart.sh

smoke:
	bash scripts/quickstart.sh --smoke

test:
	bash scripts/test.sh

lint: install
	.venv/bin/python -m ruff check .
	.venv/bin/python -m mypy

ci:
	bash .ci/run
