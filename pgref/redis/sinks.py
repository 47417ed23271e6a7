"""A fenced sink in Redis or Valkey: one server-side script compares, raises the fence and writes (G30-G34, G27)."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Sequence
from importlib.resources import files
from typing import Any, Final, Literal, NoReturn, Self, TypeVar

import redis
from redis import exceptions
from redis.commands import CoreCommands

from pgref.errors import FenceStale, InvalidArgument, OutcomeUnknown, SchemaError, Unavailable, cause_of
from pgref.keys import shown, valid_fence, valid_key, valid_text

__all__ = ["COMMAND_WORDS_MAX", "WRITE_WORDS_MAX", "Recorder", "RedisSink"]

T = TypeVar("T")

COMMAND_WORDS_MAX = 5_000
"""Most words of one command: what the server's Lua can pass on is limited."""
WRITE_WORDS_MAX = 1_000_000
"""Most words of one fenced write: the server takes 2²⁰ in one request."""

_SCRIPT: Final = files("pgref.redis").joinpath("write_fenced.lua").read_bytes()
_FENCE: Final = re.compile(r"[1-9][0-9]{0,18}")
_SHA: Final = hashlib.sha1(_SCRIPT, usedforsecurity=False).hexdigest()

_LOST = (exceptions.ConnectionError, exceptions.TimeoutError, OSError)
_NOT_NOW = frozenset(
    {
        "ASK",
        "BUSY",
        "CLUSTERDOWN",
        "LOADING",
        "MASTERDOWN",
        "MISCONF",
        "MOVED",
        "NOREPLICAS",
        "OOM",
        "READONLY",
        "TRYAGAIN",
    }
)
_REACHES_FURTHER = frozenset({b"MIGRATE", b"MOVE"})


class Recorder(CoreCommands):
    """What ``write`` gets: redis-py's commands, which it notes instead of sending them.

    As on redis-py's pipeline a command returns the recorder, not a reply: to read, use your client, which is then no
    part of the fenced write. Raises redis-py's ``DataError`` for values that are no str, bytes or number, and
    `InvalidArgument` for a command that could not be undone or is too long.
    """

    # redis-py's types of a client ask for these two.
    _is_async_client: Literal[False] = False
    _event_dispatcher: Any = None

    def __init__(self, client: redis.Redis) -> None:
        self._encode: Callable[[Any], Any] = client.get_encoder().encode
        self._commands: list[Sequence[bytes]] = []
        self._open = True

    def execute_command(self, *args: Any, **_options: Any) -> Self:
        """Note a command: ``recorder.execute_command("SET", key, value)`` is ``recorder.set(key, value)``."""
        if not self._open:
            raise InvalidArgument("commands must be given within write, not after it")
        # As redis-py packs them: the names of some commands have two words.
        name, *rest = [bytes(self._encode(arg)) for arg in args]
        self._commands.append(_valid_command([*name.split(), *rest]))
        return self

    def close(self) -> Sequence[Sequence[bytes]]:
        """Take no more commands. Return those noted, each as its words."""
        self._open = False
        return self._commands


