"""A shop whose workers are killed all the while, with the gate and without: `python -m examples.worker.demo`."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar
from urllib.parse import urlsplit

from kombu.exceptions import KombuError
from redis.exceptions import RedisError
from sqlalchemy import Engine, create_engine
from sqlalchemy.exc import SQLAlchemyError

from examples.worker import fenced, leash
from examples.worker.column import Column, Load, Pace, run
from examples.worker.crew import Crew, DemoError, processor
from examples.worker.load import deliveries, place
from examples.worker.progress import Progress
from examples.worker.settings import Settings
from examples.worker.tables import Entry, PlainEntry, create_tables
from examples.worker.tally import Result, table, verdict
from pgref.embedded import EmbeddedError, PostgresServer, ValkeyServer
from pgref.errors import PgrefError

__all__ = ["Options", "main", "parse"]

_N = TypeVar("_N", int, float)

KEEP_MEND_EVERY_SECONDS = 1.0
WRONG_SHOWN_MAX = 20


@dataclass(frozen=True, slots=True)
class Options:
    """What was asked for."""

    orders: int = 200
    kill_every: float = 1.0
    seed: int = 1
    provider: str = "keys"
    keep: bool = False


def parse(argv: Sequence[str] | None) -> Options:
    """Ends the process with a readable line when an option is out of its limits."""
    defaults = Options()
    parser = argparse.ArgumentParser(prog="make demo", description=__doc__)
    parser.add_argument("--orders", type=_orders, default=defaults.orders, metavar="N", help="how many (%(default)s)")
    parser.add_argument(
        "--kill-every",
        type=_seconds,
        default=defaults.kill_every,
        metavar="SECONDS",
        help="mean time between two kills (%(default)s)",
    )
    parser.add_argument("--seed", type=int, default=defaults.seed, metavar="N", help="of every choice (%(default)s)")
    parser.add_argument(
        "--provider",
        choices=["keys", "fences", "none"],
        default=defaults.provider,
        help="what the card processor honours: idempotency keys, fences, or nothing at all (%(default)s)",
    )
    parser.add_argument("--keep", action="store_true", help="leave the stack up and print where it is")
    return Options(**vars(parser.parse_args(argv)))


def _orders(text: str) -> int:
    number = _number(text, int)
    if not 1 <= number <= 100_000:
        raise argparse.ArgumentTypeError(f"must be 1 to 100000, not {text}")
    return number


def _seconds(text: str) -> float:
    number = _number(text, float)
    if not 0 < number <= 3600:
        raise argparse.ArgumentTypeError(f"must be more than 0 and at most 3600 seconds, not {text}")
    return number


def _number(text: str, kind: type[_N]) -> _N:
    try:
        return kind(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a number, not {text!r}") from None


@dataclass(frozen=True, slots=True)
class Stack:
    """The servers that both columns use."""

    dsn: str
    broker_url: str
    engine: Engine
    directory: Path

    def broker(self, database: int) -> str:
        return urlsplit(self.broker_url)._replace(path=f"/{database}").geturl()


@contextmanager
def servers() -> Iterator[Stack]:
    """Start PostgreSQL and Valkey, with a directory for files that is removed at the end."""
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="demo-")))
        postgres = stack.enter_context(PostgresServer())
        valkey = stack.enter_context(ValkeyServer())
        engine = create_engine(postgres.dsn, pool_pre_ping=True)
        stack.callback(engine.dispose)
        create_tables(engine)
        fenced.prepare(engine)
        yield Stack(postgres.dsn, valkey.url, engine, directory)


def plain_column(stack: Stack) -> Column:
    file = stack.directory / "plain-charges.jsonl"
    return Column("plain Celery", "plain", stack.broker(1), file, stack.engine, PlainEntry, list)


def fenced_column(stack: Stack) -> Column:
    file, backlog = stack.directory / "shop-charges.jsonl", fenced.backlog(stack.engine)
    return Column("fenced", "shop", stack.broker(0), file, stack.engine, Entry, backlog)


@contextmanager
def staffed(column: Column, stack: Stack, options: Options) -> Iterator[tuple[Crew, Settings]]:
    """Start the column's card processor, workers and, for the gate, beat."""
    with processor(column.charges_file, options.provider, options.seed) as url:
        settings = Settings(column.broker_url, stack.dsn, url, options.provider)
        gate = column.module == "shop"
        queues = "shop,upkeep" if gate else column.module
        with Crew(column.module, queues, settings.to_environment(), stack.directory, beat=gate) as crew:
            yield crew, settings


def demo(options: Options, progress: Progress) -> int:
    """Run both columns over the same load and return the exit code."""
    orders = place(options.orders, options.seed)
    load = Load(orders, deliveries(orders, options.seed), Pace.of(options.orders, options.kill_every), options.seed)
    progress.say("starting PostgreSQL and Valkey")
    with servers() as stack:
        plain = plain_column(stack)
        with staffed(plain, stack, options) as (crew, _):
            without = run(plain, crew, load, progress)
        gated = fenced_column(stack)
        with staffed(gated, stack, options) as (crew, settings):
            result = run(gated, crew, load, progress)
            code = report(result, without, progress)
            if code:
                progress.say(crew.log_tails())
            if options.keep:
                keep(crew, gated, settings, progress)
    return code


def report(gated: Result, plain: Result, progress: Progress) -> int:
    """Print the table and what was left, and return the exit code."""
    progress.say(f"\n{table([gated, plain])}\n")
    for left in gated.left:
        progress.say(f"left uncertain: {left.key}: {left.reason}")
    for line in gated.wrong[:WRONG_SHOWN_MAX]:
        progress.say(line)
    for column in (gated, plain):
        if column.waiting:
            progress.say(f"{column.title}: time was up while the broker still held {column.waiting} messages")
    code, sentence = verdict(gated, plain)
    progress.say(sentence)
    return code


def keep(crew: Crew, column: Column, settings: Settings, progress: Progress) -> None:
    """Say where everything is and wait for Ctrl-C."""
    for name, value in settings.to_environment().items():
        progress.say(f"export {name}={value}")
    progress.say(f"charges: {column.charges_file}\nthe stack stays up until Ctrl-C")
    with suppress(KeyboardInterrupt):
        while True:
            crew.mend()
            time.sleep(KEEP_MEND_EVERY_SECONDS)


def main(argv: Sequence[str] | None = None) -> int:
    options = parse(argv)
    if ancestor := os.environ.get("LEASH"):
        leash.follow(int(ancestor))
    progress = Progress(sys.stdout)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        return demo(options, progress)
    except KeyboardInterrupt:
        progress.say("stopped")
        return 130
    except (DemoError, EmbeddedError) as error:
        progress.say(f"demo: {error}")
    except (PgrefError, SQLAlchemyError, RedisError, KombuError) as error:
        progress.say(f"demo: PostgreSQL or Valkey went away, start again ({str(error).splitlines()[0]})")
    return 1


if __name__ == "__main__":
    sys.exit(main())
