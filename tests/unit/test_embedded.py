"""Real servers are started and ended here; nothing waits but on processes, pipes and sockets."""

from __future__ import annotations

import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psycopg
import pytest
import redis

from pgref.embedded import MissingBinary, PostgresServer, ServerFailed, ValkeyServer, __main__, _binaries, _server

ROOT = Path(__file__).parents[2]
NOBODY = 65534
GONE_SECONDS_MAX = 30
FAST = {"fsync": "off"}
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="root only: changes user")

START_BOTH = """
import os, signal
from pathlib import Path
from pgref.embedded import PostgresServer, ValkeyServer
root = Path(os.environ["SERVERS_IN"])
servers = PostgresServer(directory=root, settings={"fsync": "off"}).start(), ValkeyServer(directory=root).start()
"""
REPORT_AND_WAIT = "print(*[server.pid for server in servers], flush=True)\nsignal.pause()\n"
FORK = "if os.fork() == 0: os._exit(len(os.read(0, 1)))\n"  # lives until the test closes its stdin


@pytest.fixture(scope="module")
def postgres() -> Iterator[PostgresServer]:
    with PostgresServer() as server:
        yield server


@pytest.fixture
def short_directory() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="pgref-test-", dir="/tmp"))
    path.chmod(0o711)
    yield path
    shutil.rmtree(path)


def ask(dsn: str, query: str) -> object:
    with psycopg.connect(dsn.replace("+psycopg", "")) as connection:
        row = connection.execute(query).fetchone()
    return row and row[0]


def redis_of(server: ValkeyServer) -> redis.Redis:
    return redis.Redis(host=server.host, port=server.port)


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


@contextmanager
def watched(*pids: int) -> Iterator[list[int]]:
    """Yield handles that stay right when a pid is used again."""
    handles = [os.pidfd_open(pid) for pid in pids]
    yield handles
    for handle in handles:
        os.close(handle)


def has_ended(handle: int, seconds: float = GONE_SECONDS_MAX) -> bool:
    return bool(select.select([handle], [], [], seconds)[0])


@contextmanager
def parent_process(code: str, directory: Path) -> Iterator[tuple[subprocess.Popen[str], list[int]]]:
    """Run a Python process that prints pids in a line once its servers run."""
    environment = {**os.environ, "SERVERS_IN": str(directory)}
    command = [sys.executable, "-c", code]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, cwd=ROOT, env=environment, stdin=pipe, stdout=pipe, text=True) as process:
        try:
            assert process.stdout
            yield process, [int(pid) for pid in process.stdout.readline().split()]
        finally:
            process.kill()


def test_start_connect_stop(postgres: PostgresServer) -> None:
    """Both addresses lead to the server, with durable settings and 200 connections."""
    assert postgres.dsn == f"postgresql+psycopg://postgres@127.0.0.1:{postgres.port}/postgres"
    assert ask(postgres.dsn, "SHOW fsync") == "on"
    assert ask(postgres.conninfo, "SELECT current_setting('max_connections')::int") == 200


def test_create_database(postgres: PostgresServer) -> None:
    """Any name is quoted, in SQL and in the URL."""
    dsn = postgres.create_database('a "b"/c')
    assert ask(dsn, "SELECT current_database()") == 'a "b"/c'


def test_valkey_start_stop() -> None:
    """The URL leads to the server, which is gone after the context."""
    with ValkeyServer() as server, watched(server.pid) as handles:
        assert redis_of(server).ping()
        assert server.url == f"redis://127.0.0.1:{server.port}/0"
        server.stop()
        assert has_ended(handles[0], 0)
        with pytest.raises(ServerFailed, match="Valkey is not running"):
            _ = server.pid


