"""The server: who may ask, what every answer carries, live events, and a clean end."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from contextlib import suppress
from pathlib import Path
from urllib.parse import quote

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from studio_runs import STEPS, arrays_at, files_below, header, kernel, write_run
from unlazy.runtime import InputError
from unlazy.store import Writer
from unlazy.studio.events import Watcher
from unlazy.studio.guard import Guard, check_binding, host_name
from unlazy.studio.run_index import RunIndex
from unlazy.studio.server import FOR_EVER, Studio, listen, make_app, serve

pytest.importorskip("starlette")
pytest.importorskip("httpx2")
from starlette.testclient import TestClient

BASE = "http://127.0.0.1:8123"
SECRET = "the-secret-of-the-house"
POSTING = {"Origin": BASE, "X-Unlazy": "1"}


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("server")
    write_run(folder / "runs" / "group" / "run")
    (folder / "secret.txt").write_text(SECRET)
    (folder / "runs" / "private.txt").write_text(SECRET)
    (folder / "runs" / "group" / "run" / "private.txt").write_text(SECRET)
    return folder / "runs"


@pytest.fixture(scope="module")
def studio(root):
    made = Studio(root)
    yield made
    made.close()


@pytest.fixture(scope="module")
def client(studio) -> TestClient:
    return TestClient(make_app(studio), base_url=BASE, follow_redirects=False)


# --- what passes ---------------------------------------------------------------------------------------


def test_arrays_travel_as_raw_bytes(client):
    answer = client.get("/api/array/group/run/overlap/4?member=1")
    assert answer.status_code == 200
    assert answer.headers["x-shape"] == "8,8"
    assert np.array_equal(np.frombuffer(answer.content, "<f4").reshape(8, 8), arrays_at(4)["overlap"][1])


def test_the_page_itself_is_sent(client):
    answer = client.get("/")
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/html")


def test_answers_are_not_sent_twice(client):
    first = client.get("/api/run/group/run")
    again = client.get("/api/run/group/run", headers={"If-None-Match": first.headers["etag"]})
    assert (first.headers["cache-control"], again.status_code, again.content) == ("no-cache", 304, b"")
    version = first.json()["version"]
    for path in ("array/group/run/output/4", "levels/group/run/overlap/4"):
        assert client.get(f"/api/{path}?v={version}").headers["cache-control"] == FOR_EVER
        assert client.get(f"/api/{path}?v=older").headers["cache-control"] == "no-cache"


def test_levels_of_a_run_that_still_grows_are_not_kept_for_ever(tmp_path):
    write_run(tmp_path / "run", finish=False)
    made = Studio(tmp_path)
    client = TestClient(make_app(made), base_url=BASE)
    version = client.get("/api/run/run").json()["version"]
    assert client.get(f"/api/levels/run/overlap/4?v={version}").headers["cache-control"] == "no-cache"
    assert client.get(f"/api/levels/run/overlap/4?scale=step&v={version}").headers["cache-control"] == FOR_EVER
    made.close()


@pytest.mark.parametrize(
    "path", ["/", "/api/runs", "/api/run/group/run", "/api/nothing", "/nothing", "/api/run/nothing"]
)
def test_every_answer_carries_its_security_headers(client, path):
    headers = client.get(path).headers
    policy = headers["content-security-policy"]
    assert "default-src 'self'" in policy
    assert "frame-ancestors 'none'" in policy
    assert "unsafe" not in policy
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["cross-origin-resource-policy"] == "same-origin"
    assert "access-control-allow-origin" not in headers


# --- what does not -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("headers", "passes"),
    [
        ({}, True),
        ({"Host": "localhost:8123"}, True),
        ({"Host": "[::1]:8123"}, True),
        ({"Host": "LOCALHOST"}, True),
        ({"Host": "evil.example"}, False),
        ({"Host": "127.0.0.1.evil.example"}, False),
        ({"Host": "localhost:8123@evil.example"}, False),
        ({"Host": "localhost.evil.example:8123"}, False),
        ({"Host": ""}, False),
        ({"Origin": BASE}, True),
        ({"Origin": "http://evil.example"}, False),
        ({"Origin": "null"}, False),
        ({"Origin": "http://127.0.0.1:9999"}, False),
        ({"Sec-Fetch-Site": "same-origin"}, True),
        ({"Sec-Fetch-Site": "none"}, True),
        ({"Sec-Fetch-Site": "same-site"}, False),
        ({"Sec-Fetch-Site": "cross-site"}, False),
        ({"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate"}, False),
    ],
)
def test_only_this_page_on_this_machine_may_ask(client, headers, passes):
    for path in ("/api/runs", "/api/array/group/run/output/0", "/api/claims"):
        answer = client.get(path, headers=headers)
        assert answer.status_code == (200 if passes else 403)
        if not passes:
            assert set(answer.json()) == {"error"}


def test_a_link_on_another_site_may_open_the_page_but_not_its_data(client):
    followed = {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate"}
    assert client.get("/", headers=followed).status_code == 200
    assert client.get("/", headers={"Sec-Fetch-Site": "cross-site"}).status_code == 403


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE"])
@pytest.mark.parametrize("path", ["/", "/api/runs", "/api/run/group/run", "/api/events"])
def test_nothing_can_be_changed(client, method, path):
    assert client.request(method, path, headers=POSTING).status_code == 405


@pytest.mark.parametrize("lacking", ["Origin", "X-Unlazy"])
def test_the_playground_obeys_only_the_page(client, lacking):
    headers = {name: value for name, value in POSTING.items() if name != lacking}
    for path in ("/api/play", "/api/play/ready", "/api/play/stop"):
        assert client.post(path, headers=headers, json={}).status_code == 403
        assert client.get(path).status_code == 405


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"nonsense",
        b"[]",
        b'{"width": 1e9}',
        b'{"width": 10000}',
        b'{"depth": 0}',
        b'{"width": true}',
        b'{"beta": NaN}',
        b'{"learning_rate": "fast"}',
        b'{"frequencies": [1]}',
        b'{"frequencies": "ab"}',
        b'{"model": "__import__"}',
        b'{"folder": "/etc"}',
        b'{"seed": -1}',
        b"{" + b" " * 5000 + b"}",
    ],
)
def test_settings_that_make_no_sense_are_refused(client, body):
    answer = client.post("/api/play", headers=POSTING, content=body)
    assert answer.status_code == 400
    assert answer.json()["error"]


TRICKS = [
    "..", "%2e%2e", "%2e%2e%2f%2e%2e", "..%2f..%2f", "..%5c..%5c", "%00", ".", "~", "private.txt", "secret.txt", "group", "run",
    "arrays", "run.json", "%252e%252e", "etc", "passwd", "overlap", "0",
    "4", "\u2025", "%c0%ae%c0%ae", "C:", "file:", "-1", "1e9",
]  # fmt: skip
ROUTES = [
    "run",
    "array",
    "levels",
    "embedding",
    "spectrum",
    "figure",
    "code",
    "frames",
    "kernel-samples",
    "difference",
    "claim-figure",
    "runs",
    "claims",
    "",
]


@settings(max_examples=300)
@given(
    route=st.sampled_from(ROUTES),
    parts=st.lists(st.sampled_from(TRICKS) | st.text(max_size=8).map(lambda text: quote(text, safe="")), max_size=6),
    query=st.sampled_from(
        [
            "",
            "?member=0",
            "?member=x",
            "?format=npy",
            "?scale=step",
            "?step=99&member=1",
            "?v=../..",
            "?steps=4&other=../../secret.txt",
            "?other=group/run",
        ]
    ),
)
@example(route="run", parts=["%0A", ""], query="")  # no route takes a line break: it must not be sent elsewhere either
def test_no_path_leads_outside(client, route, parts, query):
    answer = client.get(f"/api/{route}/{'/'.join(parts)}{query}")
    assert answer.status_code in (200, 400, 404)
    assert SECRET not in answer.text
    assert "root:x:" not in answer.text


@settings(max_examples=100)
@given(parts=st.lists(st.sampled_from(TRICKS), min_size=1, max_size=6))
def test_no_static_path_leads_outside(client, parts):
    answer = client.get("/" + "/".join(parts))
    assert answer.status_code in (200, 404)
    assert SECRET not in answer.text


def test_an_unforeseen_error_is_told_without_taking_the_page_down(client, studio, monkeypatch, caplog):
    monkeypatch.setattr(studio.api, "runs", lambda rest, parameters: 1 / 0)
    answer = client.get("/api/runs")
    assert answer.status_code == 500
    assert "ZeroDivisionError" in answer.json()["error"]
    assert answer.headers["x-content-type-options"] == "nosniff"


# --- tokens --------------------------------------------------------------------------------------------


def test_listening_elsewhere_needs_a_token(tmp_path):
    for host in ("0.0.0.0", "::", "192.168.0.7", "example.org"):
        with pytest.raises(InputError, match="--token"):
            check_binding(host, None)
        with pytest.raises(InputError, match="8 characters"):
            check_binding(host, "short")
        check_binding(host, "long-enough")
    for host in ("127.0.0.1", "localhost", "::1"):
        check_binding(host, None)
    with pytest.raises(InputError, match="--token"):
        serve(tmp_path, host="0.0.0.0")


def test_a_token_opens_the_page_once_and_a_cookie_keeps_it_open(studio):
    app = make_app(studio, host="192.168.0.7", token="correct horse")
    client = TestClient(app, base_url="http://192.168.0.7:8123", follow_redirects=False)
    for path in ("/", "/api/runs", "/studio.js", "/?token=wrong", "/api/runs?token=correct%20horse"):
        assert client.get(path).status_code == 401
    welcome = client.get("/?token=correct%20horse")
    assert (welcome.status_code, welcome.headers["location"]) == (303, "/")
    cookie = welcome.headers["set-cookie"]
    assert "HttpOnly" in cookie
    assert "SameSite=Strict" in cookie
    assert client.get("/api/runs").status_code == 200
    other = TestClient(app, base_url="http://192.168.0.7:8123")
    assert other.get("/api/runs", headers={"Authorization": "Bearer correct horse"}).status_code == 200
    assert other.get("/api/runs", headers={"Authorization": "Bearer correct horsf"}).status_code == 401
    assert other.get("/api/runs", headers={"Cookie": "unlazy_token=correct"}).status_code == 401
    assert (
        other.get("/api/runs", headers={"Authorization": "Bearer correct horse", "Host": "evil.example"}).status_code
        == 403
    )


def test_a_guard_refuses_what_is_not_http():
    async def never(*_):
        raise AssertionError

    guard = Guard(never, host="127.0.0.1", token=None, policy="default-src 'self'")
    asyncio.run(guard({"type": "websocket", "headers": []}, never, never))


@pytest.mark.parametrize(
    ("value", "name"),
    [
        ("localhost", "localhost"),
        ("Localhost:80", "localhost"),
        ("[::1]:80", "::1"),
        ("[::1]", "::1"),
        ("[::1", ""),
        ("a:b", ""),
        ("a:80:90", ""),
        ("127.0.0.1:", ""),
        ("", ""),
    ],
)
def test_host_names(value, name):
    assert host_name(value) == name


# --- live ----------------------------------------------------------------------------------------------


def parsed(chunk: bytes) -> tuple[str, dict]:
    kind, data = chunk.decode().strip().split("\n")
    return kind.removeprefix("event: "), json.loads(data.removeprefix("data: "))


async def until(stream, wanted) -> list[tuple[str, dict]]:
    seen = []
    async with asyncio.timeout(20):
        async for chunk in stream:
            seen.append(parsed(chunk))
            if wanted(seen[-1]):
                return seen
    raise AssertionError(seen)


def test_a_run_appears_grows_and_ends_before_the_readers_eyes(tmp_path):
    async def watch() -> None:
        watcher = Watcher(RunIndex(tmp_path))
        stream = watcher.stream("1")
        assert parsed(await anext(stream)) == ("hello", {"version": "1"})
        with Writer(tmp_path / "new", header(members=1)) as writer:
            seen = await until(stream, lambda event: event[0] == "run")
            assert ("runs", {"count": 1}) in seen
            card = seen[-1][1].pop("card")
            assert seen[-1][1] == {"key": "new", "state": "running", "step": 0, "live": True}
            assert card == watcher.run_index.card("new")
            writer.record(3, {"loss": np.ones(1)}, {"overlap": kernel(3, 1, 0)})
            await until(stream, lambda event: event[1].get("step") == 3)
            writer.finish()
            await until(stream, lambda event: event[1].get("state") == "finished")
        (tmp_path / "new" / "run.json").unlink()
        await until(stream, lambda event: event == ("runs", {"count": 0}))
        watcher.close()
        assert {parsed(chunk)[0] async for chunk in stream} <= {"end"}  # and it does end

    asyncio.run(watch())


def test_a_killed_run_is_told_as_interrupted(tmp_path):
    async def watch() -> None:
        writer = Writer(tmp_path / "run", header(members=1))
        watcher = Watcher(RunIndex(tmp_path))
        stream = watcher.stream("1")
        await anext(stream)
        writer.__exit__(None, None, None)  # the lock goes, no file changes
        seen = await until(stream, lambda event: event[0] == "run")
        assert seen[-1][1]["state"] == "interrupted"
        await stream.aclose()
        assert not watcher._readers

    asyncio.run(watch())


# --- the command ---------------------------------------------------------------------------------------


def test_a_taken_port_and_a_missing_folder_get_one_line(tmp_path):
    sock = listen("127.0.0.1", 0)
    with sock, pytest.raises(InputError, match="choose another --port"):
        listen("127.0.0.1", sock.getsockname()[1])
    with pytest.raises(InputError, match="is not a folder"):
        serve(tmp_path / "nowhere")


def test_without_its_packages_the_studio_names_the_extra(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    with pytest.raises(InputError, match=r"unlazy\[studio\]"):
        serve(tmp_path)


def test_help_needs_none_of_the_studio():
    code = (
        "import sys\nsys.argv = ['unlazy', 'studio', '--help']\nfrom unlazy.cli.app import main\n"
        "try: main()\nexcept SystemExit: pass\nprint('modules', *{name.split('.')[0] for name in sys.modules})"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = set(done.stdout.splitlines()[-1].split())
    assert "--no-browser" in done.stdout
    assert not loaded & {"starlette", "uvicorn", "torch", "numpy", "matplotlib"}


@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGTERM])
def test_the_command_serves_and_ends_cleanly(root, end):
    before = files_below(root)
    code = "from unlazy.cli.app import main; main()"
    command = [sys.executable, "-c", code, "studio", str(root), "--port", "0", "--no-browser"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stdout.readline().startswith("runs below")
        address = re.search(r"http://127\.0\.0\.1:\d+/", process.stdout.readline())[0]
        with urllib.request.urlopen(f"{address}api/run/group/run", timeout=30) as answer:
            assert json.load(answer)["steps"] == list(STEPS)
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(
                urllib.request.Request(f"{address}api/runs", headers={"Host": "evil.example"}), timeout=30
            )
        refused.value.close()
        assert refused.value.code == 403
        events = urllib.request.urlopen(f"{address}api/events", timeout=30)
        assert events.readline() == b"event: hello\n"
        process.send_signal(end)
        _, err = process.communicate(timeout=20)  # an open page does not hold it
        assert "Traceback" not in err
        events.close()
    finally:
        with suppress(OSError):
            os.kill(process.pid, signal.SIGKILL)
        process.wait()
        process.stdout.close()
        process.stderr.close()
    assert files_below(root) == before
