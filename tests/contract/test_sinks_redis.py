"""The sink in Valkey passes the suite of fenced sinks, and what its script does beyond it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import redis
from redis.backoff import NoBackoff
from redis.crc import key_slot
from redis.exceptions import DataError, ResponseError
from redis.retry import Retry

from pgref.conformance import FencedSinkConformance
from pgref.embedded import ValkeyServer
from pgref.errors import FenceStale, InvalidArgument, OutcomeUnknown, SchemaError, Unavailable
from pgref.keys import FENCE_MAX
from pgref.redis import Recorder, RedisSink
from pgref.redis.sinks import COMMAND_WORDS_MAX

BEFORE = 5
"""The fence that every resource of `sink` has seen."""
NEXT = BEFORE + 1


def writing(*commands: str | list[Any]) -> Callable[[Recorder], None]:
    """Return a write of commands given as text, or as words where these are no text."""

    def write(recorder: Recorder) -> None:
        for command in commands:
            recorder.execute_command(*(command.split() if isinstance(command, str) else command))

    return write


class TestRedisSink(FencedSinkConformance[Recorder]):
    backend: redis.Redis

    @pytest.fixture
    def conformance_backend(self, client: redis.Redis) -> Any:
        return client

    def make_sink(self) -> RedisSink:
        return RedisSink(self.backend)

    def write_value(self, connection: Recorder, resource: str, value: str) -> None:
        connection.set(f"value:{resource}", value)

    def read_value(self, resource: str) -> str | None:
        value: Any = self.backend.get(f"value:{resource}")
        return value.decode() if isinstance(value, bytes) else value


class TestRedisSinkOfAnotherClient(TestRedisSink):
    """Whatever the client does with answers."""

    @pytest.fixture
    def conformance_backend(self, valkey: ValkeyServer) -> Iterator[Any]:
        with redis.Redis.from_url(valkey.url, decode_responses=True, encoding="latin-1", protocol=2) as client:
            yield client


@pytest.fixture(scope="module")
def client(valkey: ValkeyServer) -> Iterator[redis.Redis]:
    with redis.Redis.from_url(valkey.url) as client:
        yield client


@pytest.fixture
def sink(client: redis.Redis, key: str) -> RedisSink:
    """A sink that has seen `BEFORE` for the resource of the test, and its data."""
    sink = RedisSink(client)
    sink.write_fenced(key, BEFORE, writing(f"SET {key}:string before PX 100000000", f"RPUSH {key}:list 1 2"))
    return sink


def keys_with(client: redis.Redis, part: str) -> list[bytes]:
    return sorted(bytes(name) for name in client.scan_iter(count=1000) if part.encode() in name)


@pytest.fixture
def unchanged(client: redis.Redis, sink: RedisSink, key: str) -> Callable[[], None]:
    """Check that the resource is as `sink` left it, to the byte and to the millisecond of its expiry."""

    def look() -> tuple[Any, ...]:
        held = [(name, client.dump(name), client.pexpiretime(name.decode())) for name in keys_with(client, key)]
        return held, sink.seen_fence(key)

    before = look()
    assert len(before[0]) == 3

    def unchanged() -> None:
        assert look() == before

    return unchanged


# Comparing


@pytest.mark.parametrize("fence", [2**53, 2**53 + 1, 2**62, FENCE_MAX - 1, 9, 99, 10**18])
def test_neighbours_differ(client: redis.Redis, key: str, fence: int) -> None:
    """G30, G31: fences are exact where numbers of the server's Lua are not."""
    sink = RedisSink(client)
    sink.seal(key, fence)
    sink.seal(key, fence + 1)
    assert sink.seen_fence(key) == fence + 1
    with pytest.raises(FenceStale):
        sink.seal(key, fence)
    sink.seal(key, fence + 1)


def test_overtaken_after_the_first_look(valkey: ValkeyServer, sink: RedisSink, client: redis.Redis, key: str) -> None:
    """G30, G33: the script judges again: nothing of a write that was overtaken is written."""

    def write(commands: Recorder) -> None:
        commands.set(f"{key}:string", "stale")
        with redis.Redis.from_url(valkey.url) as other:
            RedisSink(other).seal(key, NEXT + 1)

    with pytest.raises(FenceStale) as info:
        sink.write_fenced(key, NEXT, write)
    assert (info.value.fence, info.value.seen) == (NEXT, NEXT + 1)
    assert client.get(f"{key}:string") == b"before"


