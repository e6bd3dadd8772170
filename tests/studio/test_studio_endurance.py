"""What must not hold the studio up: pipes among the files, visitors who never finish, many starts at once, very long runs."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from studio_runs import ask_json, header, kernel, write_run
from unlazy.runtime import StoreError
from unlazy.store import Writer, read_lines
from unlazy.studio import run_reader, server
from unlazy.studio.api import StudioApi
from unlazy.studio.estimator_pages import list_page
from unlazy.studio.playground import Playground
from unlazy.studio.playground_child import PlaySettings
from unlazy.studio.run_index import RunIndex
from unlazy.studio.run_reader import WATCHED, open_run_folder


def in_time(call, seconds: float = 10):
    """The result of a call, in a thread of its own, so that one that hangs fails the test instead of stopping it."""
    found = []
    thread = threading.Thread(target=lambda: found.append(call()), daemon=True)
    thread.start()
    thread.join(seconds)
    assert not thread.is_alive(), "it hangs"
    assert found, "it raised; see above"
    return found[0]


@pytest.mark.parametrize("name", [*WATCHED, "lock"])
def test_a_pipe_among_the_files_of_a_run_does_not_hang_the_list(store, name):
    (store / "second" / name).unlink(missing_ok=True)
    os.mkfifo(store / "second" / name)
    api = StudioApi(RunIndex(store))
    answer = in_time(lambda: ask_json(api, "runs"))
    assert [card["key"] for card in answer["runs"]] == ["a/first"]
    assert "pipe" in answer["broken"][0]["error"]


def test_a_pipe_in_place_of_an_array_is_named_on_the_page_of_its_run(store):
    path = store / "second" / "arrays" / "overlap" / "00000050.npy"
    path.unlink()
    os.mkfifo(path)
    os.mkfifo(store / "estimator.safetensors")
    api = StudioApi(RunIndex(store))
    facts = in_time(lambda: ask_json(api, "run/second"))
    assert any("pipe" in problem for problem in facts["problems"])
    assert "tangent" in facts["arrays"]
    assert "There is none here" in in_time(lambda: list_page(store))


# --- connections -----------------------------------------------------------------------------------------


@pytest.fixture
def address(tmp_path, monkeypatch) -> Iterator[tuple[str, int]]:
    """A studio in this process that waits half a second for a request."""
    import uvicorn

    monkeypatch.setattr(server, "REQUEST_SECONDS", 0.5)
    write_run(tmp_path / "one")
    sock, studio = server.listen("127.0.0.1", 0), server.Studio(tmp_path)
    app = server.make_app(studio)
    running = uvicorn.Server(uvicorn.Config(app, log_level="critical", http=server.timed_protocol(), ws="none"))
    thread = threading.Thread(target=running.run, kwargs={"sockets": [sock]}, daemon=True)
    thread.start()
    yield sock.getsockname()
    running.should_exit = True
    thread.join(10)
    studio.close()


GET = b"GET /api/runs HTTP/1.1\r\nHost: 127.0.0.1\r\n"


def is_closed(connection: socket.socket, seconds: float = 5) -> bool:
    """Whether the other side ends the connection within some seconds."""
    connection.settimeout(seconds)
    try:
        return connection.recv(1 << 20) == b""
    except TimeoutError:
        return False
    except ConnectionError:
        return True


@pytest.mark.parametrize("sent", [b"", b"GET / HT", GET, GET + b"X-Slow: "])
def test_a_visitor_who_never_finishes_a_header_is_sent_away(address, sent):
    with socket.create_connection(address) as connection:
        connection.sendall(sent)
        assert is_closed(connection)


def test_a_second_request_that_never_ends_is_cut_too_and_a_whole_one_is_answered(address):
    with socket.create_connection(address) as connection:
        for _ in range(2):
            connection.sendall(GET + b"\r\n")
            time.sleep(0.1)
            assert b"200 OK" in connection.recv(1 << 20)
        connection.sendall(GET)
        assert is_closed(connection)


def test_an_answer_that_takes_longer_than_a_request_may_is_given(address):
    """Events go on for as long as the page is open."""
    with socket.create_connection(address) as connection:
        connection.sendall(b"GET /api/events HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
        time.sleep(1.2)
        connection.settimeout(2)
        assert b"hello" in connection.recv(1 << 20)
        assert not is_closed(connection, 0.5)


def test_small_answers_are_sent_at_once(tmp_path):
    sock = server.listen("127.0.0.1", 0)
    with socket.create_connection(sock.getsockname()):
        accepted, _ = sock.accept()
        assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        accepted.close()
    sock.close()


# --- the playground --------------------------------------------------------------------------------------


def test_twelve_starts_at_once_leave_one_training_and_no_other_error():
    playground = Playground()
    try:

        def start(seed: int) -> str:
            """The key of a run, or the reason why there is none."""
            try:
                return playground.start(PlaySettings(seed=seed))
            except StoreError as error:
                return str(error)

        with ThreadPoolExecutor(12) as pool:
            ends = list(pool.map(start, range(12)))
        assert all(end.startswith("~play/") or "could not start" in end for end in ends)
        assert playground.current_run() in ends
        assert playground.start(PlaySettings(seed=12)) == playground.current_run()
    finally:
        playground.close()


# --- long runs -------------------------------------------------------------------------------------------


def write_long(folder: Path, lines: int, every: int = 1000) -> None:
    """A run with a measurement a step; every so many name an array."""
    with Writer(folder, header("long", 1)) as writer:
        writer.record(0, {"loss": np.ones(1)}, {"overlap": kernel(3, 1, 0)})
        writer.finish()
    with (folder / "metrics.jsonl").open("a") as file:
        for step in range(1, lines):
            arrays = f'{{"overlap":"overlap/{step:08d}"}}' if step % every == 0 else "{}"
            rare = f',"rare":[{step}.0]' if step % every == 0 else ""
            file.write(
                f'{{"arrays":{arrays},"checkpoint":null,"scalars":{{"loss":[{1 / step:.6g}]{rare}}},'
                f'"step":{step},"time":1.5}}\n'
            )


def test_of_a_long_run_some_lines_are_read_and_all_that_name_arrays(tmp_path, monkeypatch):
    monkeypatch.setattr(run_reader, "MOST_LINES", 100)
    write_long(tmp_path / "long", 2345, every=100)
    whole, reader = read_lines(tmp_path / "long" / "metrics.jsonl"), open_run_folder(tmp_path / "long")
    assert reader.measurements == len(whole) == 2345
    assert len(reader.lines) < 200
    assert [line for line in whole if line in reader.lines] == reader.lines
    assert [line for line in whole if line.arrays] == [line for line in reader.lines if line.arrays]
    assert reader.lines[-2:] == whole[-2:]
    facts = ask_json(StudioApi(RunIndex(tmp_path)), "run/long")
    assert facts["scalars"]["rare"]["steps"] == list(range(100, 2345, 100))
    assert any("of 2,345 measurements" in problem for problem in facts["problems"])


def test_a_long_run_that_grows_is_not_read_again(tmp_path, monkeypatch):
    monkeypatch.setattr(run_reader, "MOST_LINES", 100)
    write_long(tmp_path / "long", 2345)
    first = open_run_folder(tmp_path / "long")
    with (tmp_path / "long" / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 9999, "scalars": {"loss": [0.5]}, "arrays": {}, "checkpoint": None}) + "\n")
    monkeypatch.setattr(run_reader, "_count_lines", lambda path: pytest.fail("read again"))
    second = run_reader.RunReader("long", first.folder, first.root, first)
    assert second.lines == [*first.lines, second.lines[-1]]
    assert (second.lines[-1].step, second.measurements) == (9999, 2346)


@pytest.mark.slow
def test_a_run_of_a_million_lines_opens_in_seconds_within_500_mb(tmp_path):
    write_long(tmp_path / "long", 1_000_000)
    code = (
        "import sys, time\n"
        "from unlazy.studio.api import StudioApi\n"
        "from unlazy.studio.run_index import RunIndex\n"
        "start = time.process_time()\n"
        "api = StudioApi(RunIndex(sys.argv[1]))\n"
        "api.answer(['runs'], {}); api.answer(['run', 'long'], {})\n"
        "peak = next(line for line in open('/proc/self/status') if line.startswith('VmHWM'))\n"  # ru_maxrss holds the parent's
        "print(time.process_time() - start, int(peak.split()[1]) / 1024)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True)
    seconds, megabytes = map(float, done.stdout.split())
    assert seconds < 10
    assert megabytes < 500
