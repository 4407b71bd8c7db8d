"""Folders of whole files, on this machine or in a bucket of S3 or Google Cloud Storage.

A local folder is a Path; one in a bucket is a Remote, with as much of a Path's manner as those who read rows
need. On disk a file takes its name by a rename. A bucket has none, and needs none: an object is there once
its upload is complete, and not before.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import functools
import io
import os
import urllib.parse
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple

from autotune.errors import MachineError, UsageError
from autotune.io.files import whole

if TYPE_CHECKING:
    import pyarrow.fs

SCHEMES = {"s3": "s3", "gs": "gcs", "gcs": "gcs"}
OPTIONS = ("endpoint_override", "region", "scheme", "anonymous")
# Seconds: an address that answers nothing is given up after half a minute, retries included.
CONNECT_SECONDS, REQUEST_SECONDS, ATTEMPTS = 5.0, 10.0, 3
GCS_SECONDS = 20
# Files of a bucket that are fetched at once: each waits for the network, not for the processor.
FETCHES = 16


class Entry(NamedTuple):
    """A file of a folder: its name, its size in bytes, and when it was last written, in ns by its keeper's
    clock."""

    name: str
    size: int
    written: int


@dataclasses.dataclass(frozen=True)
class Remote:
    """A folder in a bucket. uri: as it was typed, options included; str() gives it back."""

    uri: str
    kind: str
    bucket: str
    inside: str
    options: tuple[tuple[str, str], ...] = ()

    def __str__(self) -> str:
        return self.uri

    def __truediv__(self, name: str) -> Remote:
        before, mark, query = self.uri.partition("?")
        inside = f"{self.inside}/{name}" if self.inside else name
        return dataclasses.replace(self, uri=f"{before.rstrip('/')}/{name}{mark}{query}", inside=inside)

    @property
    def path(self) -> str:
        """As pyarrow's file systems spell it."""
        return f"{self.bucket}/{self.inside}" if self.inside else self.bucket

    def is_dir(self) -> bool:
        """Whether it holds anything: there are no empty folders in a bucket."""
        return bool(entries(self))

    exists = is_dir


Folder = Path | Remote


def parse(text: str) -> Folder:
    """The folder that a user names: a path, s3://BUCKET/DIR or gs://BUCKET/DIR.

    After a ?, as in s3://b/dir?endpoint_override=http://127.0.0.1:9000, options of pyarrow's file systems.

    Raises:
      UsageError: it is neither, or has options that are not known.
    """
    if "://" not in text:
        return Path(text)
    try:
        parts = urllib.parse.urlsplit(text)
    except ValueError as error:  # such as brackets around no address
        raise UsageError(f"{text!r} is not a results folder: {error}") from None
    kind = SCHEMES.get(parts.scheme)
    if kind is None:
        raise UsageError(f"{text!r} is not a results folder: use a path, s3://BUCKET/DIR or gs://BUCKET/DIR")
    if "@" in parts.netloc:
        raise UsageError(
            f"a {parts.scheme}:// folder has something before an @: credentials are taken from the "
            "environment, name none there"
        )
    inside = urllib.parse.unquote(parts.path).strip("/")
    if not parts.netloc or parts.fragment or any(p in ("", ".", "..") for p in inside.split("/") if inside):
        raise UsageError(f"{text!r} names no folder of a bucket: write {parts.scheme}://BUCKET/DIR")
    options = tuple(urllib.parse.parse_qsl(parts.query, keep_blank_values=True))
    if unknown := [name for name, value in options if name not in OPTIONS or not value]:
        raise UsageError(
            f"{text!r} has the option {unknown[0]!r}: known are {', '.join(OPTIONS)}, with values"
        )
    return Remote(text.rstrip("/"), kind, parts.netloc, inside, options)


@functools.cache
def _filesystem(kind: str, bucket: str, options: tuple[tuple[str, str], ...]) -> pyarrow.fs.FileSystem:
    """The file system of a bucket, which is there; a MachineError where it is not."""
    from pyarrow import fs

    given: dict[str, Any] = dict(options)
    given["anonymous"] = given.get("anonymous", "").lower() in ("1", "true")
    if kind == "s3":
        given.setdefault(
            "endpoint_override", os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
        )
    # pyarrow takes an endpoint without its scheme, everyone else writes it with it.
    scheme, mark, address = (given.get("endpoint_override") or "").partition("://")
    if mark:
        given.update(scheme=scheme, endpoint_override=address)
    given = {name: value for name, value in given.items() if value}
    with _told(f"bucket {bucket!r} cannot be used"):
        if kind == "gcs":
            given.pop("region", None)
            seconds = datetime.timedelta(seconds=GCS_SECONDS)
            found: fs.FileSystem = fs.GcsFileSystem(**given, retry_time_limit=seconds)
        else:
            if not {"region", "endpoint_override"} & set(given) and not _region_is_set():
                given["region"] = fs.resolve_s3_region(bucket)
            found = fs.S3FileSystem(
                **given,
                connect_timeout=CONNECT_SECONDS,
                request_timeout=REQUEST_SECONDS,
                retry_strategy=fs.AwsStandardS3RetryStrategy(max_attempts=ATTEMPTS),
                allow_delayed_open=True,  # a small object is one request
            )
        # Listing what is in a bucket that is not there gives nothing, and no error.
        if found.get_file_info(bucket).type == fs.FileType.NotFound:
            raise MachineError(f"bucket {bucket!r} does not exist: make it first, or correct the name")
    return found