def test_the_server_forgot_the_script(sink: RedisSink, client: redis.Redis, key: str) -> None:
    client.script_flush()
    sink.write_fenced(key, NEXT, lambda c: c.set(f"{key}:string", "after"))
    assert (sink.seen_fence(key), client.get(f"{key}:string")) == (NEXT, b"after")


@pytest.mark.parametrize("value", ["a fence", "", "007", "-1", "1.0", " 1", "1\n", "²", "9" * 20], ids=ascii)
def test_what_is_there_is_no_fence(client: redis.Redis, key: str, value: str) -> None:
    """G34: what another program left there is neither compared nor overwritten."""
    sink = RedisSink(client, "alien:")
    fence_key = f"alien:{sink.tag(key)}"
    client.set(fence_key, value)
    for call in (lambda: sink.seen_fence(key), lambda: sink.seal(key, 1)):
        with pytest.raises(SchemaError):
            call()
    assert client.get(fence_key) == value.encode()


def test_a_list_is_no_fence(client: redis.Redis, key: str) -> None:
    sink = RedisSink(client)
    client.rpush(f"pgref:sink:{sink.tag(key)}", 1)
    for call in (lambda: sink.seen_fence(key), lambda: sink.seal(key, 1)):
        with pytest.raises(SchemaError):
            call()


# All or nothing


def test_many_commands_are_one_write(sink: RedisSink, client: redis.Redis, key: str) -> None:
    def write(commands: Recorder) -> None:
        commands.incrby(f"{key}:number", 3)
        commands.hset(f"{key}:hash", mapping={b"a": 1.5, b"\x00\xff": memoryview(b"\xfe")})
        commands.xgroup_create(f"{key}:stream", "readers", mkstream=True)
        commands.execute_command("RPUSH", f"{key}:list", *range(3, COMMAND_WORDS_MAX + 1))

    sink.write_fenced(key, NEXT, write)
    assert client.get(f"{key}:number") == b"3"
    assert client.hgetall(f"{key}:hash") == {b"a": b"1.5", b"\x00\xff": b"\xfe"}
    assert client.exists(f"{key}:stream")
    assert client.llen(f"{key}:list") == COMMAND_WORDS_MAX


@pytest.mark.parametrize("fence", [BEFORE, NEXT])
def test_a_refused_command_undoes_all(sink: RedisSink, key: str, unchanged: Callable[[], None], fence: int) -> None:
    """G32: Redis itself rolls nothing back: changed, deleted, new and expiring keys are put back, and the fence."""
    write = writing(
        f"SET {key}:string half",
        f"DEL {key}:list",
        f"MSET {key}:new 1 {key}:newer 2",
        f"RENAME {key}:string {key}:renamed",
        f"RPUSH {key}:list 3",
        f"INCR {key}:list",
        f"SET {key}:never 1",
    )
    with pytest.raises(ResponseError, match=r"WRONGTYPE.*command # 6 \(INCR\).*nothing was written"):
        sink.write_fenced(key, fence, write)
    unchanged()


def test_a_refused_first_write_leaves_nothing(client: redis.Redis, key: str) -> None:
    """G32: not even a fence."""
    with pytest.raises(ResponseError):
        RedisSink(client).write_fenced(key, 1, writing(f"SET {key}:a text", f"INCR {key}:a"))
    assert keys_with(client, key) == []


def test_a_value_that_cannot_be_sent(sink: RedisSink, key: str, unchanged: Callable[[], None]) -> None:
    with pytest.raises(DataError):
        sink.write_fenced(key, NEXT, writing(f"SET {key}:string half", ["SET", f"{key}:string", None]))
    unchanged()


@pytest.mark.parametrize(
    "command",
    [
        ["PUBLISH", "channel", "text"],
        ["FLUSHDB"],
        ["SELECT", 1],
        ["EVAL", "return 1", 0],
        ["MOVE", "key", 1],
        ["COPY", "key", "other", "DB", 1],
        ["MIGRATE", "host", 1, "key", 0, 10],
        ["DEL", *["x"] * COMMAND_WORDS_MAX],
    ],
    ids=lambda command: command[0],
)
def test_what_could_not_be_undone_is_refused(
    sink: RedisSink, key: str, unchanged: Callable[[], None], command: list[Any]
) -> None:
    """G32: after commands that are undone."""
    with pytest.raises(InvalidArgument):
        sink.write_fenced(key, NEXT, writing(f"SET {key}:string half", command))
    unchanged()


