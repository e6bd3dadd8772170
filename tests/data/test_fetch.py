"""Downloads: broken ones go on where they stopped, wrong ones are thrown away."""

from __future__ import annotations

import resource
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from published import Published, Server, contents, entry, publish_cifar_10, publish_mnist, put_archive, serving
from unlazy import InputError, StoreError
from unlazy.data import fetch as fetch_module
from unlazy.data.fetch import TRIES, download, fetch
from unlazy.data.files import check_source, combined_state


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("no_proxy", "*")
    monkeypatch.setattr(fetch_module, "PAUSE", 0.0)
    with serving() as running:
        yield running


# --- downloads -------------------------------------------------------------------------------------

CONTENT = np.random.default_rng(3).integers(0, 256, 300_000, np.uint8).tobytes()
FILE = entry("thing.gz", CONTENT)


class Reports(list):
    def __call__(self, what: str, done: int, total: int) -> None:
        self.append((what, done, total))


def get(server: Server, target: Path, *addresses: str) -> Reports:
    reports = Reports()
    download(FILE, addresses or (server.address,), target, reports)
    return reports


@pytest.fixture
def target(server, tmp_path) -> Path:
    server.contents["thing.gz"] = CONTENT
    return tmp_path / "data" / "thing.gz"


def test_a_download_arrives_whole_with_its_progress(server, target):
    reports = get(server, target)
    assert contents(target.parent) == {"thing.gz": CONTENT}
    assert reports[-1] == ("thing.gz (kB)", 300, 300)
    assert [done for _, done, _ in reports] == sorted(done for _, done, _ in reports)
    assert server.log == [("thing.gz", None)]


def test_a_broken_connection_is_taken_up_where_it_broke(server, target):
    server.cuts = [100_000, 50_000, 0, 0, 0]
    get(server, target)
    assert contents(target.parent) == {"thing.gz": CONTENT}
    starts = [None, "bytes=100000-", *["bytes=150000-"] * 4]
    assert server.log == [("thing.gz", start) for start in starts]


def test_an_interrupted_download_goes_on_in_the_next_call(server, target):
    server.cuts = [120_000, *[0] * TRIES]
    with pytest.raises(InputError) as caught:
        get(server, target)
    part = target.with_name("thing.gz.part")
    for word in ("could not fetch thing.gz", server.address, f"{TRIES} times", "120000 of 300000 bytes", str(part)):
        assert word in str(caught.value)
    assert contents(target.parent) == {"thing.gz.part": CONTENT[:120_000]}
    server.log.clear()
    get(server, target)
    assert server.log == [("thing.gz", "bytes=120000-")]
    assert contents(target.parent) == {"thing.gz": CONTENT}


