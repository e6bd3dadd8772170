"""Downloads that resume: bytes collect in NAME.part, which is renamed once its checksum is the published one."""

from __future__ import annotations

import fcntl
import http.client
import io
import os
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from unlazy.data.files import check_file, check_source, unpack
from unlazy.data.sources import File, Source
from unlazy.runtime import InputError, StoreError, __version__

Report = Callable[[str, int, int], None]
Say = Callable[[str], None]

TIMEOUT = 30.0  # seconds without a byte after which a connection counts as broken
TRIES = 4  # in a row without a new byte; then the next address is tried
PAUSE = 1.0  # seconds before the second try; doubled each time
CHUNK = 1 << 16
RETRY_CODES = (408, 429)  # HTTP answers below 500 after which another try may succeed


class _AddressFailed(Exception):  # noqa: N818
    """This address will not give the file, so another try is useless; the message says why."""


def _ignore_message(line: str) -> None:
    """The default of ``say``."""


def fetch(source: Source, folder: Path, report: Report, say: Say = _ignore_message) -> list[Path]:
    """Download the missing or damaged files of a data set into the data folder; returns the new files.

    ``report(what, done, total)`` receives the progress in kilobytes; ``say(line)`` the address that is tried and what went wrong.
    """
    absent = [check.path for check in check_source(source, folder) if check.state != "present"]
    if absent and source.archive:
        archive = folder / source.archive.name
        if check_file(archive, source.archive).state != "present":
            download(source.archive, source.addresses, archive, report, say)
        unpack(archive, source, folder)
        archive.unlink()
    elif absent:
        for path in absent:
            download(source.file(path.name), source.addresses, path, report, say)
    return absent


def download(file: File, addresses: tuple[str, ...], target: Path, report: Report, say: Say = _ignore_message) -> None:
    """Download one file from the first address that has it, resuming where an earlier call stopped."""
    part = target.with_name(f"{file.name}.part")
    problems = []
    with _open_part_file(part) as part_file:
        untried = list(addresses)
        while untried:
            url = untried[0] + file.name
            begun_before = part_file.seek(0, os.SEEK_END) > 0
            say(f"trying {url}")
            try:
                _download_with_retries(url, file, part_file, report, say)
            except _AddressFailed as problem:
                problems.append(f"{url} {problem}")
                untried.pop(0)
                continue
            check = check_file(part, file)
            if check.state == "present":
                _rename_to_target(part_file, part, target)
                return
            part_file.truncate(0)
            if not begun_before:  # otherwise the old bytes may be wrong: try the same address from the start
                problems.append(f"{url} sent a wrong file (expected {check.expected}, found {check.found})")
                untried.pop(0)
        kept = part_file.seek(0, os.SEEK_END)
        if not kept:
            part.unlink()
    so_far = (
        f"{kept} of {file.size} bytes are kept in {part}; the same command goes on from there"
        if kept
        else "nothing is kept"
    )
    raise InputError(
        f"could not fetch {file.name}: {'; '.join(problems)}. So far {so_far}. `unlazy data --from DIR` needs no network."
    )


@contextmanager
def _open_part_file(part: Path) -> Iterator[io.FileIO]:
    """The .part file of a download, open at its end and locked for this process."""
    try:
        part.parent.mkdir(parents=True, exist_ok=True)
        part_file = io.FileIO(part, "a")
    except OSError as error:
        raise StoreError(f"could not write {part}: {error.strerror}. Choose another folder with --to.") from error
    with part_file:
        try:
            fcntl.flock(part_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            taken = not os.path.samestat(os.fstat(part_file.fileno()), part.stat())  # renamed since it was opened
        except OSError:
            taken = True
        if taken:
            raise StoreError(f"another process is downloading {part}; wait for it, or choose another folder with --to.")
        yield part_file


def _download_with_retries(url: str, file: File, part_file: io.FileIO, report: Report, say: Say) -> None:
    """Request bytes until the length is right; after a broken connection, resume where it broke."""
    failures = 0
    while (before := part_file.seek(0, os.SEEK_END)) != file.size:
        try:
            _request_missing_bytes(url, file, part_file, report)
        except (OSError, http.client.HTTPException) as error:
            if isinstance(error, urllib.error.HTTPError):
                error.close()
                if error.code < 500 and error.code not in RETRY_CODES:
                    raise _AddressFailed(f"answered {error.code} {error.reason}") from error
            failures = 0 if part_file.seek(0, os.SEEK_END) > before else failures + 1
            if failures == TRIES:
                raise _AddressFailed(f"failed {TRIES} times in a row: {error}") from error
            pause = PAUSE * 2**failures
            say(f"{error}; again in {pause:g} s")
            time.sleep(pause)


def _request_missing_bytes(url: str, file: File, part_file: io.FileIO, report: Report) -> None:
    """One request for the bytes that are still missing."""
    have = part_file.seek(0, os.SEEK_END)
    if have > file.size:
        part_file.truncate(0)
        have = 0
    headers = {"User-Agent": f"unlazy/{__version__}"} | ({"Range": f"bytes={have}-"} if have else {})
    with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=TIMEOUT) as answer:
        if have and not (answer.status == 206 and answer.headers.get("Content-Range", "").startswith(f"bytes {have}-")):
            if answer.status == 206:
                raise _AddressFailed("answered with other bytes than it was asked for")
            part_file.truncate(0)  # it knows no ranges and sends everything
            have = 0
        if answer.length is not None and have + answer.length != file.size:
            raise _AddressFailed(f"offers {have + answer.length} bytes, expected {file.size}")
        while chunk := answer.read(CHUNK):
            have += len(chunk)
            if have > file.size:
                part_file.truncate(0)
                raise _AddressFailed(f"sent more than the {file.size} bytes expected")
            _append(part_file, chunk)
            report(f"{file.name} (kB)", have // 1000, file.size // 1000)
    if have < file.size:
        raise ConnectionError(f"the connection ended after {have} of {file.size} bytes")


def _rename_to_target(part_file: io.FileIO, part: Path, target: Path) -> None:
    """Move the complete .part file to its final name."""
    try:
        os.fsync(part_file.fileno())
        part.replace(target)
    except OSError as error:
        raise StoreError(f"could not write {target}: {error.strerror}; the whole file stands in {part}.") from error


def _append(part_file: io.FileIO, chunk: bytes) -> None:
    """Write bytes at the end of the .part file; raises ``StoreError`` when the disk is full."""
    view = memoryview(chunk)
    try:
        while view:
            view = view[part_file.write(view) :]
    except OSError as error:
        raise StoreError(
            f"could not write {part_file.name}: {error.strerror}. Free some space; the same command goes on from there."
        ) from error