def test_the_fence_itself_is_no_data(sink: RedisSink, key: str, unchanged: Callable[[], None]) -> None:
    with pytest.raises(InvalidArgument, match="the fence itself"):
        sink.write_fenced(key, NEXT, lambda c: c.delete(f"pgref:sink:{sink.tag(key)}"))
    unchanged()


@pytest.mark.parametrize("command", [["NOSUCH", "key"], ["SET", "key"], ["EVAL", "return 1", 1, "key"]])
def test_a_command_that_the_server_does_not_take(
    sink: RedisSink, key: str, unchanged: Callable[[], None], command: list[Any]
) -> None:
    with pytest.raises(ResponseError, match=r"command # 2"):
        sink.write_fenced(key, NEXT, writing(f"SET {key}:string half", command))
    unchanged()


@pytest.mark.parametrize("right", ["restore", "del", "dump", "command|getkeys", "del+fences"])
def test_a_user_who_could_not_undo(
    valkey: ValkeyServer, client: redis.Redis, key: str, unchanged: Callable[[], None], right: str
) -> None:
    """G32: rights that are missing for undoing are found before anything is written."""
    right, _, for_fences = right.partition("+")
    rules = [("+@all", "~pgref:sink:*")] if for_fences else []
    allowed: dict[str, Any] = {"keys": ["*"], "categories": ["+@all"], "commands": [f"-{right}"], "selectors": rules}
    client.acl_setuser("limited", enabled=True, nopass=True, reset=True, **allowed)
    with (
        redis.Redis(host=valkey.host, port=valkey.port, username="limited", password="any") as limited,
        pytest.raises(ResponseError, match="NOPERM|no permissions|can't run"),
    ):
        RedisSink(limited).write_fenced(key, NEXT, writing(f"SET {key}:string half", f"INCR {key}:string"))
    unchanged()


def test_commands_after_the_write_are_refused(sink: RedisSink, key: str) -> None:
    kept = sink.write_fenced(key, NEXT, lambda commands: commands)
    with pytest.raises(InvalidArgument):
        kept.set(f"{key}:string", "late")


# Lost connections


class CutConnection(redis.Connection):
    """Loses the answer to a script, after the server has given it."""

    error: type[BaseException] = redis.ConnectionError
    scripts: int = 0
    cut: bool = False

    def send_command(self, *args: Any, **options: Any) -> None:
        CutConnection.cut = args[0] in {"EVALSHA", "EVAL"}
        CutConnection.scripts += CutConnection.cut
        super().send_command(*args, **options)  # type: ignore[no-untyped-call]

    def read_response(self, *args: Any, **options: Any) -> Any:
        answer = super().read_response(*args, **options)
        if CutConnection.cut:
            CutConnection.cut = False
            raise CutConnection.error("cut")
        return answer


