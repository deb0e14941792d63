"""Disks that lack what a database needs: locks, shared memory, space, permissions; and damaged files."""

from __future__ import annotations

import logging
import os
import re
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from sqlalchemy import event, insert, select
from sqlalchemy.exc import OperationalError

from db import connect, error_messages, filesystem, models
from db.connect import open_store
from db.errors import StoreDamagedError, StoreError, StoreReadOnlyError


@pytest.fixture
def database(tmp_path: Path) -> str:
    return str(tmp_path / "results.db")


@pytest.fixture
def mounts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Replace this machine's table of mounts."""

    def write(*lines: str) -> None:
        table = tmp_path / "mounts"
        table.write_text("".join(f"{line} rw 0 0\n" for line in ("/dev/sda / ext4", *lines)))
        monkeypatch.setattr(filesystem, "_MOUNTS", table)

    return write


@pytest.mark.parametrize("kind", ["nfs4", "lustre", "beegfs", "fuse.sshfs", "something_new"])
def test_a_rollback_journal_on_a_network_disk_is_warned_about_once(
    kind: str, mounts: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A write-ahead log needs shared memory, which does not work there."""
    folder = tmp_path / "a folder"
    folder.mkdir()
    escaped = str(folder).replace(" ", r"\040")
    mounts(f"server:/export {escaped} {kind}")
    for _ in range(2):
        with open_store(str(folder / "results.db")) as store, store.read() as connection:
            assert connection.exec_driver_sql("PRAGMA journal_mode").scalar_one() == "delete"
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert record.getMessage() == (
        f"{folder}/results.db: not on a local disk, so commands that write at the same time take turns"
    )


def test_a_store_that_moved_to_a_network_disk_loses_its_write_ahead_log(
    database: str, mounts: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    open_store(database).close()
    mounts(f"server:/export {tmp_path} nfs")
    with open_store(database) as store, store.read() as connection:
        assert connection.exec_driver_sql("PRAGMA journal_mode").scalar_one() == "delete"
    assert "not on a local disk" in caplog.text


def test_a_write_ahead_log_that_sqlite_refuses_is_warned_about(
    database: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """What SQLite answers where its file system layer has no shared memory: the old mode, and no error."""

    class Refusing(sqlite3.Connection):
        def cursor(self, *arguments: Any) -> Any:
            return super().cursor(_Refusing)

    class _Refusing(sqlite3.Cursor):
        def execute(self, sql: str, *parameters: Any) -> Any:
            return super().execute(sql.replace("journal_mode = wal", "journal_mode"), *parameters)

    connect = sqlite3.connect
    monkeypatch.setattr(sqlite3, "connect", lambda *a, **k: connect(*a, factory=Refusing, **k))
    open_store(database).close()
    assert "SQLite refused a write-ahead log here" in caplog.text


@pytest.mark.parametrize(
    ("place", "local"),
    [
        ("/home/me/x", False),
        ("/home", False),
        ("/homely", True),
        ("/scratch/x", True),
        ("/", True),
        ("/home/me/tmp/x", True),
    ],
)
def test_the_deepest_mount_counts(place: str, local: bool, mounts: Any) -> None:
    mounts("server:/home /home nfs4", "tmpfs /home/me/tmp tmpfs", "/dev/sdb /scratch xfs")
    assert filesystem.is_local(Path(place)) is local


NO_LOCKS = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
static int refuse(const char *name, int fd, int cmd, void *arg) {
    if (cmd == F_SETLK || cmd == F_SETLKW || cmd == F_GETLK) { errno = REFUSAL; return -1; }
    int (*real)(int, int, ...) = (int (*)(int, int, ...))dlsym(RTLD_NEXT, name);
    return real(fd, cmd, arg);
}
int fcntl(int fd, int cmd, ...) {
    va_list a; va_start(a, cmd); void *arg = va_arg(a, void *); va_end(a); return refuse("fcntl", fd, cmd, arg);
}
int fcntl64(int fd, int cmd, ...) {
    va_list a; va_start(a, cmd); void *arg = va_arg(a, void *); va_end(a); return refuse("fcntl64", fd, cmd, arg);
}
"""


@pytest.mark.parametrize("refusal", ["ENOLCK", "ENOSYS", "EIO"])
def test_a_folder_without_locks_is_rejected_at_once(refusal: str, tmp_path: Path) -> None:
    """A real command whose every lock fails, as on NFS without its lock daemon or Lustre without ``flock``."""
    compiler = shutil.which("cc")
    assert compiler, "set-up asks for a compiler"
    (tmp_path / "locks.c").write_text(NO_LOCKS)
    library = tmp_path / "locks.so"
    flags = [f"-DREFUSAL={refusal}", "-shared", "-fPIC", "-o", library]
    subprocess.run([compiler, *flags, tmp_path / "locks.c", "-ldl"], check=True)
    (tmp_path / "runs").mkdir()
    done = subprocess.run(
        [sys.executable, "-m", "orchestrator", "collect"],
        cwd=tmp_path,
        env={**os.environ, "LD_PRELOAD": str(library)},
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert done.returncode == 1
    assert (
        f"{tmp_path}/results.db: files cannot be locked here, so a database would not be safe\n  why: {refusal}"
        in done.stderr
    )
    assert "fix: keep the database on a local disk: export ORCHESTRATE_DB=" in done.stderr
    assert not (tmp_path / "results.db").exists()


def test_locks_that_stop_working_are_distinguished_from_a_busy_database(
    database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SQLite reports both as busy."""
    monkeypatch.setattr(connect, "BUSY_TIMEOUT_S", 0.05)
    with open_store(database) as store, open_store(database) as other, store.write():
        monkeypatch.setattr(error_messages, "lock_problem", lambda folder: "ENOLCK No locks available")
        with (
            pytest.raises(StoreError, match=r"cannot be locked here.*\n  why: ENOLCK No locks available"),
            other.write(),
        ):
            pass


def test_a_full_disk_is_named_and_leaves_the_store_as_it_was(database: str) -> None:
    """SQLite's own limit on pages gives the error that a full disk gives."""
    with open_store(database) as store:
        event.listen(store.engine, "connect", lambda connection, _: connection.execute("PRAGMA max_page_count = 1"))
        store.engine.dispose()
        with (
            pytest.raises(StoreReadOnlyError, match=r"the disk is full\n  fix: free some space"),
            store.write() as connection,
        ):
            connection.execute(
                insert(models.ingested),
                [{"path": "x" * 3000 + str(i), "size": 0, "mtime_ns": 0, "read_bytes": 0} for i in range(99)],
            )
    with open_store(database) as store, store.read() as connection:
        assert connection.execute(select(models.ingested)).all() == []


@pytest.mark.parametrize(
    ("errorname", "free", "message"),
    [
        ("SQLITE_IOERR_SHMSIZE", 0, "the disk is full\n  fix: free some space and try again"),
        (
            "SQLITE_IOERR_FSYNC",
            10**6,
            "reading or writing the database failed\n  why: disk I/O error\n  fix: keep the data",
        ),
    ],
)
def test_an_input_output_error_is_distinguished_from_a_full_disk(
    errorname: str, free: int, message: str, database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a full disk SQLite cannot create a write-ahead log's shared memory, and reports an I/O error."""
    cause = sqlite3.OperationalError("disk I/O error")
    cause.sqlite_errorname = errorname
    monkeypatch.setattr(os, "statvfs", lambda folder: SimpleNamespace(f_bavail=free, f_frsize=4096))
    assert message in str(error_messages.store_error(database, OperationalError("BEGIN", {}, cause)))


def test_a_damaged_database_is_named_with_the_fix(database: str) -> None:
    with open_store(database) as store, store.write() as connection:
        rows = [{"path": "x" * 500 + str(i), "size": 0, "mtime_ns": 0, "read_bytes": 0} for i in range(99)]
        connection.execute(insert(models.ingested), rows)
    with open(database, "r+b") as stream:
        stream.seek(4096)
        stream.write(b"\xff" * (Path(database).stat().st_size - 4096))
    with pytest.raises(StoreDamagedError, match=r"damaged\n  why: .*malformed\n  fix: run orchestrate db rebuild"):  # noqa: SIM117
        with open_store(database) as store, store.read() as connection:
            connection.execute(select(models.ingested)).all()


def _without_override(*argv: str) -> list[str]:
    """Return a command to which permissions apply, also for root."""
    if os.geteuid() != 0:
        return list(argv)
    if shutil.which("setpriv") is None:
        pytest.skip("setpriv (util-linux) is not installed, and root ignores permissions")
    return ["setpriv", "--inh-caps=-all", "--bounding-set=-dac_override,-dac_read_search", "--", *argv]


@pytest.fixture
def read_only_folder(campaign: Any, tmp_path: Path) -> Iterator[Path]:
    """Another user's campaign: one finished run in a store, in a folder that we cannot write."""
    campaign.done()
    with open_store(str(tmp_path / "results.db")) as store:
        from db.ingest import collect

        collect(store, campaign.runs)
    campaign.done(seed=7)
    tmp_path.chmod(0o555)
    yield tmp_path
    tmp_path.chmod(0o755)


def _orchestrate(folder: Path, *argv: str) -> subprocess.CompletedProcess[str]:
    command = _without_override(sys.executable, "-m", "orchestrator", *argv)
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=60)


def test_results_in_a_read_only_folder(read_only_folder: Path) -> None:
    """The table shows the store as it is, and a note says that newer results are missing."""
    done = _orchestrate(read_only_folder, "results", "--select", "seed,test_accuracy", "--format", "csv")
    assert (done.returncode, done.stdout) == (0, "seed,test_accuracy\n0,0.9\n")
    assert "the database is read-only, so newer results are missing" in done.stderr
    done = _orchestrate(read_only_folder, "query", "SELECT count(*) AS n FROM runs", "--json")
    assert (done.returncode, done.stdout.split()) == (0, ["[", "{", '"n":', "1", "}", "]"])


def test_collecting_into_a_read_only_folder(read_only_folder: Path) -> None:
    done = _orchestrate(read_only_folder, "collect")
    assert done.returncode == 1
    assert "the database is read-only\n" in done.stderr and "fix: name another file with --db" in done.stderr
    (read_only_folder / "runs").chmod(0o755)
    done = _orchestrate(read_only_folder, "collect", "--db", "new.db")
    assert done.returncode == 1
    assert "the database cannot be created here\n  why: no permission to write the folder" in done.stderr


def test_a_database_without_permission_to_read(campaign: Any, tmp_path: Path) -> None:
    open_store(str(tmp_path / "results.db")).close()
    (tmp_path / "results.db").chmod(0)
    done = _orchestrate(tmp_path, "query", "SELECT 1")
    assert done.returncode == 1
    assert "the database cannot be read\n  why: no permission\n  fix: name another file" in done.stderr


def test_run_folders_without_permission_are_named_and_the_rest_is_ingested(campaign: Any, tmp_path: Path) -> None:
    """A run, a shard of runs and a result without permissions; once they are readable, nothing is missing."""
    attempts = [campaign.done(seed=seed) for seed in range(6)]
    shards = {a.path.parents[2] for a in attempts}
    assert len(shards) == len(attempts)
    closed = [attempts[0].path.parents[1], attempts[1].path.parents[2], attempts[2].result]
    modes = [path.stat().st_mode for path in closed]
    for path in closed:
        path.chmod(0)
    done = _orchestrate(tmp_path, "collect")
    for path, mode in zip(closed, modes, strict=True):
        path.chmod(mode)
    assert done.returncode == 3
    assert done.stdout == "new or changed: 4 runs, 4 attempts, 3 results, 8 epochs\n"
    assert done.stderr.count("Permission denied\n") == 3
    for path in closed:
        assert re.search(rf"skipped: {path}\S*: Permission denied", done.stderr)
    done = _orchestrate(tmp_path, "collect")
    assert (done.returncode, done.stdout) == (0, "new or changed: 2 runs, 3 attempts, 3 results, 4 epochs\n")