@pytest.mark.parametrize("end", [PostgresServer.stop, PostgresServer.kill])
def test_postgres_keeps_data_and_port(end: object, postgres: PostgresServer) -> None:
    """After a stop as after a crash the committed data are there, on the same port."""
    port, pid = postgres.port, postgres.pid
    ask(postgres.dsn, "SELECT 1")
    dsn = postgres.create_database(f"kept_{pid}")
    end(postgres)  # type: ignore[operator]
    assert not postgres.running
    postgres.start()
    assert (postgres.port, postgres.pid != pid) == (port, True)
    assert ask(dsn, "SELECT current_database()") == f"kept_{pid}"


def test_kill_is_a_crash(postgres: PostgresServer) -> None:
    """After ``kill`` PostgreSQL has to recover, and a session sees its connection cut without a farewell."""
    with psycopg.connect(postgres.conninfo) as connection:
        postgres.kill()
        with pytest.raises(psycopg.OperationalError) as cut:
            connection.execute("SELECT 1")
    postgres.start()
    # A backend that notices the loss of its postmaster before it is killed still says so.
    assert cut.value.sqlstate in {None, "57P01"}
    assert "was not properly shut down" in postgres.log_text()


def test_valkey_restart_keeps_appended_data() -> None:
    """With ``appendonly`` keys survive a restart, on the same port."""
    with ValkeyServer(appendonly=True, settings={"appendfsync": "always"}) as server:
        port = server.port
        redis_of(server).set("key", "value")
        server.restart()
        assert redis_of(server).get("key") == b"value"
        server.kill()
        server.start()
        assert redis_of(server).get("key") == b"value"
        assert server.port == port


def test_close_removes_the_directory(short_directory: Path) -> None:
    """Nothing is left in the file system, and the next start begins anew."""
    server = ValkeyServer(directory=short_directory).start()
    assert any(short_directory.iterdir())
    server.close()
    assert not any(short_directory.iterdir())
    with server:
        assert redis_of(server).ping()


@pytest.mark.parametrize("kind", [PostgresServer, ValkeyServer])
def test_port_collision(kind: type[PostgresServer | ValkeyServer], monkeypatch: pytest.MonkeyPatch) -> None:
    """A port taken between choice and start is replaced; a port asked for is not."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        free = _server.free_port("127.0.0.1")
        ports = iter([port, free])
        monkeypatch.setattr(_server, "free_port", lambda _: next(ports))
        with kind() as server:
            assert server.port == free
        with pytest.raises(ServerFailed, match="already in use"):
            kind(port=port).start()


def test_two_at_once() -> None:
    """Servers of one process do not clash."""
    with ValkeyServer() as one, ValkeyServer() as other:
        redis_of(one).set("key", "value")
        assert redis_of(other).get("key") is None


def test_server_outlives_the_thread_that_started_it() -> None:
    """The end of a thread is not the end of the process."""
    server = ValkeyServer()
    thread = threading.Thread(target=server.start)
    thread.start()
    thread.join()
    with server, watched(server.pid) as handles:
        assert not has_ended(handles[0], 0.1)
        assert redis_of(server).ping()


def test_own_session() -> None:
    """Ctrl-C for our process group does not reach the server."""
    with ValkeyServer() as server:
        assert os.getsid(server.pid) not in (os.getsid(0), os.getsid(parent_of(server.pid)))


@pytest.mark.parametrize(
    "code", [START_BOTH + REPORT_AND_WAIT, START_BOTH + FORK + REPORT_AND_WAIT], ids=["alone", "fork"]
)
def test_killed_parent_leaves_nothing(code: str, short_directory: Path) -> None:
    """SIGKILL for the parent ends servers and supervisors and removes all files, even if a fork holds the pipes."""
    with parent_process(code, short_directory) as (parent, pids), watched(*pids, *map(parent_of, pids)) as handles:
        assert len(pids) == 2
        parent.kill()
        assert all(has_ended(handle) for handle in handles)
        assert not any(short_directory.iterdir())


def test_forgotten_servers_end_with_the_interpreter(short_directory: Path) -> None:
    """A parent that ends without ``close`` leaves nothing either."""
    code = START_BOTH + "print(*[server.pid for server in servers], flush=True)"
    with parent_process(code, short_directory) as (parent, pids):
        assert parent.wait(GONE_SECONDS_MAX) == 0
        assert len(pids) == 2
        assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
        assert not any(short_directory.iterdir())


def test_abandoned_directory_is_removed_at_the_next_start(short_directory: Path) -> None:
    """Only when the supervisor is killed too, files remain; the next start removes them, and spares locked ones."""
    with parent_process(START_BOTH + REPORT_AND_WAIT, short_directory) as (parent, pids):
        with watched(*pids) as handles:
            for pid in pids:
                os.kill(parent_of(pid), signal.SIGKILL)
            assert all(has_ended(handle) for handle in handles)
        parent.kill()
    abandoned = set(short_directory.iterdir())
    assert len(abandoned) == 2
    with ValkeyServer(directory=short_directory) as one, ValkeyServer(directory=short_directory) as other:
        assert not abandoned & set(short_directory.iterdir())
        assert redis_of(one).ping()
        assert redis_of(other).ping()
        assert len(list(short_directory.iterdir())) == 2


@pytest.mark.parametrize("kind", [PostgresServer, ValkeyServer])
def test_missing_binary(
    kind: type[PostgresServer | ValkeyServer], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The message names what is missing, the extra and the Debian package, in one line."""
    hide_binaries(monkeypatch, tmp_path)
    with pytest.raises(MissingBinary) as missing:
        kind()
    message = str(missing.value)
    assert message.startswith(f"{kind.name} not found: no ")
    assert "pip install 'pgref[embedded]'" in message
    assert "apt-get install" in message
    assert "\n" not in message
    with pytest.raises(MissingBinary, match=str(tmp_path)):
        kind(binaries=tmp_path)