@pytest.fixture
def cut(valkey: ValkeyServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[redis.Redis]:
    """A client that repeats what was lost, as redis-py does by default."""
    monkeypatch.setattr(CutConnection, "scripts", 0)
    where: dict[str, Any] = {"host": valkey.host, "port": valkey.port, "retry": Retry(NoBackoff(), 3)}
    pool = redis.ConnectionPool(connection_class=CutConnection, **where)
    yield redis.Redis(connection_pool=pool)
    pool.disconnect()


@pytest.mark.usefixtures("sink")
@pytest.mark.parametrize("error", [redis.ConnectionError, redis.TimeoutError, ConnectionResetError])
def test_a_lost_answer_is_unknown_and_not_sent_again(
    cut: redis.Redis, client: redis.Redis, key: str, monkeypatch: pytest.MonkeyPatch, error: Any
) -> None:
    """G26: never a success and never a plain retry, which would count twice here."""
    monkeypatch.setattr(CutConnection, "error", error)
    with pytest.raises(OutcomeUnknown):
        RedisSink(cut).write_fenced(key, NEXT, lambda c: c.incr(f"{key}:count"))
    assert (CutConnection.scripts, client.get(f"{key}:count")) == (1, b"1")
    assert RedisSink(cut).seen_fence(key) == NEXT


def test_the_same_client_alone_would_send_it_twice(cut: redis.Redis, client: redis.Redis, key: str) -> None:
    """What the test above protects from."""
    cut.eval("return redis.call('INCR', KEYS[1])", 1, f"{key}:count")
    assert client.get(f"{key}:count") == b"2"


def test_a_signal_leaves_a_clean_connection(
    cut: redis.Redis, sink: RedisSink, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answer that nobody waited for does not become that of the next command."""

    def read_response(self: CutConnection, *args: Any, **options: Any) -> Any:
        if CutConnection.cut:
            CutConnection.cut = False
            raise KeyboardInterrupt
        return redis.Connection.read_response(self, *args, **options)

    monkeypatch.setattr(CutConnection, "read_response", read_response)
    with pytest.raises(KeyboardInterrupt):
        RedisSink(cut).seal(key, NEXT)
    assert RedisSink(cut).seen_fence(key) == NEXT


def test_no_server(key: str) -> None:
    with ValkeyServer() as server:
        url = server.url
    with redis.Redis.from_url(url) as client:
        for call in (RedisSink(client).seen_fence, lambda resource: RedisSink(client).seal(resource, 1)):
            with pytest.raises(Unavailable):
                call(key)


@pytest.mark.parametrize(
    "setting", [("maxmemory", "1"), ("replicaof", "127.0.0.1 1"), ("min-replicas-to-write", "1")], ids=lambda s: s[0]
)
def test_a_server_that_takes_no_writes(key: str, setting: tuple[str, str]) -> None:
    with ValkeyServer(settings=dict([setting])) as server, redis.Redis.from_url(server.url) as client:
        sink = RedisSink(client)
        with pytest.raises(Unavailable):
            sink.write_fenced(key, 1, writing(f"SET {key}:a 1", f"SET {key}:b 2"))


# Names


def test_one_slot_for_fence_and_data() -> None:
    for resource in ("account:7", "ü", "a}b", "{", "}", "%7D", "{{}}", "a{b}c"):
        tag = RedisSink.tag(resource)
        assert (
            key_slot(f"pgref:sink:{tag}".encode()) == key_slot(f"value:{tag}".encode()) == key_slot(tag[1:-1].encode())
        )


def test_tags_differ() -> None:
    resources = ["}", "%7D", "%257D", "{", "%7B", "%", "%25"]
    assert len({RedisSink.tag(resource) for resource in resources}) == len(resources)


@pytest.fixture
def half_cluster() -> Iterator[redis.Redis]:
    """One node of a cluster, which serves the slot of "b" and not that of "a"."""
    with ValkeyServer(settings={"cluster-enabled": "yes"}) as server, redis.Redis.from_url(server.url) as client:
        client.config_set("cluster-require-full-coverage", "no")
        client.execute_command("CLUSTER ADDSLOTSRANGE", 0, 8000)
        for _ in range(100_000):
            if client.cluster("INFO")["cluster_state"] == "ok":
                break
        yield client


def test_other_slots_of_a_cluster(half_cluster: redis.Redis) -> None:
    """G32: what lies elsewhere is refused by the server, and the rest undone."""
    sink = RedisSink(half_cluster)
    sink.write_fenced("b", 1, writing("SET value:{b} x", "APPEND value:{b} y"))
    with pytest.raises(ResponseError):
        sink.write_fenced("b", 2, writing("SET value:{b} half", "SET {a} 1", "SET value:{b} end"))
    assert (sink.seen_fence("b"), half_cluster.get("value:{b}")) == (1, b"xy")
    for call in (sink.seen_fence, lambda resource: sink.seal(resource, 1)):
        with pytest.raises(Unavailable):
            call("a")


@pytest.mark.parametrize("prefix", ["{a}", "a}", "a\0", 1])
def test_prefix_that_is_none(client: redis.Redis, prefix: Any) -> None:
    with pytest.raises(InvalidArgument):
        RedisSink(client, prefix)


def test_sinks_of_two_prefixes_are_two(client: redis.Redis, key: str) -> None:
    RedisSink(client, "one:").seal(key, 2)
    RedisSink(client, "two:").seal(key, 1)
    assert [RedisSink(client, prefix).seen_fence(key) for prefix in ("one:", "two:")] == [2, 1]