def _region_is_set() -> bool:
    return bool(os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION"))


def _of(folder: Remote) -> pyarrow.fs.FileSystem:
    return _filesystem(folder.kind, folder.bucket, folder.options)


@contextlib.contextmanager
def _told(what: str) -> Iterator[None]:
    """Turn what pyarrow raises of a bucket into one line; what is not there stays a FileNotFoundError."""
    try:
        yield
    except FileNotFoundError:
        raise
    except (OSError, ValueError) as error:
        raise MachineError(f"{what}: {_reason(str(error))}") from None


_NOT_ALLOWED = "the credentials are missing or not allowed to: see "
_REASONS = (
    (("NO_SUCH_BUCKET", "bucket does not exist"), "the bucket does not exist: make it first"),
    (
        ("ACCESS_DENIED", "INVALID_", "SIGNATURE", "EXPIRED", "HTTP response code: 40"),
        _NOT_ALLOWED + "AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_PROFILE",
    ),
    (
        ("access token", "PERMISSION_DENIED", "UNAUTHENTICATED"),
        _NOT_ALLOWED + "GOOGLE_APPLICATION_CREDENTIALS, `gcloud auth application-default login`",
    ),
    (
        ("NETWORK_CONNECTION", "Could not connect", "resolve host", "Timeout was reached"),
        "its server cannot be reached: is there a network, and is the endpoint right?",
    ),
)


def _reason(text: str) -> str:
    line = " ".join(text.split())
    for marks, reason in _REASONS:
        if any(mark in line for mark in marks):
            return f"{reason} ({line[:160]})"
    return line[:300]


def entries(folder: Folder) -> list[Entry]:
    """The files of a folder, by name; none where it is not there. What is being written is not among them.

    Raises:
      MachineError: the bucket cannot be listed.
    """
    if isinstance(folder, Path):
        return sorted(_local_entries(folder))
    from pyarrow import fs

    with _told(f"{str(folder)!r} cannot be listed"):
        found = _of(folder).get_file_info(fs.FileSelector(folder.path, allow_not_found=True))
    return sorted(
        Entry(info.base_name, info.size, info.mtime_ns or 0)
        for info in found
        if info.type == fs.FileType.File and not info.base_name.startswith(".")
    )


def _local_entries(folder: Path) -> Iterator[Entry]:
    try:
        listing = os.scandir(folder)
    except (FileNotFoundError, NotADirectoryError):
        return
    with listing:
        for item in listing:
            with contextlib.suppress(FileNotFoundError):  # it is gone by now
                # Only files: to open a pipe could wait for ever.
                if not item.name.startswith(".") and item.is_file():
                    status = item.stat()
                    yield Entry(item.name, status.st_size, status.st_mtime_ns)


def require_files(folder: Folder, prefix: str, suffix: str) -> None:
    """Raises UsageError where a folder of this machine has something else under the name of such a file.

    A link to a disk that is not there, for one: what it stands for would be missing without a word.
    """
    if not isinstance(folder, Path):
        return
    try:
        with os.scandir(folder) as listing:
            names = [item.name for item in listing if not item.is_file()]
    except (FileNotFoundError, NotADirectoryError):
        return
    for name in sorted(names):
        path = folder / name
        if name.startswith(prefix) and name.endswith(suffix) and os.path.lexists(path):  # not gone by now
            what = "leads nowhere" if path.is_symlink() and not path.exists() else "is no file"
            raise UsageError(f"{str(path)!r} {what}: move it out of the folder")


class RemoteFile:
    """A file of a bucket, under way to this machine. As a Path, it opens, has a name, and prints."""

    def __init__(self, folder: Remote, name: str, content: Future[bytes]) -> None:
        self._folder = folder
        self.name = name
        self._content = content

    def __str__(self) -> str:
        return str(self._folder / self.name)

    def open(self, mode: str = "rb") -> BinaryIO:
        """Raises FileNotFoundError if it is gone, MachineError if it cannot be had."""
        return io.BytesIO(self._content.result())


def files(folder: Folder, names: Sequence[str]) -> list[Path] | list[RemoteFile]:
    """Files to read, each with open, name and str. Those of a bucket are fetched side by side."""
    if isinstance(folder, Path):
        return [folder / name for name in names]
    pool = ThreadPoolExecutor(FETCHES, thread_name_prefix="fetch")
    found = [RemoteFile(folder, name, pool.submit(read, folder, name)) for name in names]
    pool.shutdown(wait=False)
    return found


def read(folder: Folder, name: str) -> bytes:
    """A file's content.

    Raises:
      FileNotFoundError: it is not there. MachineError: the bucket does not give it.
    """
    if isinstance(folder, Path):
        return (folder / name).read_bytes()
    with (
        _told(f"{str(folder / name)!r} cannot be read"),
        _of(folder).open_input_stream((folder / name).path) as file,
    ):
        content: bytes = file.read()
        return content


def publish(folder: Folder, name: str, content: bytes) -> None:
    """Write a file, which is there whole when this returns, and not at all until it is; an older one of that
    name is replaced.

    Raises:
      UsageError: the local folder cannot be made or written. MachineError: the bucket does not take it.
    """
    if isinstance(folder, Path):
        with whole(folder / name) as file:
            file.write(content)
        return
    with _told(f"{str(folder / name)!r} cannot be written"):
        # One write, and closed only after it: closing is what makes the object.
        stream = _of(folder).open_output_stream((folder / name).path)
        stream.write(content)
        stream.close()


def delete(folder: Folder, name: str) -> None:
    """Delete a file; one that is gone already is no error.

    Raises:
      MachineError: the bucket refuses.
    """
    with contextlib.suppress(FileNotFoundError):
        if isinstance(folder, Path):
            (folder / name).unlink()
            return
        with _told(f"{str(folder / name)!r} cannot be deleted"):
            _of(folder).delete_file((folder / name).path)