def hide_binaries(monkeypatch: pytest.MonkeyPatch, empty: Path) -> None:
    monkeypatch.setattr(_binaries, "find_spec", lambda _: None)
    monkeypatch.setattr(_binaries, "_DEBIAN_VERSIONS", empty)
    monkeypatch.setenv("PATH", str(empty))


def test_binaries_of_the_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Without wheels, PATH is searched, then Debian's directories, the highest version first."""
    hide_binaries(monkeypatch, tmp_path)
    for version in ("9", "15"):
        place_programs(tmp_path / version / "bin", "postgres", "initdb")
    assert _binaries.postgres_bin(None) == tmp_path / "15" / "bin"
    monkeypatch.setenv("PATH", str(tmp_path / "9" / "bin"))
    assert _binaries.postgres_bin(None) == tmp_path / "9" / "bin"
    place_programs(tmp_path / "9" / "bin", "redis-server")
    assert _binaries.valkey_program(None) == tmp_path / "9" / "bin" / "redis-server"


def place_programs(directory: Path, *names: str) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    for name in names:
        (directory / name).touch(mode=0o755)


@pytest.mark.parametrize("kind", [PostgresServer, ValkeyServer])
def test_failure_shows_the_log(kind: type[PostgresServer | ValkeyServer], short_directory: Path) -> None:
    """A setting the server rejects is quoted from its log, in one line, and nothing is left."""
    with pytest.raises(ServerFailed, match="no_such_setting") as failed:
        kind(settings={"no_such_setting": "1"}, directory=short_directory).start()
    assert "\n" not in str(failed.value)
    assert not any(short_directory.iterdir())


@pytest.mark.parametrize("kind", [PostgresServer, ValkeyServer])
def test_path_too_long(kind: type[PostgresServer | ValkeyServer], tmp_path: Path) -> None:
    """A directory in which a socket could not be made is refused before anything is made in it."""
    with pytest.raises(ValueError, match="the limit is 107"):
        kind(directory=tmp_path / ("long" * 25))


