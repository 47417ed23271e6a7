# uv from PATH, or bootstrapped from PyPI into .uv/
UV := $(or $(shell command -v uv 2>/dev/null),$(CURDIR)/.uv/bin/uv)
RUN := $(UV) run --frozen --all-extras

.PHONY: demo test proofs lowest rabbitmq mutants lint bench bench-celery bench-backlog guarantees

demo: $(UV)  ## the shop under kill -9; options in ARGS, e.g. ARGS="--orders 1000 --seed 7"
	LEASH=$$PPID $(RUN) python -m examples.worker.demo $(ARGS)

test: $(UV)  ## the tests, on servers that they start themselves
	$(RUN) pytest $(ARGS)

proofs: $(UV)  ## the long ones: a pooler, an older server, model, search, bad input, races, cut wires, signals
	$(RUN) pytest tests/lanes tests/property tests/faults $(ARGS)

lowest: $(UV)  ## tasks on the oldest versions that are allowed: Celery 5.5
	$(UV) run --no-project --isolated --resolution lowest-direct --with-editable ".[embedded,otel,prometheus,testing]" \
	  --with "pytest>=9,<10" --with "hypothesis>=6.100" --with "trustme>=1.2" --with "opentelemetry-sdk>=1.25" \
	  python -m pytest tests/backlog tests/celery tests/unit $(ARGS)

rabbitmq: $(UV)  ## tests over RabbitMQ, from the machine's package (Debian: rabbitmq-server), which they start themselves
	$(RUN) pytest tests/rabbitmq $(ARGS)

mutants: $(UV)  ## seeded bugs, each of which must turn the suite red; options in ARGS, e.g. ARGS="-j 4"
	$(RUN) python -m tests.mutants $(ARGS)

lint: $(UV)  ## style, types, layers
	$(RUN) ruff check .
	$(RUN) ruff format --check .
	$(RUN) mypy
	$(RUN) lint-imports

bench: $(UV)  ## figures beside their floors
	$(RUN) python -m bench $(ARGS)

bench-celery: $(UV)  ## figures of tasks on a real worker
	$(RUN) --group bench python -m bench.celery $(ARGS)

bench-backlog: $(UV)  ## figures of the backlog: settled by several sweeps, and listed
	$(RUN) python -m bench.backlog $(ARGS)

guarantees: $(UV)  ## docs/reference/guarantees.md from the suite's docstrings
	$(RUN) python -m pgref.conformance.table > guarantees.new && mv guarantees.new docs/reference/guarantees.md

$(CURDIR)/.uv/bin/uv:
	python3 -m venv .uv
	.uv/bin/pip install --quiet uv
