"""Downloads that survive a broken line: bytes gather in NAME.part, and only the published file gets its name."""

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

SILENCE = 30.0  # seconds without a byte after which a connection counts as broken
TRIES = 4  # in a row without a new byte, before an address is given up
PAUSE = 1.0  # seconds before the second try; doubled each time
PIECE = 1 << 16
LATER = (408, 429)  # the only HTTP answers below 500 that ask to come again


class _Refused(Exception):  # noqa: N818
    """An address that is not worth another try; says why."""


def _silent(line: str) -> None:
    """Nobody listens."""


def fetch(source: Source, folder: Path, report: Report, say: Say = _silent) -> list[Path]:
    """Download what is missing or damaged of a data set into the data folder; gives the files that are new.

    ``report(what, done, total)`` counts bytes; ``say(line)`` hears which address is tried and what went wrong.
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


def download(file: File, addresses: tuple[str, ...], target: Path, report: Report, say: Say = _silent) -> None:
    """Fetch one file from the first address that has it, going on where an earlier call stopped."""
    part = target.with_name(f"{file.name}.part")
    problems = []
    with _locked(part) as gathered:
        waiting = list(addresses)
        while waiting:
            url = waiting[0] + file.name
            begun_before = gathered.seek(0, os.SEEK_END) > 0
            say(f"trying {url}")
            try:
                _gather(url, file, gathered, report, say)
            except _Refused as problem:
                problems.append(f"{url} {problem}")
                waiting.pop(0)
                continue
            check = check_file(part, file)
            if check.state == "present":
                _give_name(gathered, part, target)
                return
            gathered.truncate(0)
            if not begun_before:  # otherwise the old bytes may be to blame: the same address again, from the start
                problems.append(f"{url} sent a wrong file (expected {check.expected}, found {check.found})")
                waiting.pop(0)
        kept = gathered.seek(0, os.SEEK_END)
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
def _locked(part: Path) -> Iterator[io.FileIO]:
    """The file that gathers a download, open at its end, for one process at a time."""
    try:
        part.parent.mkdir(parents=True, exist_ok=True)
        gathered = io.FileIO(part, "a")
    except OSError as error:
        raise StoreError(f"could not write {part}: {error.strerror}. Choose another folder with --to.") from error
    with gathered:
        try:
            fcntl.flock(gathered, fcntl.LOCK_EX | fcntl.LOCK_NB)
            taken = not os.path.samestat(os.fstat(gathered.fileno()), part.stat())  # renamed since it was opened
        except OSError:
            taken = True
        if taken:
            raise StoreError(f"another process is downloading {part}; wait for it, or choose another folder with --to.")
        yield gathered


def _gather(url: str, file: File, gathered: io.FileIO, report: Report, say: Say) -> None:
    """Pull until the length is right; a broken connection is taken up again where it broke."""
    fruitless = 0
    while (before := gathered.seek(0, os.SEEK_END)) != file.size:
        try:
            _pull(url, file, gathered, report)
        except (OSError, http.client.HTTPException) as error:
            if isinstance(error, urllib.error.HTTPError):
                error.close()
                if error.code < 500 and error.code not in LATER:
                    raise _Refused(f"answered {error.code} {error.reason}") from error
            fruitless = 0 if gathered.seek(0, os.SEEK_END) > before else fruitless + 1
            if fruitless == TRIES:
                raise _Refused(f"failed {TRIES} times in a row: {error}") from error
            pause = PAUSE * 2**fruitless
            say(f"{error}; again in {pause:g} s")
            time.sleep(pause)


def _pull(url: str, file: File, gathered: io.FileIO, report: Report) -> None:
    """One request for the bytes that are still missing."""
    have = gathered.seek(0, os.SEEK_END)
    if have > file.size:
        gathered.truncate(0)
        have = 0
    headers = {"User-Agent": f"unlazy/{__version__}"} | ({"Range": f"bytes={have}-"} if have else {})
    with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=SILENCE) as answer:
        if have and not (answer.status == 206 and answer.headers.get("Content-Range", "").startswith(f"bytes {have}-")):
            if answer.status == 206:
                raise _Refused("answered with other bytes than it was asked for")
            gathered.truncate(0)  # it knows no ranges and sends everything
            have = 0
        if answer.length is not None and have + answer.length != file.size:
            raise _Refused(f"offers {have + answer.length} bytes, expected {file.size}")
        while piece := answer.read(PIECE):
            have += len(piece)
            if have > file.size:
                gathered.truncate(0)
                raise _Refused(f"sent more than the {file.size} bytes expected")
            _write(gathered, piece)
            report(f"{file.name} (kB)", have // 1000, file.size // 1000)
    if have < file.size:
        raise ConnectionError(f"the connection ended after {have} of {file.size} bytes")


def _give_name(gathered: io.FileIO, part: Path, target: Path) -> None:
    try:
        os.fsync(gathered.fileno())
        part.replace(target)
    except OSError as error:
        raise StoreError(f"could not write {target}: {error.strerror}; the whole file stands in {part}.") from error


def _write(gathered: io.FileIO, piece: bytes) -> None:
    view = memoryview(piece)
    try:
        while view:
            view = view[gathered.write(view) :]
    except OSError as error:
        raise StoreError(
            f"could not write {gathered.name}: {error.strerror}. Free some space; the same command goes on from there."
        ) from error
