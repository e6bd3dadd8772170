"""Published data files on this disk: check their checksums, read them, import them from a folder or an archive."""

from __future__ import annotations

import hashlib
import tarfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from unlazy.data.sources import SOURCES, File, Source
from unlazy.runtime import InputError, data_folder, require
from unlazy.store import write_file

State = Literal["present", "incomplete", "missing", "damaged"]


# --- checksums -----------------------------------------------------------------------------------


def _checksum(data: bytes, expected: str) -> str:
    """The checksum of some bytes, by the algorithm of the one expected."""
    algorithm = expected.split(":")[0]
    return f"{algorithm}:{hashlib.new(algorithm, data).hexdigest()}"


@dataclass(frozen=True)
class FileCheck:
    """One file compared with the published one; ``found`` is its checksum, or why it has none."""

    path: Path
    expected: str
    found: str

    @property
    def state(self) -> State:
        """present, missing or damaged."""
        if self.found == "missing":
            return "missing"
        return "present" if self.found == self.expected else "damaged"


def check_file(path: Path, file: File) -> FileCheck:
    """Whether ``path`` is that published file, byte for byte."""
    algorithm = file.checksum.split(":")[0]
    try:
        with path.open("rb") as content:
            found = f"{algorithm}:{hashlib.file_digest(content, algorithm).hexdigest()}"
    except (FileNotFoundError, NotADirectoryError):
        found = "missing"
    except OSError as error:
        found = f"unreadable ({error.strerror})"
    return FileCheck(path, file.checksum, found)


def check_source(source: Source, folder: Path) -> list[FileCheck]:
    """A check of every file of a data set below the data folder ``folder``."""
    return [check_file(folder / source.folder / file.name, file) for file in source.files]


def combined_state(checks: list[FileCheck]) -> State:
    """The state of a data set, from the checks of its files."""
    states = {check.state for check in checks}
    if "damaged" in states:
        return "damaged"
    return states.pop() if len(states) == 1 else "incomplete"


class DataMissing(InputError):  # noqa: N818
    """A data set's files are not in the data folder."""


# --- reading -------------------------------------------------------------------------------------


def fetch_commands(source: Source, folder: Path) -> tuple[str, str]:
    """The two commands that bring a data set into ``folder``: from the network, and from a folder."""
    place = "" if folder == data_folder() else f" --to {folder}"
    return f"`unlazy data fetch {source.name}{place}`", f"`unlazy data --from DIR{place}`"


def read_published_file(source: Source, name: str, folder: Path) -> tuple[bytes, Path]:
    """The content of a data file and its path; raises ``InputError`` unless its checksum is the published one."""
    file, path = source.file(name), folder / source.folder / name
    fetch, take = fetch_commands(source, folder)
    try:
        data = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        raise DataMissing(f"{path} is missing; {fetch} downloads it, {take} takes it from a folder.") from None
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}.") from error
    found = _checksum(data, file.checksum)
    require(
        found == file.checksum,
        f"{path} is damaged: expected {file.checksum} ({file.size} bytes), found {found} ({len(data)} bytes). "
        f"{fetch} or {take} replaces it.",
    )
    return data, path


# --- archives ------------------------------------------------------------------------------------


def unpack(archive: Path, source: Source, folder: Path) -> None:
    """Unpack the files of a data set from its .tar.gz archive, and nothing else.

    Only plain members with exactly the published names, lengths and checksums are written, under names of our own,
    so an archive can neither reach outside ``folder`` nor leave something unknown in it.
    """
    wanted = {f"{source.folder}/{file.name}": file for file in source.files}
    with _archive_errors(archive), tarfile.open(archive, "r:gz") as content:
        for member in content:
            file = wanted.pop(member.name, None)
            if file is None:
                continue
            what = f"{archive}: {member.name}"
            stream = content.extractfile(member) if member.isreg() else None
            if stream is None:
                raise InputError(f"{what} is a link, folder or device, expected a plain file; it was not unpacked.")
            require(member.size == file.size, f"{what} has {member.size} bytes, expected {file.size}.")
            data = stream.read()
            found = _checksum(data, file.checksum)
            require(found == file.checksum, f"{what} is damaged: expected {file.checksum}, found {found}.")
            write_file(folder / source.folder / file.name, data)
    require(not wanted, f"{archive} does not hold {', '.join(wanted)}.")


@contextmanager
def _archive_errors(archive: Path) -> Iterator[None]:
    """Turn the errors of a damaged archive into ``InputError``."""
    try:
        yield
    except (OSError, EOFError, zlib.error, tarfile.TarError) as error:
        raise InputError(f"{archive} is not a whole .tar.gz archive: {error}.") from error


# --- taking files from a folder ------------------------------------------------------------------


@dataclass(frozen=True)
class ImportedFile:
    """A file that was found in a folder, the data set it belongs to, and what was done with it."""

    path: Path
    source: str | None  # None: its checksum is not that of a published file
    outcome: Literal["copied", "unpacked", "already there", "damaged"]
    expected: str
    found: str


def import_files(origin: Path, folder: Path) -> list[ImportedFile]:
    """Copy every standard file found anywhere below ``origin`` to its place below the data folder ``folder``.

    Files are found by name and recognised by checksum (MNIST and Fashion-MNIST use the same names). Published archives
    are unpacked. Damaged files are reported and not copied.
    """
    require(origin.is_dir(), f"{origin} is not a folder.")
    owners: dict[str, list[tuple[Source, File]]] = {}
    for source in SOURCES.values():
        for file in (*source.files, *([source.archive] if source.archive else [])):
            owners.setdefault(file.name, []).append((source, file))
    paths = [path for path in origin.rglob("*") if path.name in owners and path.is_file()]
    imported = [
        one
        for path in sorted(paths, key=lambda path: (path.suffixes == [".tar", ".gz"], path))  # archives last
        if (one := _import_file(path, owners[path.name], folder))
    ]
    require(bool(imported), f"no standard file below {origin}; looked for {', '.join(owners)}.")
    return imported


def _import_file(path: Path, owners: list[tuple[Source, File]], folder: Path) -> ImportedFile | None:
    """Import one file; ``owners`` are the published files of its name. ``None`` if the name is a coincidence."""
    at_home = [(source, file) for source, file in owners if path.parent.name == source.folder]
    sizes = {file.size for _, file in owners}
    if path.name.isalpha() and not at_home and path.stat().st_size not in sizes:
        return None  # "train", "test" and "meta" are common names: another program's file is no error
    for source, file in owners:
        check = check_file(path, file)
        if check.state == "present":
            return ImportedFile(
                path, source.name, _copy_or_unpack(path, source, file, folder), check.expected, check.found
            )
    expected = " or ".join(f"{file.checksum} ({source.name})" for source, file in at_home or owners)
    return ImportedFile(path, None, "damaged", expected, check.found)


def _copy_or_unpack(
    path: Path, source: Source, file: File, folder: Path
) -> Literal["copied", "unpacked", "already there"]:
    """Put an intact file or archive into the data folder; returns what was done."""
    if file is source.archive:
        if combined_state(check_source(source, folder)) == "present":
            return "already there"
        unpack(path, source, folder)
        return "unpacked"
    target = folder / source.folder / file.name
    if check_file(target, file).state == "present":
        return "already there"
    write_file(target, path.read_bytes())
    return "copied"
