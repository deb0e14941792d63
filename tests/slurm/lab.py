"""A throw-away Slurm cluster on this machine: every file below one folder, free ports, no root, no systemd, no cgroups.

Four nodes of one host pretend to be two with 2 A100 and two with 2 A30 each. The devices are links to ``/dev/null``:
Slurm wants character devices and exports their numbers as CUDA_VISIBLE_DEVICES. The cores are this machine's own, in
every node, so that tasks are really bound to them. The release of Slurm may be another one than the machine's own
(``tests.slurm.releases``). Needs ``slurmctld``, ``slurmd``, ``munged`` and the client commands (Debian packages
slurmctld, slurmd, slurm-client, munge); with accounting also ``slurmdbd`` and MariaDB (slurmdbd, mariadb-server-core,
mariadb-client-core), whose files lie in the folder too.
"""

from __future__ import annotations

import contextlib
import functools
import getpass
import json
import os
import random
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from tests.slurm.releases import INSTALLED, SYSTEM_PATH, Release

T = TypeVar("T")

_STEP_DAEMON = re.compile(rb"\Aslurmstepd|/sbin/slurmstepd")
"""In the arguments of a step daemon: as installed, and as started by an unpacked release's loader."""

DAEMONS = ("munged", "slurmctld", "slurmd")
ACCOUNTING = ("slurmdbd", "mariadbd", "mariadb", "mariadb-install-db", "sacct", "sacctmgr")
CLIENTS = ("munge", "sbatch", "srun", "squeue", "scontrol", "sinfo", "scancel")

NODES = {"lab001": "a100", "lab002": "a100", "lab003": "a30", "lab004": "a30"}
GPUS_PER_NODE = 2
MEMORY_PER_NODE_MB = 8000
_BOOT_TIMEOUT_S = 60


def missing(*, accounting: bool = False) -> list[str]:
    """Return the commands of a Slurm installation that this machine lacks."""
    wanted = (*DAEMONS, *CLIENTS, *(ACCOUNTING if accounting else ()))
    return [name for name in wanted if shutil.which(name, path=SYSTEM_PATH) is None]


@functools.cache
def processors() -> str:
    """Return this machine's cores as ``slurm.conf`` takes them: ``CPUs=2 Boards=1 ... ThreadsPerCore=1``."""
    path = shutil.which("slurmd", path=SYSTEM_PATH)
    assert path is not None
    words = subprocess.run([path, "-C"], capture_output=True, text=True, check=True).stdout.split()
    kept = ("CPUs=", "Boards=", "SocketsPerBoard=", "CoresPerSocket=", "ThreadsPerCore=")
    return " ".join(word for word in words if word.startswith(kept))


