"""Small data sets in the formats of the published ones, with a checksum table and a server of their own."""

from __future__ import annotations

import gzip
import hashlib
import io
import struct
import tarfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np

from unlazy.data.sources import File, Source

# --- formats -------------------------------------------------------------------------------------


def idx(array: np.ndarray) -> bytes:
    """IDX without gzip: two zeros, 8 for bytes, the number of axes, their lengths, the values."""
    header = bytes([0, 0, 8, array.ndim]) + b"".join(struct.pack(">I", length) for length in array.shape)
    return header + bytes(int(value) for value in array.ravel())


def idx_gz(array: np.ndarray) -> bytes:
    return gzip.compress(idx(array), mtime=0)


class Raw(bytes):
    """Opcodes that go into a pickle as they are."""


def opcodes(value: Any) -> bytes:
    """What Python 2 wrote for plain values with protocol 2: its strings are the bytes of Python 3."""
    match value:
        case Raw():
            return bytes(value)
        case bytes():
            short = len(value) < 256
            return (b"U" + bytes([len(value)]) if short else b"T" + struct.pack("<i", len(value))) + value
        case int():
            return b"J" + struct.pack("<i", value)
        case list():
            return b"](" + b"".join(map(opcodes, value)) + b"e"
        case dict():
            return b"}(" + b"".join(opcodes(key) + opcodes(item) for key, item in value.items()) + b"u"
        case np.ndarray():
            shape = b"(" + b"".join(map(opcodes, value.shape)) + b"t"
            kind = (
                b"cnumpy\ndtype\n(U\x02"
                + value.dtype.str[1:].encode()
                + b"K\x00K\x01tR(K\x03U\x01|NNNJ\xff\xff\xff\xff"
            )
            kind += b"J\xff\xff\xff\xffK\x00tb"
            empty = b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\n(K\x00tU\x01btR"
            return empty + b"(K\x01" + shape + kind + b"\x89" + opcodes(value.tobytes()) + b"tb"
    raise TypeError(type(value))


def pickled(value: Any) -> bytes:
    return b"\x80\x02" + opcodes(value) + b"."


def tar_gz(members: dict[str, bytes | tarfile.TarInfo]) -> bytes:
    """An archive of files, or of whatever a ``TarInfo`` says."""
    target = io.BytesIO()
    with tarfile.open(fileobj=target, mode="w:gz") as archive:
        for name, content in members.items():
            info = content if isinstance(content, tarfile.TarInfo) else tarfile.TarInfo(name)
            if isinstance(content, bytes):
                info.size = len(content)
                archive.addfile(info, io.BytesIO(content))
            else:
                archive.addfile(info)
    return target.getvalue()


# --- folders -------------------------------------------------------------------------------------


def contents(folder: Path) -> dict[str, bytes]:
    """Every file below a folder, by its path from there."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


# --- data sets -----------------------------------------------------------------------------------


def entry(name: str, content: bytes, algorithm: str = "sha256") -> File:
    return File(name, len(content), f"{algorithm}:{hashlib.new(algorithm, content).hexdigest()}")


@dataclass(frozen=True)
class Published:
    """A data set with the arrays it was made of: ``{split: (pixels [n, c, h, w], labels [n])}``."""

    source: Source
    contents: dict[str, bytes]
    arrays: dict[str, tuple[np.ndarray, np.ndarray]]
    archive: bytes | None = None

    def put(self, folder: Path) -> None:
        """Write the files to their places below a data folder."""
        for name, content in self.contents.items():
            path = folder / self.source.folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)


def _random(seed: int, count: int, shape: tuple[int, ...], classes: int) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(seed)
    return random.integers(0, 256, (count, *shape), np.uint8), random.integers(0, classes, count, np.uint8)


def publish_mnist(name: str, seed: int) -> Published:
    arrays = {"train": _random(seed, 12, (1, 5, 4), 10), "test": _random(seed + 1, 7, (1, 5, 4), 10)}
    contents = {}
    for split, start in (("train", "train"), ("test", "t10k")):
        pixels, labels = arrays[split]
        contents[f"{start}-images-idx3-ubyte.gz"] = idx_gz(pixels[:, 0])
        contents[f"{start}-labels-idx1-ubyte.gz"] = idx_gz(labels)
    files = tuple(entry(file, content) for file, content in contents.items())
    return Published(Source(name, name, files, ()), contents, arrays)


def publish_cifar(name: str, folder: str, contents: dict[str, bytes], arrays: dict[str, Any]) -> Published:
    members = {f"{folder}/{file}": content for file, content in contents.items()}
    archive = tar_gz({f"{folder}/readme.html": b"<p>hello", **members})
    listed = entry(f"{folder}.tar.gz", archive, "md5")
    files = tuple(entry(file, content) for file, content in contents.items())
    return Published(Source(name, folder, files, (), listed), contents, arrays, archive)


def publish_cifar_10(seed: int = 20) -> Published:
    parts = {f"data_batch_{number}": _random(seed + number, 3, (3, 32, 32), 10) for number in range(1, 6)}
    parts["test_batch"] = _random(seed, 4, (3, 32, 32), 10)
    contents = {
        file: pickled({b"labels": labels.tolist(), b"data": pixels.reshape(len(pixels), -1), b"batch_label": b"some"})
        for file, (pixels, labels) in parts.items()
    }
    contents["batches.meta"] = pickled(
        {b"label_names": [b"kind %d" % number for number in range(10)], b"num_vis": 3072}
    )
    train = [parts[f"data_batch_{number}"] for number in range(1, 6)]
    joined = tuple(np.concatenate([part[axis] for part in train]) for axis in (0, 1))
    return publish_cifar("cifar-10", "cifar-10-batches-py", contents, {"train": joined, "test": parts["test_batch"]})


def publish_cifar_100(seed: int = 30) -> Published:
    arrays = {"train": _random(seed, 6, (3, 32, 32), 100), "test": _random(seed + 1, 4, (3, 32, 32), 100)}
    contents = {
        split: pickled(
            {
                b"fine_labels": labels.tolist(),
                b"coarse_labels": (labels // 5).tolist(),
                b"data": pixels.reshape(len(pixels), -1),
            }
        )
        for split, (pixels, labels) in arrays.items()
    }
    names = {b"fine_label_names": [b"fine %d" % number for number in range(100)], b"coarse_label_names": [b"coarse"]}
    contents["meta"] = pickled(names)
    return publish_cifar("cifar-100", "cifar-100-python", contents, arrays)


def publish_all() -> dict[str, Published]:
    sets = publish_mnist("mnist", 0), publish_mnist("fashion-mnist", 10), publish_cifar_10(), publish_cifar_100()
    return {one.source.name: one for one in sets}


def put_archive(one: Published, folder: Path, archive: bytes | None = None) -> Path:
    """Write the archive of a data set, or another one under its name."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / one.source.archive.name
    path.write_bytes(archive or one.archive)
    return path


# --- a server ------------------------------------------------------------------------------------

Answer = Callable[[BaseHTTPRequestHandler, bytes], None]


@dataclass
class Server:
    """Offers ``contents`` by path; keeps a log of requests as (path, Range header); misbehaves as told.

    ``cuts``: after how many bytes the next answers break off. ``ranges``: whether it knows ranges.
    ``special``: paths that are answered by a function.
    """

    address: str = ""
    contents: dict[str, bytes] = field(default_factory=dict)
    log: list[tuple[str, str | None]] = field(default_factory=list)
    cuts: list[int] = field(default_factory=list)
    ranges: bool = True
    special: dict[str, Answer] = field(default_factory=dict)

    def answer(self, handler: BaseHTTPRequestHandler) -> None:
        path, asked = handler.path.lstrip("/"), handler.headers.get("Range")
        self.log.append((path, asked))
        content = self.contents.get(path)
        if path in self.special:
            self.special[path](handler, content or b"")
            return
        if content is None:
            handler.send_error(404)
            return
        start = int(asked.removeprefix("bytes=").removesuffix("-")) if asked and self.ranges else 0
        handler.send_response(206 if asked and self.ranges else 200)
        if asked and self.ranges:
            handler.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
        handler.send_header("Content-Length", str(len(content) - start))
        handler.end_headers()
        end = start + self.cuts.pop(0) if self.cuts else len(content)
        handler.wfile.write(content[start:end])


@contextmanager
def serving() -> Iterator[Server]:
    server = Server()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            with suppress(ConnectionError):  # the client may leave
                server.answer(self)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    listener = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=listener.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    server.address = f"http://127.0.0.1:{listener.server_port}/"
    try:
        yield server
    finally:
        listener.shutdown()
        thread.join()
        listener.server_close()