class RedisSink:
    """A sealable fenced sink for redis-py's ``redis.Redis``; ``write`` gets a `Recorder`.

        def write(commands):
            commands.set("{account:7}:balance", 12)
            commands.rpush("{account:7}:log", "paid")

        sink.write_fenced("account:7", lease.fence, write)

    What ``write`` noted is sent with the fence to one script, which the server runs as one step. **Nothing written**
    is true for every error but `OutcomeUnknown`: for an exception in ``write``; for a fence that was overtaken after
    ``write`` was called (`FenceStale`); and for a command that the server refuses (redis-py's ``ResponseError``, such
    as WRONGTYPE). Redis does not roll scripts back, so the script keeps what keys held (DUMP) before every command but
    the last, and puts it back. So a write of several commands costs a copy of each value that it changes, and takes
    only commands that name their keys and stay within the database: others, such as PUBLISH and MOVE, are refused with
    `InvalidArgument`.

    A lost answer is `OutcomeUnknown`, and nothing is sent twice, whatever the client's retry policy. Writing again is
    then safe only if the commands may run twice.

    **Cluster.** All keys of one write must share a slot with the fence, whose key is ``prefix`` and the resource in
    braces: put `tag(resource)` in your keys. Cluster clients are not supported, a client of the right node is.

    **The server.** Redis 7 or Valkey, with a user that may EVALSHA, EVAL, COMMAND GETKEYS, GET, SET, DEL, DUMP,
    PEXPIRETIME and RESTORE. Fences are as durable as the data beside them: fence and data are replicated and stored
    together, and lost together in a failover. They must not be evicted: ``maxmemory-policy`` must be ``noeviction`` or
    ``volatile-…``.

    Besides the contract's errors: `Unavailable` (nothing written), `OutcomeUnknown`, `SchemaError` where the fence's
    key holds something else.
    """

    def __init__(self, client: redis.Redis, prefix: str = "pgref:sink:") -> None:
        """Connects at first use. Raises `InvalidArgument` for a prefix with braces, which would be a hash tag."""
        if set(valid_text(prefix, "prefix")) & set("{}"):
            raise InvalidArgument(f"prefix must not contain braces: {prefix}")
        self._client = client
        self._prefix = prefix

    def write_fenced(self, resource: str, fence: int, write: Callable[[Recorder], T]) -> T:
        """Compare ``fence`` with the highest seen and run what ``write`` notes, as one step. Return ``write``'s answer.

        Equal passes, higher raises seen. A fence known to be lower is refused before ``write`` is called; one that is
        overtaken later after it. Either way nothing is written.
        """
        valid_fence(fence)
        seen = self.seen_fence(resource)
        if fence < seen:
            raise _stale(resource, fence, seen)
        recorder = Recorder(self._client)
        try:
            answer = write(recorder)
        finally:
            commands = recorder.close()
        self._write(resource, fence, commands)
        return answer

    def seal(self, resource: str, fence: int) -> None:
        """Raise the seen fence to ``fence`` without writing, so that lower writers are refused from now on (G27)."""
        self._write(valid_key(resource, "resource"), valid_fence(fence), [])

    def seen_fence(self, resource: str) -> int:
        """Return the highest fence seen for ``resource``, 0 if none."""
        key = self._fence_key(valid_key(resource, "resource"))
        try:
            value: Any = self._client.get(key)
        except exceptions.ResponseError as error:
            ours = _translated(error, resource)
            raise ours from cause_of(ours, error)
        except _LOST as error:
            raise Unavailable(f"the server is not reachable: {error}") from error
        return 0 if value is None else _fence(value, resource)

    @staticmethod
    def tag(resource: str) -> str:
        """Return the hash tag that brings a key into the slot of the fence of ``resource``, braces included."""
        escaped = valid_key(resource, "resource").replace("%", "%25").replace("{", "%7B").replace("}", "%7D")
        return f"{{{escaped}}}"

    def _fence_key(self, resource: str) -> bytes:
        return f"{self._prefix}{self.tag(resource)}".encode()

    def _write(self, resource: str, fence: int, commands: Sequence[Sequence[bytes]]) -> None:
        words = [word for command in commands for word in (b"%d" % len(command), *command)]
        if len(words) > WRITE_WORDS_MAX:
            raise InvalidArgument(f"a fenced write must be at most {WRITE_WORDS_MAX} words, not {len(words)}")
        verdict, *details = self._run(resource, fence, words)
        if verdict == b"stale":
            raise _stale(resource, fence, int(details[0]))
        if verdict == b"alien":
            _fence(details[0], resource)
        if verdict != b"written":
            _raise_failure(verdict, details, resource, commands)

    def _run(self, resource: str, fence: int, words: Sequence[bytes]) -> Sequence[Any]:
        """Send the script once. The client's own way would send it again after a lost answer."""
        pool = self._client.connection_pool
        try:
            connection = pool.get_connection()
        except _LOST as error:
            raise Unavailable(f"the server is not reachable: {error}") from error
        arguments = (1, self._fence_key(resource), fence, *words)
        try:
            try:
                return _answer(connection, "EVALSHA", _SHA, *arguments)
            except exceptions.NoScriptError:
                return _answer(connection, "EVAL", _SCRIPT, *arguments)
        except (exceptions.ResponseError, exceptions.BusyLoadingError) as error:
            ours = _translated(error, resource)
            raise ours from cause_of(ours, error)
        except _LOST as error:
            raise OutcomeUnknown(f"the answer about {shown(resource)} was lost: {error}") from error
        finally:
            pool.release(connection)


def _answer(connection: Any, *command: Any) -> Sequence[Any]:
    try:
        connection.send_command(*command)
        answer: Sequence[Any] = connection.read_response(disable_decoding=True)
    except exceptions.ResponseError:
        raise
    except BaseException:
        connection.disconnect()  # an answer may be on its way, and must not become that of the next command
        raise
    return answer


def _valid_command(words: Sequence[bytes]) -> Sequence[bytes]:
    name = words[0].upper()
    if len(words) > COMMAND_WORDS_MAX:
        raise InvalidArgument(f"a command must be at most {COMMAND_WORDS_MAX} words, not {len(words)}")
    if name in _REACHES_FURTHER or (name == b"COPY" and b"DB" in [word.upper() for word in words[3:]]):
        raise InvalidArgument(f"{name.decode()} reaches beyond the database, so it could not be undone")
    return words


def _fence(value: bytes | str, resource: str) -> int:
    text = value if isinstance(value, str) else value.decode(errors="replace")
    if not _FENCE.fullmatch(text):
        raise _alien(resource)
    return int(text)


def _alien(resource: str) -> SchemaError:
    return SchemaError(f"the key of the fence of {shown(resource)} holds something else")


def _stale(resource: str, fence: int, seen: int) -> FenceStale:
    return FenceStale(f"{shown(resource)} has seen fence {seen}", fence=fence, seen=seen)


def _raise_failure(
    verdict: bytes, details: Sequence[Any], resource: str, commands: Sequence[Sequence[bytes]]
) -> NoReturn:
    position, problem = int(details[0]), details[1].decode(errors="replace")
    command = commands[position - 1][0].decode(errors="replace") if position else "SET"
    what = f"command # {position} ({command}) of the fenced write on {shown(resource)}"
    if verdict == b"broken":
        raise OutcomeUnknown(f"{what} failed and could not be undone: {problem}")
    code, _, text = problem.partition(" ")
    if code == "INVALID":
        raise InvalidArgument(f"{what} {text}; nothing was written")
    if code in _NOT_NOW:
        raise Unavailable(f"{what} was refused: {problem}")
    raise exceptions.ResponseError(f"{problem}: {what}; nothing was written")


def _translated(error: exceptions.RedisError, resource: str) -> Exception:
    """Say what the server's refusal of a whole request means: nothing was written."""
    code = getattr(error, "status_code", None) or str(error).partition(" ")[0]
    if code in _NOT_NOW or isinstance(error, exceptions.BusyLoadingError):
        return Unavailable(f"the server does not serve {shown(resource)} now: {error}")
    return _alien(resource) if code == "WRONGTYPE" else error