@dataclass
class Lab:
    """A cluster whose every file lies in ``folder``; use :func:`running`."""

    folder: Path
    accounting: bool = False
    users: tuple[str, ...] = ()
    """With accounting: further users with an account."""
    extra: tuple[str, ...] = ()
    """Further lines of ``slurm.conf``."""
    release: Release = INSTALLED
    environment: dict[str, str] = field(default_factory=dict)
    """Further variables of the login shell."""
    accounting_port: int = 0
    processes: list[tuple[str, subprocess.Popen[bytes]]] = field(default_factory=list)

    @property
    def conf(self) -> Path:
        return self.folder / "slurm.conf"

    @property
    def env(self) -> dict[str, str]:
        """The environment of a login shell of this cluster."""
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM_", "SBATCH_", "SRUN_"))}
        if self.release.programs:
            kept["PATH"] = f"{self.release.programs}:{kept['PATH']}"
        return {**kept, **self.environment, "SLURM_CONF": str(self.conf)}

    @property
    def slurm_bin(self) -> str:
        """The line of a cluster file that names the folder of srun; empty if it is in PATH."""
        return f"slurm_bin = {json.dumps(str(self.release.programs))}\n" if self.release.programs else ""

    def command(self, *argv: str | Path, timeout_s: float = 60) -> str:
        """Run a command on the login node and return what it printed; a failure shows its standard error."""
        done = self.attempt(*argv, timeout_s=timeout_s)
        assert done.returncode == 0, f"{argv}: exit {done.returncode}: {done.stdout}{done.stderr}"
        return done.stdout.strip()

    def attempt(self, *argv: str | Path, timeout_s: float = 60) -> subprocess.CompletedProcess[str]:
        """Run a command on the login node, which may fail."""
        return subprocess.run(
            [str(a) for a in argv], env=self.env, capture_output=True, text=True, timeout=timeout_s, check=False
        )

    def submit(self, script: Path, *arguments: str) -> str:
        """Run ``sbatch --parsable``; return the job id."""
        return self.command("sbatch", "--parsable", *arguments, script).partition(";")[0]

    def wait(self, job_id: str, timeout_s: float = 60) -> dict[str, str]:
        """Wait for the end of a job; return its fields as ``scontrol show job`` names them."""
        ended = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY"}

        def look() -> dict[str, str] | None:
            text = self.command("scontrol", "--oneliner", "show", "job", job_id)
            fields = dict(word.partition("=")[::2] for word in text.split())
            return fields if fields["JobState"] in ended else None

        return _until(f"the end of job {job_id}", look, timeout_s)

    def until_text(self, file: Path, text: str, timeout_s: float = 30) -> None:
        """Wait until a file holds a text."""
        _until(f"{text!r} in {file}", lambda: file.is_file() and text in file.read_text(), timeout_s)

    def boot(self) -> None:
        """Start munged, slurmctld and the slurmds, and wait until the nodes are idle."""
        for name in ("state", "spool", "log", "run", "munge", "dev"):
            (self.folder / name).mkdir(parents=True)
        (self.folder / "state").chmod(0o700)
        self._write_configuration()
        munge = self.folder / "munge"
        key = munge / "munge.key"
        key.write_bytes(secrets.token_bytes(128))
        key.chmod(0o400)
        self._start(
            "munged",
            *("munged", "--foreground", "--force", "--num-threads=2", f"--key-file={key}", f"--socket={munge}/socket"),
            *(f"--pid-file={munge}/pid", f"--log-file={self.folder}/log/munged.log", f"--seed-file={munge}/seed"),
        )
        self._until_answers("munged", "munge", "--no-input", f"--socket={munge}/socket")
        if self.accounting:
            self._boot_accounting()
        self._start("slurmctld", "slurmctld", "-D", "-f", str(self.conf))
        self._until_answers("slurmctld", "scontrol", "ping")
        for node in NODES:
            (self.folder / "spool" / node).mkdir()
            self._start(f"slurmd-{node}", *self._slurmd(node))

        def idle() -> bool:
            return len(self.command("sinfo", "-h", "-N", "-p", "htc", "-t", "idle", "-o", "%N").split()) == len(NODES)

        _until("idle nodes", idle, _BOOT_TIMEOUT_S)

    def _slurmd(self, node: str) -> Iterator[str]:
        yield from ("slurmd", "-D", "-N", node, "-f", str(self.conf))
        if self.release.programs:
            yield from ("-d", str(self.release.programs / "slurmstepd"))

    def _boot_accounting(self) -> None:
        """MariaDB without a network, slurmdbd, an account for every user."""
        user, data = getpass.getuser(), self.folder / "mysql"
        (data / "tmp").mkdir(parents=True)
        places = (f"--datadir={data}/data", f"--tmpdir={data}/tmp", f"--user={user}", "--skip-name-resolve")
        no_log = {"env": {**self.env, "PATH": self.release.system_path}, "capture_output": True, "check": True}
        install = ("mariadb-install-db", "--no-defaults", *places, "--auth-root-authentication-method=normal")
        subprocess.run([*install, "--skip-test-db"], **no_log)  # type: ignore[call-overload]
        self._start(
            "mariadbd",
            *("mariadbd", "--no-defaults", *places, f"--socket={data}/s", f"--pid-file={data}/pid"),
            *("--skip-networking", "--skip-log-bin", "--performance-schema=0", "--innodb-doublewrite=0"),
            *("--innodb-buffer-pool-size=64M", "--innodb-log-file-size=16M", "--innodb-flush-log-at-trx-commit=0"),
            "--innodb-lock-wait-timeout=900",
        )
        client = ("mariadb", "--no-defaults", "-uroot", f"--socket={data}/s")
        self._until_answers("mariadbd", *client, "-e", "select 1")
        self.command(*client, "-e", "create database slurm_acct_db; create user s@localhost identified by 's'")
        self.command(*client, "-e", "grant all on slurm_acct_db.* to s@localhost")
        self.environment["MYSQL_UNIX_PORT"] = f"{data}/s"
        conf = self.folder / "slurmdbd.conf"
        settings = SLURMDBD.format(d=self.folder, user=user, port=self.accounting_port)
        conf.write_text("\n".join([settings, *self._places(), ""]))
        conf.chmod(0o600)
        self._start("slurmdbd", "slurmdbd", "-D")
        self._until_answers("slurmdbd", "sacctmgr", "-n", "-P", "show", "cluster")
        self.command("sacctmgr", "-i", "add", "cluster", "lab")
        self.command("sacctmgr", "-i", "add", "account", "group", "Cluster=lab", "Description=lab", "Organization=lab")
        for name in (user, *self.users):
            self.command("sacctmgr", "-i", "add", "user", name, "Account=group", "Cluster=lab", "DefaultAccount=group")

    def stop(self) -> None:
        """End the jobs, then the daemons by their process ids, then what they left behind."""
        with contextlib.suppress(subprocess.SubprocessError, AssertionError):
            self.command("scancel", "--full", "--signal=KILL", f"--user={getpass.getuser()}", timeout_s=5)
        for _, process in reversed(self.processes):
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(10)
        for pid in self._left_behind():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def kill(self, daemon: str) -> None:
        """``kill -9`` a daemon; a ``slurmd-NODE`` with all processes on its node, as in a power failure."""
        (process,) = (p for name, p in self.processes if name == daemon and p.poll() is None)
        process.kill()
        process.wait(10)
        if (node := daemon.removeprefix("slurmd-")) != daemon:
            for pid in self._left_behind(node):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    def start_again(self, daemon: str) -> None:
        """Start a killed daemon again, with the same arguments."""
        argv = [p.args for name, p in self.processes if name == daemon][-1]
        assert isinstance(argv, tuple)
        self._start(daemon, *argv)

    def until_answers(self) -> None:
        """Wait until the controller answers."""
        self._until_answers("slurmctld", "scontrol", "ping")

    def _left_behind(self, node: str = "") -> Iterator[int]:
        """Step daemons and tasks of this cluster, known by its SLURM_CONF or by a file of it that they hold open.

        Args:
            node: only those of this node.
        """
        marker = f"SLURM_CONF={self.conf}".encode()
        places = (f"log/slurmd-{node}.log", f"spool/{node}/") if node else ("",)
        files = tuple(f"{self.folder}/{place}" for place in places)
        for process in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                environment = (process / "environ").read_bytes().split(b"\0")
                task = marker in environment and any(e.startswith(b"SLURM_JOB_ID=") for e in environment)
                task = task and (not node or f"SLURMD_NODENAME={node}".encode() in environment)
                # A step daemon overwrites its environment with its title.
                step = _STEP_DAEMON.search((process / "cmdline").read_bytes()) and any(
                    os.readlink(link).startswith(files) for link in (process / "fd").iterdir()
                )
                if task or step:
                    yield int(process.name)

    def _start(self, name: str, *argv: str) -> None:
        with (self.folder / "log" / f"{name}.out").open("ab") as log:
            process = subprocess.Popen(
                argv,
                env={**self.env, "PATH": self.release.system_path},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self.processes.append((name, process))

    def _until_answers(self, daemon: str, *argv: str) -> None:
        def answers() -> bool:
            return subprocess.run(argv, env=self.env, capture_output=True, check=False).returncode == 0

        _until(f"{daemon} to answer (logs in {self.folder}/log)", answers, _BOOT_TIMEOUT_S)

    def _places(self) -> list[str]:
        """The line of a configuration file that says where a release has its plugins."""
        return [f"PluginDir={self.release.plugins}"] if self.release.plugins else []

    def _write_configuration(self) -> None:
        for index in range(GPUS_PER_NODE):
            (self.folder / "dev" / f"nvidia{index}").symlink_to("/dev/null")
        controller, self.accounting_port, *ports = _free_ports(2 + len(NODES))
        nodes = [
            f"NodeName={node} NodeHostname=localhost NodeAddr=127.0.0.1 Port={port} {processors()}"
            f" RealMemory={MEMORY_PER_NODE_MB} Gres=gpu:{gpu}:{GPUS_PER_NODE} Feature={gpu},lab"
            for (node, gpu), port in zip(NODES.items(), ports, strict=True)
        ]
        settings = SETTINGS.format(
            d=self.folder, user=getpass.getuser(), port=controller, first=int(time.time()) % 10**7
        )
        store = "AccountingStorageType=accounting_storage/none"
        if self.accounting:
            store = STORED.format(d=self.folder, port=self.accounting_port)
        self.conf.write_text("\n".join([settings, store, *self._places(), *self.extra, *nodes, *PARTITIONS, ""]))
        files = f"File={self.folder}/dev/nvidia[0-{GPUS_PER_NODE - 1}]"
        devices = [f"NodeName={node} Name=gpu Type={gpu} {files}" for node, gpu in NODES.items()]
        (self.folder / "gres.conf").write_text("\n".join(["AutoDetect=off", *devices, ""]))
        # The installed release may be too old for this word, and a newer one looks for cgroups without it.
        cgroups = "CgroupPlugin=disabled\n" if self.release.programs else ""
        (self.folder / "cgroup.conf").write_text(cgroups)


SETTINGS = """\
ClusterName=lab
SlurmctldHost=localhost
SlurmctldPort={port}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={d}/munge/socket
StateSaveLocation={d}/state
SlurmdSpoolDir={d}/spool/%n
SlurmctldPidFile={d}/run/slurmctld.pid
SlurmdPidFile={d}/run/slurmd-%n.pid
SlurmctldLogFile={d}/log/slurmctld.log
SlurmdLogFile={d}/log/slurmd-%n.log
FirstJobId={first}
ProctrackType=proctrack/linuxproc
TaskPlugin=task/affinity
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU_Memory
SlurmdParameters=config_overrides
GresTypes=gpu
JobAcctGatherType=jobacct_gather/linux
JobAcctGatherFrequency=task=1
JobAcctGatherParams=OverMemoryKill
ReturnToService=1
KillWait=3
CompleteWait=0
SchedulerType=sched/backfill
SchedulerParameters=batch_sched_delay=0,sched_interval=2,sched_min_interval=0,bf_interval=1
PropagateResourceLimits=NONE
LaunchParameters=disable_send_gids
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
"""
STORED = """\
AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageHost=localhost
AccountingStoragePort={port}
AccountingStoragePass={d}/munge/socket
AccountingStorageEnforce=associations,limits
"""
SLURMDBD = """\
AuthType=auth/munge
AuthInfo=socket={d}/munge/socket
DbdHost=localhost
DbdPort={port}
SlurmUser={user}
PidFile={d}/run/slurmdbd.pid
LogFile={d}/log/slurmdbd.log
StorageType=accounting_storage/mysql
StorageHost=localhost
StorageUser=s
StoragePass=s
StorageLoc=slurm_acct_db
"""
PARTITIONS = (
    "PartitionName=htc Nodes=ALL Default=NO MaxTime=4:00:00 DefaultTime=60 DefMemPerCPU=100 PreemptMode=OFF State=UP",
    "PartitionName=public Nodes=ALL Default=YES MaxTime=7-0 DefaultTime=60 DefMemPerCPU=100 PreemptMode=OFF State=UP",
    # Jobs of the first one push those of the next two off their nodes, and off no others'.
    "PartitionName=urgent Nodes=ALL Default=NO MaxTime=240 DefMemPerCPU=100 PriorityTier=10 PreemptMode=OFF State=UP",
    "PartitionName=ended Nodes=ALL Default=NO MaxTime=4:00:00 DefMemPerCPU=100 PreemptMode=CANCEL State=UP",
    "PartitionName=requeued Nodes=ALL Default=NO MaxTime=4:00:00 DefMemPerCPU=100 PreemptMode=REQUEUE State=UP",
    # Takes jobs and starts none.
    "PartitionName=closed Nodes=ALL Default=NO MaxTime=4:00:00 DefaultTime=60 DefMemPerCPU=100 State=DOWN",
)


@contextlib.contextmanager
def running(
    folder: Path,
    *,
    accounting: bool = False,
    users: tuple[str, ...] = (),
    extra: tuple[str, ...] = (),
    release: Release = INSTALLED,
) -> Iterator[Lab]:
    """A cluster below ``folder`` (short: a socket's path has at most 107 characters), ended when the block ends.

    Its daemons have sessions of their own, so nothing else ends them: SIGTERM, and the SIGHUP of a terminal that is
    closed, end the block too.
    """
    lab = Lab(folder, accounting=accounting, users=users, extra=extra, release=release)
    with _ended_by(signal.SIGTERM, signal.SIGHUP) as uninterrupted:
        try:
            lab.boot()
            yield lab
        finally:
            uninterrupted()
            lab.stop()


@contextlib.contextmanager
def _ended_by(*signals: signal.Signals) -> Iterator[Callable[[], None]]:
    """Let signals that would kill this process leave the block instead; gives what makes it deaf to them."""
    taken: list[signal.Signals] = []

    def leave(number: int, frame: object) -> None:
        sys.exit(128 + number)

    if threading.current_thread() is threading.main_thread():  # no other may set handlers
        taken = [number for number in signals if signal.getsignal(number) is signal.SIG_DFL]
    for number in taken:
        signal.signal(number, leave)

    def turn_deaf() -> None:
        for number in taken:
            signal.signal(number, signal.SIG_IGN)

    try:
        yield turn_deaf
    finally:
        for number in taken:
            signal.signal(number, signal.SIG_DFL)


def _free_ports(count: int) -> list[int]:
    """Loopback ports below the ephemeral range, where no client's own port can land; all held while picked."""
    with contextlib.ExitStack() as held:
        ports: list[int] = []
        while len(ports) < count:
            probe = held.enter_context(socket.socket())
            with contextlib.suppress(OSError):
                probe.bind(("127.0.0.1", random.randrange(12000, 32000)))
                ports.append(probe.getsockname()[1])
        return ports


def _until(what: str, look: Callable[[], T | None], timeout_s: float) -> T:
    deadline = time.monotonic() + timeout_s
    while not (found := look()):
        assert time.monotonic() < deadline, f"gave up waiting for {what}"
        time.sleep(0.1)
    return found