def test_a_download_goes_on_after_its_process_was_killed(server, target):
    first_half, killed = threading.Event(), threading.Event()

    def half_then_wait(handler, content):
        handler.send_response(200)
        handler.send_header("Content-Length", str(len(content)))
        handler.end_headers()
        handler.wfile.write(content[:200_000])
        first_half.set()
        killed.wait(60)

    server.special["thing.gz"] = half_then_wait
    program = (
        "import sys; from pathlib import Path\n"
        "from unlazy.data.fetch import download; from unlazy.data.sources import File\n"
        "name, size, checksum, address, target = sys.argv[1:]\n"
        "report = lambda what, done, total: print(done, flush=True)\n"
        "download(File(name, int(size), checksum), (address,), Path(target), report)\n"
    )
    words = [FILE.name, FILE.size, FILE.checksum, server.address, target]
    command = [sys.executable, "-c", program, *map(str, words)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        assert first_half.wait(60)
        while int(child.stdout.readline()) < 190:
            pass
        child.kill()
    killed.set()
    del server.special["thing.gz"]
    part = target.with_name("thing.gz.part").read_bytes()
    assert part == CONTENT[: len(part)]
    assert 190_000 <= len(part) <= 200_000
    server.log.clear()
    get(server, target)
    assert server.log == [("thing.gz", f"bytes={len(part)}-")]
    assert contents(target.parent) == {"thing.gz": CONTENT}


def test_a_part_that_was_already_whole_needs_no_server(server, target):
    target.parent.mkdir()
    target.with_name("thing.gz.part").write_bytes(CONTENT)
    get(server, target)
    assert server.log == []
    assert contents(target.parent) == {"thing.gz": CONTENT}


def test_a_server_without_ranges_sends_everything_again(server, target):
    server.ranges, server.cuts = False, [100_000]
    get(server, target)
    assert server.log == [("thing.gz", None), ("thing.gz", "bytes=100000-")]
    assert contents(target.parent) == {"thing.gz": CONTENT}


def test_a_server_without_ranges_that_always_breaks_is_given_up(server, target):
    server.ranges, server.cuts = False, [100_000] * 20
    with pytest.raises(InputError, match="the connection ended after 100000 of 300000 bytes"):
        get(server, target)
    assert len(server.log) == TRIES + 1


def test_a_wrong_file_is_refused_and_removed(server, target):
    wrong = CONTENT[:-1] + bytes([CONTENT[-1] ^ 1])
    server.contents["thing.gz"] = wrong
    with pytest.raises(InputError) as caught:
        get(server, target)
    for word in ("wrong file", f"expected {FILE.checksum}", f"found {entry('', wrong).checksum}", "nothing is kept"):
        assert word in str(caught.value)
    assert contents(target.parent) == {}


@pytest.mark.parametrize("begin", [b"stale" * 1000, b"x" * len(CONTENT), b"x" * (len(CONTENT) + 5)])
def test_old_bytes_that_do_not_fit_are_thrown_away_and_the_file_fetched_anew(server, target, begin):
    target.parent.mkdir()
    target.with_name("thing.gz.part").write_bytes(begin)
    get(server, target)
    assert contents(target.parent) == {"thing.gz": CONTENT}


def test_the_next_address_helps_out(server, target):
    server.contents |= {"wrong/thing.gz": b"x" * len(CONTENT), "short/thing.gz": b"<p>Sorry"}
    folders = [server.address + folder for folder in ("gone/", "wrong/", "short/", "")]
    get(server, target, *folders)
    assert contents(target.parent) == {"thing.gz": CONTENT}
    assert [path for path, _ in server.log] == ["gone/thing.gz", "wrong/thing.gz", "short/thing.gz", "thing.gz"]


def test_every_address_is_named_with_what_was_wrong_with_it(server, target):
    server.contents |= {"wrong/thing.gz": b"x" * len(CONTENT), "short/thing.gz": b"<p>Sorry"}
    folders = [server.address + folder for folder in ("gone/", "wrong/", "short/")]
    with pytest.raises(InputError) as caught:
        get(server, target, *folders, "http://127.0.0.1:1/")
    for word in ("gone/thing.gz answered 404", "wrong/thing.gz sent a wrong file", "short/thing.gz offers 8 bytes"):
        assert word in str(caught.value)
    assert "http://127.0.0.1:1/thing.gz failed" in str(caught.value)
    assert "unlazy data --from DIR" in str(caught.value)


def test_what_is_being_tried_is_said(server, target):
    server.cuts, said = [100_000], []
    download(FILE, (f"{server.address}gone/", server.address), target, Reports(), said.append)
    gone, here = (f"trying {server.address}{folder}thing.gz" for folder in ("gone/", ""))
    assert said == [gone, here, "the connection ended after 100000 of 300000 bytes; again in 0 s"]


def test_a_download_begun_at_one_address_goes_on_at_the_next(server, target):
    server.contents["other/thing.gz"] = CONTENT
    server.cuts = [100_000, *[0] * TRIES]
    get(server, target, server.address, server.address + "other/")
    assert server.log[-1] == ("other/thing.gz", "bytes=100000-")
    assert contents(target.parent) == {"thing.gz": CONTENT}


def test_a_busy_server_is_asked_again(server, target):
    def busy_at_first(handler, content):
        if len(server.log) < 3:
            handler.send_error(503)
        else:
            handler.send_response(200)
            handler.end_headers()
            handler.wfile.write(content)  # the length is not told: the end of the connection is the end

    server.special["thing.gz"] = busy_at_first
    get(server, target)
    assert len(server.log) == 3
    assert contents(target.parent) == {"thing.gz": CONTENT}


def test_a_server_that_does_not_stop_is_cut_off(server, target):
    def endless(handler, content):
        handler.send_response(200)
        handler.end_headers()
        for _ in range(100):
            handler.wfile.write(content)

    server.special["thing.gz"] = endless
    with pytest.raises(InputError, match="sent more than the 300000 bytes expected"):
        get(server, target)
    assert contents(target.parent) == {}


def test_a_server_that_sends_other_bytes_than_asked_is_refused(server, target):
    def from_the_start(handler, content):
        handler.send_response(206)
        handler.send_header("Content-Range", f"bytes 0-{len(content) - 1}/{len(content)}")
        handler.send_header("Content-Length", str(len(content)))
        handler.end_headers()
        handler.wfile.write(content)

    target.parent.mkdir()
    target.with_name("thing.gz.part").write_bytes(CONTENT[:1000])
    server.special["thing.gz"] = from_the_start
    with pytest.raises(InputError, match="other bytes than it was asked for"):
        get(server, target)
    assert contents(target.parent) == {"thing.gz.part": CONTENT[:1000]}


def test_a_redirect_keeps_the_place(server, target):
    def moved(handler, content):
        handler.send_response(302)
        handler.send_header("Location", server.address + "there/thing.gz")
        handler.end_headers()

    server.contents["there/thing.gz"] = CONTENT
    server.special["thing.gz"] = moved
    server.cuts = [70_000]
    get(server, target)
    assert server.log[-1] == ("there/thing.gz", "bytes=70000-")
    assert contents(target.parent) == {"thing.gz": CONTENT}


def test_two_downloads_of_one_file_do_not_mix(server, target):
    refusals = []

    def meanwhile(handler, content):
        del server.special["thing.gz"]
        try:
            get(server, target)
        except StoreError as error:
            refusals.append(str(error))
        server.answer(handler)

    server.special["thing.gz"] = meanwhile
    get(server, target)
    assert contents(target.parent) == {"thing.gz": CONTENT}
    assert len(refusals) == 1
    assert "another process is downloading" in refusals[0]


def test_a_folder_that_cannot_be_written_is_named(server, tmp_path, target):
    (tmp_path / "data").write_text("a file in the way")
    with pytest.raises(StoreError, match=r"could not write .*data/thing\.gz\.part"):
        get(server, target)


def test_a_folder_in_the_place_of_the_file_is_named_and_the_bytes_stay(server, target):
    target.mkdir(parents=True)
    with pytest.raises(StoreError, match=r"could not write .*thing\.gz: Is a directory; the whole file stands in"):
        get(server, target)
    assert contents(target.parent) == {"thing.gz.part": CONTENT}


def test_a_full_disk_is_named_and_keeps_what_came(server, target):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (150_000, before[1]))
    try:
        with pytest.raises(StoreError, match=r"could not write .*thing\.gz\.part: File too large"):
            get(server, target)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert contents(target.parent) == {"thing.gz.part": CONTENT[:150_000]}
    get(server, target)
    assert contents(target.parent) == {"thing.gz": CONTENT}


