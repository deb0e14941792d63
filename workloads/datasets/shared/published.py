"""Published files and how they get below the data root: verified, whole or not at all. Not a data set itself."""

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

from workloads.datasets.shared.file_tasks import held
from workloads.errors import DatasetError

TIMEOUT_S = 30.0
CHUNK_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Published:
    """A file as its publishers describe it."""

    name: str
    urls: Sequence[str]
    algorithm: str
    """``md5`` or ``sha256``; MD5 where nothing better was published."""
    digest: str
    """Hex; of ``sha256`` it may be the first digits only, as in names such as ``resnet50-0676ba61.pth``."""
    limit_bytes: int
    """More than it has: an error page or endless stream is cut off here."""

    def fault(self, path: Path) -> str:
        """Why a file is not this one; empty when it is."""
        try:
            with open(path, "rb") as stream:
                found = hashlib.file_digest(stream, self.algorithm).hexdigest()
        except OSError as error:
            return error.strerror or str(error)
        return "" if found.startswith(self.digest) else f"{self.algorithm.upper()} {found}, not {self.digest}"


@contextlib.contextmanager
def writing(folder: Path, name: str, what: str, progress: Callable[[str], None]) -> Iterator[None]:
    """Make a folder and hold its lock, so that of two processes one does the work.

    Raises:
        DatasetError: it cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with held(folder / ".prepare.lock", progress):
            yield
    except OSError as error:
        raise DatasetError(
            f"cannot write {what} here",
            where=str(folder),
            why=f"{errno.errorcode.get(error.errno or 0, 'OSError')}: {error.strerror or error}",
            hint=f"choose a folder you can write with ORCHESTRATE_DATA or --data, or have its owner prepare {name}",
        ) from error


def fetch(file: Published, target: Path, progress: Callable[[str], None]) -> None:
    """Download a file to a name, by way of a temporary one beside it.

    Raises:
        DatasetError: no address gave a good copy; each attempt is named.
        OSError: it cannot be written.
    """
    attempts = []
    for url in file.urls:
        progress(f"{file.name} from {url}")
        descriptor, scratch = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
        try:
            with open(descriptor, "wb") as stream:
                trouble = download(url, stream, file.limit_bytes)
            trouble = trouble or file.fault(Path(scratch))
            if not trouble:
                os.chmod(scratch, 0o644)
                os.replace(scratch, target)
                return
            attempts.append(f"{url}: {trouble}")
        finally:
            Path(scratch).unlink(missing_ok=True)
    raise DatasetError(
        f"no good copy of {file.name} could be had",
        where=str(target),
        why="; ".join(attempts),
        hint=f"where there is no network, put the file there by hand: it is published at {file.urls[0]}",
    )


def download(url: str, stream: BinaryIO, limit_bytes: int) -> str:
    """Copy what an address gives to a stream; why that did not work, empty when it did.

    Raises:
        OSError: the stream cannot be written.
    """
    import http.client
    import urllib.error
    import urllib.request  # slow to import, and only this function needs it

    try:
        with urllib.request.urlopen(url, timeout=TIMEOUT_S) as answer:  # noqa: S310 (schemes are fixed by the callers)
            left = limit_bytes
            while left > 0:
                try:
                    content: bytes = answer.read(min(CHUNK_BYTES, left))
                except (http.client.HTTPException, OSError) as error:
                    return f"broken answer: {error!r}"
                if not content:
                    break
                stream.write(content)
                left -= len(content)
    except (http.client.HTTPException, ConnectionError, TimeoutError, urllib.error.URLError) as error:
        return str(error) or repr(error)
    return ""
