"""``unlazy data``: what it says, what it leaves behind, and with which exit code."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace

import pytest

from published import publish_all, serving
from unlazy.cli import app as cli
from unlazy.data import fetch as fetch_module
from unlazy.data import sources


@pytest.fixture
def published(monkeypatch):
    sets = publish_all()
    for name, one in sets.items():
        monkeypatch.setitem(sources.SOURCES, name, one.source)
    return sets


@pytest.fixture
def data(tmp_path, monkeypatch):
    folder = tmp_path / "data"
    monkeypatch.setenv("UNLAZY_DATA", str(folder))
    monkeypatch.chdir(tmp_path)
    return folder


@pytest.fixture
def unlazy_data(data, published, monkeypatch, capsys):
    """Calls the real entry point; gives exit code, standard output, standard error."""

    def call(*words: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["unlazy", "data", *map(str, words)])
        with pytest.raises(SystemExit) as stop:
            cli.main()
        out, err = capsys.readouterr()
        return stop.value.code or 0, out, err

    return call


@pytest.fixture
def online(published, monkeypatch):
    """The small data sets stand on a local server."""
    monkeypatch.setenv("no_proxy", "*")
    monkeypatch.setattr(fetch_module, "PAUSE", 0.0)
    with serving() as server:
        for name, one in published.items():
            monkeypatch.setitem(sources.SOURCES, name, replace(one.source, addresses=(f"{server.address}{name}/",)))
            offered = {one.source.archive.name: one.archive} if one.archive else one.contents
            server.contents |= {f"{name}/{file}": content for file, content in offered.items()}
        yield server


def row(out: str, name: str) -> list[str]:
    [line] = [line for line in out.splitlines() if line.startswith(f"{name} ")]
    return line.split()


# --- list ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("words", [(), ("list",)])
def test_list_says_what_there_is_and_how_to_get_the_rest(unlazy_data, published, data, words):
    published["mnist"].put(data)
    published["cifar-10"].put(data)
    published["cifar-100"].put(data)
    (data / "cifar-10-batches-py" / "data_batch_2").write_bytes(b"")
    (data / "cifar-100-python" / "test").unlink()
    code, out, err = unlazy_data(*words)
    assert (code, err) == (0, "")
    states = {name: row(out, name)[1] for name in published}
    assert states == {"mnist": "present", "fashion-mnist": "missing", "cifar-10": "damaged", "cifar-100": "incomplete"}
    assert row(out, "mnist")[-1] == str(data / "mnist")
    assert "`unlazy data fetch fashion-mnist` or `unlazy data --from DIR`" in out
    assert f"data folder: {data}" in out


def test_list_as_json_has_the_sizes(unlazy_data, published, tmp_path):
    published["mnist"].put(tmp_path / "elsewhere")
    code, out, _ = unlazy_data("list", "--json", "--folder", tmp_path / "elsewhere")
    rows = {entry["name"]: entry for entry in json.loads(out)}
    assert code == 0
    assert list(rows) == ["mnist", "fashion-mnist", "cifar-10", "cifar-100", "digits"]
    assert rows["mnist"]["state"] == "present"
    assert rows["mnist"]["bytes"] == sum(map(len, published["mnist"].contents.values()))
    assert f"--to {tmp_path / 'elsewhere'}" in rows["cifar-10"]["where"]


@pytest.mark.parametrize("installed", [True, False])
def test_digits_are_there_with_scikit_learn(unlazy_data, monkeypatch, installed):
    monkeypatch.setattr("unlazy.cli.data.find_spec", lambda name: object() if installed else None)
    _, out, _ = unlazy_data("list")
    assert row(out, "digits")[1] == ("present" if installed else "missing")
    assert ("pip install scikit-learn" in out) == (not installed)


# --- verify ----------------------------------------------------------------------------------------


def test_verify_prints_every_checksum(unlazy_data, published, data):
    published["mnist"].put(data)
    code, out, err = unlazy_data("verify")
    assert (code, err) == (0, "")
    for file in published["mnist"].source.files:
        assert f"{data / 'mnist' / file.name}\n          {file.checksum}" in out
    assert out.splitlines()[-1] == "4 present, 0 missing, 0 damaged"


def test_verify_names_damage_with_expected_and_found_and_fails(unlazy_data, published, data):
    published["mnist"].put(data)
    first, second = published["mnist"].source.files[:2]
    (data / "mnist" / first.name).write_bytes(b"")
    (data / "mnist" / second.name).unlink()
    code, out, _ = unlazy_data("verify", "mnist")
    assert code == 1
    nothing = "sha256:e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"  # SHA-256 of no bytes
    assert (
        f"damaged   {data / 'mnist' / first.name}\n          expected {first.checksum}\n          found    {nothing}"
        in out
    )
    assert f"missing   {data / 'mnist' / second.name}" in out
    assert out.splitlines()[-1] == "2 present, 1 missing, 1 damaged"
    assert unlazy_data("verify")[0] == 1


def test_verify_of_one_data_set_fails_when_it_is_not_there(unlazy_data, published, data):
    published["mnist"].put(data)
    assert unlazy_data("verify", "cifar-100")[0] == 1
    assert unlazy_data("verify")[0] == 0  # what is not there at all was not asked for
    assert unlazy_data("verify", "mnist", "--folder", data / "deeper")[0] == 1


# --- fetch -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["mnist", "cifar-10"])
def test_fetch_brings_a_data_set_that_verifies(unlazy_data, online, data, name, published):
    code, out, err = unlazy_data("fetch", name)
    assert code == 0
    assert f"{name} is complete in {data / published[name].source.folder}." in out
    assert "(kB): " in err  # progress
    assert f"trying {online.address}{name}/" in err
    assert unlazy_data("verify", name)[0] == 0
    online.log.clear()
    code, out, _ = unlazy_data("fetch", name)
    assert (code, online.log) == (0, [])
    assert "there was nothing to fetch" in out


def test_fetch_goes_on_where_it_was_interrupted(unlazy_data, online, data):
    online.cuts = [10, *[0] * fetch_module.TRIES]
    code, out, err = unlazy_data("fetch", "mnist")
    assert (code, out) == (2, "")
    assert "the same command goes on from there" in err.splitlines()[-1]
    online.log.clear()
    assert unlazy_data("fetch", "mnist")[0] == 0
    assert online.log[0][1] == "bytes=10-"


def test_fetch_refuses_a_wrong_file_and_keeps_none_of_it(unlazy_data, online, data):
    for path, content in online.contents.items():
        online.contents[path] = bytes(len(content))
    code, out, err = unlazy_data("fetch", "cifar-100")
    assert (code, out) == (2, "")
    assert "sent a wrong file (expected md5:" in err
    assert list(data.iterdir()) == []


def test_fetch_can_go_elsewhere(unlazy_data, online, data, tmp_path):
    assert unlazy_data("fetch", "mnist", "--to", tmp_path / "mine")[0] == 0
    assert unlazy_data("verify", "mnist", "--folder", tmp_path / "mine")[0] == 0
    assert not data.exists()


# --- from a folder ---------------------------------------------------------------------------------


def test_files_come_from_a_folder(unlazy_data, published, data, tmp_path):
    for name in ("mnist", "fashion-mnist"):
        published[name].put(tmp_path / "stick")
    (tmp_path / "stick" / "cifar-10-batches-py.tar.gz").write_bytes(published["cifar-10"].archive)
    code, out, err = unlazy_data("--from", tmp_path / "stick")
    assert (code, err) == (0, "")
    for name in ("mnist", "fashion-mnist", "cifar-10"):
        assert f"{name} is complete in {data / published[name].source.folder}." in out
    assert "unpacked       cifar-10" in out
    assert unlazy_data("verify")[0] == 0
    assert out.count("copied ") == 8
    assert unlazy_data("--from", tmp_path / "stick")[1].count("already there") == 9


def test_a_folder_with_damage_is_taken_from_in_part_and_fails(unlazy_data, published, data, tmp_path):
    published["mnist"].put(tmp_path / "stick")
    bad = tmp_path / "stick" / "mnist" / "t10k-labels-idx1-ubyte.gz"
    bad.write_bytes(b"")
    code, out, _ = unlazy_data("--from", tmp_path / "stick", "--to", tmp_path / "mine")
    assert code == 1
    assert f"expected {published['mnist'].source.file(bad.name).checksum} (mnist)" in out
    assert "mnist is incomplete: t10k-labels-idx1-ubyte.gz not found." in out
    assert len(list((tmp_path / "mine" / "mnist").iterdir())) == 3


# --- mistakes --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["fetch", "emnist"], ["no data set 'emnist'", "mnist, fashion-mnist, cifar-10, cifar-100"]),
        (["fetch", "digits"], ["digits come with scikit-learn"]),
        (["verify", "emnist"], ["no data set 'emnist'"]),
        (["verify"], ["there are no data files in", "unlazy data fetch NAME"]),
        (["--from", "nowhere"], ["nowhere is not a folder"]),
        (["--from", "."], ["no standard file below"]),
        (["--from", ".", "list"], ["--from and --to stand alone, not before list"]),
        (["--to", "."], ["--from says which, and is missing"]),
    ],
)
def test_a_mistake_gets_one_line_and_leaves_nothing(tmp_path, unlazy_data, words, expected):
    code, out, err = unlazy_data(*words)
    assert (code, out) == (2, "")
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    for word in expected:
        assert word in err
    assert list(tmp_path.iterdir()) == []


def test_data_commands_do_without_torch(data):
    code = "import sys; sys.argv = ['unlazy', 'data', 'list']\nfrom unlazy.cli.app import main\n"
    code += (
        "try: main()\nexcept SystemExit: pass\nassert 'torch' not in sys.modules and 'unlazy.data.files' in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