# --- whole data sets -------------------------------------------------------------------------------


def offered(server: Server, published: Published) -> Published:
    """The same data set, at the address of the test server."""
    if published.archive:
        server.contents[published.source.archive.name] = published.archive
    else:
        server.contents |= published.contents
    return replace(published, source=replace(published.source, addresses=(server.address,)))


def test_fetch_brings_what_is_missing_or_damaged_and_nothing_else(server, tmp_path):
    one = offered(server, publish_mnist("mnist", 0))
    one.put(tmp_path)
    first, second, *_ = (file.name for file in one.source.files)
    (tmp_path / "mnist" / first).unlink()
    (tmp_path / "mnist" / second).write_bytes(b"damaged")
    assert fetch(one.source, tmp_path, Reports()) == [tmp_path / "mnist" / first, tmp_path / "mnist" / second]
    assert contents(tmp_path / "mnist") == one.contents
    assert [path for path, _ in server.log] == [first, second]
    assert fetch(one.source, tmp_path, Reports()) == []
    assert len(server.log) == 2


def test_fetch_unpacks_an_archive_and_removes_it(server, tmp_path):
    one = offered(server, publish_cifar_10())
    assert len(fetch(one.source, tmp_path, Reports())) == len(one.contents)
    assert contents(tmp_path) == {f"{one.source.folder}/{name}": content for name, content in one.contents.items()}


def test_an_archive_that_is_already_there_is_not_fetched_again(server, tmp_path):
    one = offered(server, publish_cifar_10())
    put_archive(one, tmp_path)
    fetch(one.source, tmp_path, Reports())
    assert server.log == []
    assert combined_state(check_source(one.source, tmp_path)) == "present"
