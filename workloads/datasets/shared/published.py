"""Published files below the data root: downloaded, verified, whole or absent."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from workloads.datasets.shared.file_tasks import Progress, locked, require_root
from workloads.errors import DatasetError
from workloads.files.json_file import write_bytes
from workloads.lazy import lazy_imports
from workloads.registry import Problem

with lazy_imports(__name__):
    from http import client
    from urllib import request

TIMEOUT_S = 30.0
CHUNK_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class PublishedFile:
    """A file as its publishers describe it."""

    name: str
    digest: str
    """Hex; of ``sha256`` it may be the first digits only, as in names such as ``resnet50-0676ba61.pth``."""
    algorithm: str = "sha256"
    """``md5`` or ``sha256``; MD5 where the publishers give nothing better."""
    urls: Sequence[str] = ()
    min_bytes: int = 0
    max_bytes: int = 2 << 30
    """Downloads stop here, in case a server answers with an endless stream."""

    def size_fault(self, path: Path) -> str:
        """Why the size of a file is wrong; empty when it is plausible."""
        try:
            size = path.stat().st_size
        except OSError as error:
            return f"missing ({error.strerror})"
        if self.min_bytes <= size <= self.max_bytes:
            return ""
        expected = self.min_bytes if self.min_bytes == self.max_bytes else f"{self.min_bytes} to {self.max_bytes}"
        return f"{size} bytes, not {expected}: truncated or another file"

    def fault(self, path: Path) -> str:
        """Why a file is not this one; empty when it is."""
        try:
            with open(path, "rb") as stream:
                return self.size_fault(path) or self._digest_fault(
                    hashlib.file_digest(stream, self.algorithm).hexdigest()
                )
        except OSError as error:
            return error.strerror or str(error)

    def write(self, folder: Path, content: bytes, archive: Path) -> None:
        """Write the file as an archive holds it. Raises DatasetError where the archive holds something else."""
        found = hashlib.new(self.algorithm, content, usedforsecurity=False).hexdigest()
        if fault := self._digest_fault(found):
            raise DatasetError(f"{self.name} in this archive is not the published file", where=str(archive), why=fault)
        write_bytes(folder / self.name, content)

    def _digest_fault(self, found: str) -> str:
        name = "MD5" if self.algorithm == "md5" else "SHA-256"
        return "" if found.startswith(self.digest) else f"{name} {found}, not {self.digest}"


@dataclass(slots=True)
class PublishedFolder:
    """The files of one data set in their folder below the data root.

    ``path``, ``check``, ``digest`` and ``prepare`` are those of a :class:`workloads.registry.DatasetDeclaration`.
    """

    title: str
    below: str
    """The folder, relative to the data root."""
    files: Sequence[PublishedFile]
    install: Callable[[Path, Sequence[PublishedFile], Progress], None]
    """(folder, missing or damaged files, progress) puts those files in place."""
    fix: str
    """How users get the files."""

    def path(self, root: Path | None, name: str) -> Path:
        """Return the folder. Raises DatasetError without a data root."""
        return require_root(root, name) / self.below

    def check(self, root: Path | None, name: str) -> list[Problem]:
        """Report missing files and wrong sizes."""
        try:
            folder = self.path(root, name)
        except DatasetError as error:
            return [Problem(where=error.where, what=error.what, fix=error.hint)]
        faults = {folder / file.name: file.size_fault(folder / file.name) for file in self.files}
        return [Problem(where=str(path), what=fault, fix=self.fix) for path, fault in faults.items() if fault]

    def digest(self, root: Path | None, name: str) -> str:
        """Return the digest of the whole data set, which ``load`` requires; empty while files are missing."""
        return "" if self.check(root, name) else self.published_digest()

    def published_digest(self) -> str:
        return hashlib.sha256("".join(file.digest for file in self.files).encode()).hexdigest()

    def prepare(self, root: Path | None, name: str, progress: Progress) -> None:
        """Install what is missing or damaged; of several processes one does the work."""
        folder = self.path(root, name)
        if not self._faults(folder):
            progress(f"{name}: {folder} is whole")
            return
        with prepare_lock(folder, name, self.title, progress):
            # Another process may have installed the files while this one waited for the lock.
            if faults := self._faults(folder):
                self.install(folder, [file for file, _ in faults], progress)
        progress(f"{name}: ready in {folder}")

    def verified(self, root: Path | None, name: str) -> Path:
        """Return the folder, after reading every file. Raises DatasetError that names the first wrong file."""
        folder = self.path(root, name)
        for file, fault in self._faults(folder):
            raise DatasetError(
                f"missing or damaged file of {self.title}", where=str(folder / file.name), why=fault, hint=self.fix
            )
        return folder

    def _faults(self, folder: Path) -> list[tuple[PublishedFile, str]]:
        return [(file, fault) for file in self.files if (fault := file.fault(folder / file.name))]


@contextlib.contextmanager
def prepare_lock(folder: Path, name: str, what: str, progress: Progress) -> Iterator[None]:
    """Create a folder and hold its lock while its files are written. Raises DatasetError where that is impossible."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with locked(folder / ".prepare.lock", progress):
            yield
    except OSError as error:
        raise DatasetError(
            f"cannot write {what} here",
            where=str(folder),
            why=f"{errno.errorcode.get(error.errno or 0, 'OSError')}: {error.strerror or error}",
            hint=f"choose a folder you can write with ORCHESTRATE_DATA or --data, or have its owner prepare {name}",
        ) from error


def fetch(file: PublishedFile, target: Path, progress: Progress) -> None:
    """Download a file under a temporary name, verify it and rename it; does nothing where it is already whole.

    Raises:
        DatasetError: no address gave a good copy; the message lists each attempt.
        OSError: the folder cannot be written.
    """
    if not (fault := file.fault(target)):
        return
    attempts = [f"{target}: {fault}"] if target.exists() else []
    for url in file.urls:
        progress(f"{file.name} from {url}")
        descriptor, temporary = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
        try:
            with open(descriptor, "wb") as stream:
                fault = download(url, stream, file.max_bytes)
            if not (fault := fault or file.fault(Path(temporary))):
                os.chmod(temporary, 0o644)
                os.replace(temporary, target)
                return
            attempts.append(f"{url}: {fault}")
        finally:
            Path(temporary).unlink(missing_ok=True)
    raise DatasetError(
        f"no good copy of {file.name} found",
        where=str(target),
        why="; ".join(attempts),
        hint=f"where there is no network, put the file there by hand: it is published at {file.urls[0]}",
    )


def download(url: str, stream: BinaryIO, max_bytes: int) -> str:
    """Copy what a server answers to a stream; return why that failed, empty on success.

    Raises OSError where the stream cannot be written.
    """
    try:
        answer = request.urlopen(url, timeout=TIMEOUT_S)  # noqa: S310 (schemes are fixed by the callers)
    except (client.HTTPException, OSError) as error:
        return str(error) or repr(error)
    with answer:
        while max_bytes > 0:
            try:
                content: bytes = answer.read(min(CHUNK_BYTES, max_bytes))
            except (client.HTTPException, OSError) as error:
                return f"broken answer: {error!r}"
            if not content:
                break
            stream.write(content)
            max_bytes -= len(content)
    return ""