def test_long_tmpdir_does_no_harm(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """TMPDIR plays no part."""
    monkeypatch.setenv("TMPDIR", str(tmp_path / ("long" * 25)))
    with ValkeyServer() as server:
        assert redis_of(server).ping()


@needs_root
def test_root_with_unreachable_binaries(postgres: PostgresServer, short_directory: Path) -> None:
    """As root, when nobody cannot reach the binaries, the server runs in a user namespace."""
    short_directory.chmod(0o700)
    (short_directory / "bin").symlink_to(postgres._bin)
    if subprocess.run(["unshare", "--user", "true"], check=False).returncode != 0:
        pytest.skip("no user namespaces here")
    with PostgresServer(binaries=short_directory / "bin", settings=FAST) as server:
        assert ask(server.dsn, "SELECT 1") == 1
        supervisor, pid = parent_of(server.pid), server.pid
        assert Path(f"/proc/{pid}/uid_map").read_text() != Path("/proc/self/uid_map").read_text()
        with watched(pid) as handles:
            os.kill(supervisor, signal.SIGKILL)
            assert has_ended(handles[0])


@needs_root
def test_normal_user(short_directory: Path) -> None:
    """Both servers start for a user without rights, and are gone after SIGKILL."""
    python = python_for_nobody()
    if python is None:
        pytest.skip("no interpreter and site-packages that user nobody can reach")
    short_directory.chmod(0o777)
    environment = {"PYTHONPATH": python_path(), "SERVERS_IN": str(short_directory), "PATH": os.defpath}
    command = [python, "-c", START_BOTH + REPORT_AND_WAIT]
    with as_nobody(command, environment) as process:
        assert process.stdout
        pids = [int(pid) for pid in process.stdout.readline().split()]
        assert [Path(f"/proc/{pid}").stat().st_uid for pid in pids] == [NOBODY, NOBODY]
        with watched(*pids, *map(parent_of, pids)) as handles:
            process.kill()
            assert all(has_ended(handle) for handle in handles)
    assert not any(short_directory.iterdir())


def python_path() -> str:
    return os.pathsep.join([str(ROOT), *filter(None, sys.path)])


def python_for_nobody() -> str | None:
    name = f"python{sys.version_info.major}.{sys.version_info.minor}"
    for python in filter(None, [sys.executable, shutil.which(name, path=os.defpath)]):
        try:
            with as_nobody([python, "-c", "import psycopg, pgref.embedded"], {"PYTHONPATH": python_path()}) as trial:
                if trial.wait() == 0:
                    return python
        except PermissionError:
            continue
    return None


def as_nobody(command: list[str], environment: dict[str, str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command, cwd="/", env=environment, stdout=subprocess.PIPE, text=True, user=NOBODY, group=NOBODY, extra_groups=[]
    )


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_command(number: signal.Signals) -> None:
    """``python -m pgref.embedded`` prints both addresses, and at SIGTERM or Ctrl-C ends with 0 and leaves nothing."""
    command = [sys.executable, "-m", "pgref.embedded"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        lines = dict(process.stdout.readline().strip().split("=", 1) for _ in range(2))
        assert ask(lines["FENCED_DSN"], "SELECT 1") == 1
        assert redis.Redis.from_url(lines["BROKER_URL"]).ping()
        process.send_signal(number)
        assert process.wait(GONE_SECONDS_MAX) == 0
    with pytest.raises(psycopg.OperationalError):
        ask(lines["FENCED_DSN"], "SELECT 1")
    with pytest.raises(redis.ConnectionError):
        redis.Redis.from_url(lines["BROKER_URL"]).ping()


def test_command_without_binaries(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It prints one line and returns 1."""
    hide_binaries(monkeypatch, tmp_path)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    assert __main__.main() == 1
    printed = capsys.readouterr()
    assert printed.err.startswith("PostgreSQL not found")
    assert (printed.err.count("\n"), printed.out) == (1, "")
