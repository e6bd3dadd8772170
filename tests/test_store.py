"""The run folder: what is written comes back, what is unfinished stays invisible, what is not ours stays untouched."""

import ast
import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import unlazy
from unlazy import store
from unlazy.store import Run, StoreError, Writer, find_runs, write_file


def header(width: int = 3, started: str = "2024-01-01T00:00:00+00:00") -> dict:
    return {
        "kind": "train",
        "study": "tiny",
        "scale": None,
        "recipe": {"width": width},
        "members": [{"seed": 0}, {"seed": 1}],
        "model": None,
        "data": {"name": "none", "options": {}, "fingerprint": "0"},
        "provenance": {"started": started},
    }


def measure(writer: Writer, step: int, *, arrays: bool = False, checkpoint: bool = False) -> None:
    rng = np.random.default_rng(step)
    writer.record(
        step,
        {"loss": rng.random(2, dtype=np.float32)},
        {"a": rng.random((2, 4)), "b": rng.integers(9, size=(2, 3))} if arrays else None,
        {"model/w": rng.random((2, 5), dtype=np.float32), "random/order": np.arange(4)} if checkpoint else None,
    )


def small_run(folder: Path) -> Path:
    """Steps 0..3, arrays at even steps, checkpoints at 0 and 2; not finished."""
    with Writer(folder, header()) as writer:
        for step in range(4):
            measure(writer, step, arrays=step % 2 == 0, checkpoint=step % 2 == 0)
    return folder


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def timeless(metrics: bytes) -> list[dict]:
    """The metrics lines without their times."""
    return [{key: value for key, value in json.loads(line).items() if key != "time"} for line in metrics.splitlines()]


# --- what is written comes back ------------------------------------------------------------------


def test_float32_scalars_keep_their_bits(tmp_path):
    bits = np.random.default_rng(0).integers(2**32, size=2000, dtype=np.uint32)
    values = np.append(bits.view(np.float32), np.float32([0.0, -0.0, 1e-45, 0.1, 3.4028235e38]))
    values = values[np.isfinite(values)]
    with Writer(tmp_path / "run", header()) as writer:
        writer.record(0, {"loss": values})
    _, read = Run(tmp_path / "run").scalars("loss")
    assert np.array_equal(read[0].astype(np.float32).view(np.uint32), values.view(np.uint32))


def test_float64_scalars_keep_their_bits(tmp_path):
    values = np.random.default_rng(1).standard_normal(500)
    with Writer(tmp_path / "run", header()) as writer:
        writer.record(0, {"loss": values})
    assert np.array_equal(Run(tmp_path / "run").scalars("loss")[1][0], values)


def test_scalars_come_with_the_steps_that_have_them(tmp_path):
    with Writer(tmp_path / "run", header()) as writer:
        writer.record(0, {"loss": np.ones(2)})
        writer.record(3, {"other": np.zeros(2)})
        writer.record(5, {"loss": np.array([2.0, 3.0])})
    steps, values = Run(tmp_path / "run").scalars("loss")
    assert steps.tolist() == [0, 5]
    assert values.tolist() == [[1, 1], [2, 3]]


def test_a_nan_scalar_comes_back_as_nan_and_the_file_is_strict_json(tmp_path):
    with Writer(tmp_path / "run", header()) as writer:
        writer.record(0, {"loss": np.array([1.5, np.nan], dtype=np.float32)})
    assert b"NaN" not in (tmp_path / "run" / "metrics.jsonl").read_bytes()
    _, read = Run(tmp_path / "run").scalars("loss")
    assert np.array_equal(read, [[1.5, np.nan]], equal_nan=True)


def test_an_unknown_scalar_names_the_known_ones(tmp_path):
    with pytest.raises(StoreError, match="no scalar 'lost'; it has: loss"):
        Run(small_run(tmp_path / "run")).scalars("lost")


@pytest.mark.parametrize("dtype", ["float32", "float64", "int64", "bool"])
def test_arrays_come_back_bit_for_bit(tmp_path, dtype):
    value = np.random.default_rng(2).standard_normal((2, 3, 4)).astype(dtype)
    with Writer(tmp_path / "run", header()) as writer:
        writer.record(7, {}, {"kernel": value, "turned": value.T})
    run = Run(tmp_path / "run")
    for name, expected in (("kernel", value), ("turned", value.T)):
        read = run.array(name, 7)
        assert read.dtype == expected.dtype
        assert np.array_equal(read, expected)


def test_checkpoints_come_back_bit_for_bit_even_from_strided_views(tmp_path):
    wide = np.random.default_rng(3).standard_normal((4, 6))
    tensors = {"model/w": wide[:, ::2], "optim/w/mean": wide.T, "random/order": np.arange(6)}
    with Writer(tmp_path / "run", header()) as writer:
        writer.record(7, {}, checkpoint=tensors)
    step, read = Run(tmp_path / "run").last_checkpoint()
    assert step == 7
    assert read.keys() == tensors.keys()
    for name, expected in tensors.items():
        assert read[name].dtype == expected.dtype
        assert np.array_equal(read[name], expected)


def test_the_last_checkpoint_is_the_newest(tmp_path):
    assert Run(small_run(tmp_path / "run")).last_checkpoint()[0] == 2


def test_a_run_without_checkpoint_has_none(tmp_path):
    with Writer(tmp_path / "run", header()) as writer:
        measure(writer, 0, arrays=True)
    assert Run(tmp_path / "run").last_checkpoint() is None


def test_the_id_is_a_hash_of_the_recipe_only(tmp_path):
    for name, head in (("a", header()), ("b", header(started="2025")), ("c", header(width=4))):
        Writer(tmp_path / name, head).__exit__(None, None, None)
    a, b, c = (Run(tmp_path / name).id for name in "abc")
    assert a == b != c
    assert len(a) == 12


# --- what is unfinished stays invisible ----------------------------------------------------------


def test_an_array_that_no_line_names_is_invisible(tmp_path):
    folder = small_run(tmp_path / "run")
    (folder / "arrays" / "a" / "00000001.npy").write_bytes((folder / "arrays" / "a" / "00000000.npy").read_bytes())
    run = Run(folder)
    assert run.array_steps("a") == [0, 2]
    with pytest.raises(StoreError, match=r"no 'a' at step 1; steps: \[0, 2\]"):
        run.array("a", 1)


def test_a_checkpoint_that_no_line_names_is_invisible(tmp_path):
    folder = small_run(tmp_path / "run")
    newest = folder / "checkpoints" / "00000002.safetensors"
    newest.with_name("00000009.safetensors").write_bytes(newest.read_bytes())
    assert Run(folder).last_checkpoint()[0] == 2


def test_files_are_written_before_the_line_that_names_them(tmp_path, monkeypatch):
    seen = []
    append = store._append_line

    def watch(path, line, *, durable):
        seen.append(sorted(p.name for p in path.parent.rglob("0*")))
        append(path, line, durable=durable)

    monkeypatch.setattr(store, "_append_line", watch)
    with Writer(tmp_path / "run", header()) as writer:
        measure(writer, 5, arrays=True, checkpoint=True)
    assert seen == [["00000005.npy", "00000005.npy", "00000005.safetensors"]]


@pytest.mark.parametrize("tail", [b"", b"{", b'{"step":4,"scalars":{},"arrays":{},"checkpoint":null}', b"\xff\x00"])
def test_a_last_line_without_newline_is_ignored(tmp_path, tail):
    folder = small_run(tmp_path / "run")
    with (folder / "metrics.jsonl").open("ab") as file:
        file.write(tail)
    assert [line.step for line in Run(folder).lines] == [0, 1, 2, 3]


# --- damage is named -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "damage",
    [b"nonsense", b'{"step": 1}', b"[]", b"\xff\xfe", b"", b'{"step":1,\r"scalars'],
    ids=["words", "missing keys", "a list", "not utf-8", "empty", "carriage return"],
)
def test_a_damaged_middle_line_is_an_error_that_names_file_and_line(tmp_path, damage):
    metrics = small_run(tmp_path / "run") / "metrics.jsonl"
    lines = metrics.read_bytes().split(b"\n")
    metrics.write_bytes(b"\n".join([lines[0], damage, *lines[2:]]))
    with pytest.raises(StoreError, match=r"metrics\.jsonl, line 2, is damaged"):
        _ = Run(tmp_path / "run").lines


def test_resuming_a_damaged_run_is_refused_and_changes_nothing(tmp_path):
    folder = small_run(tmp_path / "run")
    metrics = folder / "metrics.jsonl"
    metrics.write_bytes(b"nonsense\n" + metrics.read_bytes())
    before = files(folder)
    with pytest.raises(StoreError, match="line 1, is damaged"):
        Writer(folder, header())
    assert files(folder) == before


@pytest.mark.parametrize("kept", [0, 4, 40, -1])
def test_a_truncated_checkpoint_is_refused_on_resume_and_changes_nothing(tmp_path, kept):
    folder = small_run(tmp_path / "run")
    path = folder / "checkpoints" / "00000002.safetensors"
    path.write_bytes(path.read_bytes()[:kept])
    before = files(folder)
    with pytest.raises(StoreError, match=r"00000002\.safetensors is missing or truncated"):
        Writer(folder, header())
    assert files(folder) == before


@pytest.mark.parametrize("kept", [0, 4, 60, -1])
def test_a_truncated_array_is_an_error_that_names_it(tmp_path, kept):
    folder = small_run(tmp_path / "run")
    path = folder / "arrays" / "a" / "00000002.npy"
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(StoreError, match=r"a/00000002\.npy is missing or damaged"):
        Run(folder).array("a", 2)


@pytest.mark.parametrize("text", ["", "{", "[]", "3", '{"format": 99}', "\x00"])
def test_a_folder_with_another_run_json_is_not_a_run(tmp_path, text):
    (tmp_path / "run.json").write_text(text)
    with pytest.raises(StoreError, match=r"run\.json"):
        Run(tmp_path)


def test_a_missing_folder_is_not_a_run(tmp_path):
    with pytest.raises(StoreError, match="is not a run: there is no such folder"):
        Run(tmp_path / "nowhere")


def test_a_run_killed_before_its_first_status_reads_interrupted(tmp_path):
    folder = small_run(tmp_path / "run")
    (folder / "status.json").unlink()
    assert Run(folder).status()["state"] == "interrupted"


# --- resuming ------------------------------------------------------------------------------------


def test_resume_goes_back_to_the_last_checkpoint_line(tmp_path):
    folder = small_run(tmp_path / "run")
    before = (folder / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    with Writer(folder, header()) as writer:
        step, tensors = writer.resumed
    assert step == 2
    assert tensors["model/w"].shape == (2, 5)
    assert (folder / "metrics.jsonl").read_bytes() == b"".join(before[:3])


def test_resume_keeps_named_files_and_deletes_orphans_and_temporaries(tmp_path):
    folder = small_run(tmp_path / "run")
    named = {name for name in files(folder) if name[0] != "."}
    with (folder / "metrics.jsonl").open("ab") as file:  # a line after the last checkpoint names an array
        file.write(b'{"arrays":{"a":"a/00000004"},"checkpoint":null,"scalars":{},"step":4,"time":0}\n')
    for orphan in ("arrays/a/00000004.npy", "arrays/c/00000001.npy", "checkpoints/00000003.safetensors"):
        (folder / orphan).parent.mkdir(exist_ok=True)
        (folder / orphan).write_bytes(b"x")
    for temporary in (".status.json.7.tmp", "arrays/a/.00000004.npy.7.tmp", "checkpoints/.00000003.safetensors.7.tmp"):
        (folder / temporary).write_bytes(b"x")
    with Writer(folder, header()):
        pass
    assert set(files(folder)) == named


def test_resume_without_any_checkpoint_starts_again(tmp_path):
    with Writer(tmp_path / "run", header()) as writer:
        measure(writer, 0, arrays=True)
        measure(writer, 1)
    with Writer(tmp_path / "run", header()) as writer:
        assert writer.resumed is None
    assert Run(tmp_path / "run").lines == []
    assert not list((tmp_path / "run").rglob("*.npy"))


def test_resume_does_not_rewrite_the_header(tmp_path):
    folder = small_run(tmp_path / "run")
    before = (folder / "run.json").read_bytes()
    with Writer(folder, header(started="2030")):
        pass
    assert (folder / "run.json").read_bytes() == before


def test_resume_with_another_recipe_is_refused_and_changes_nothing(tmp_path):
    folder = small_run(tmp_path / "run")
    before = files(folder)
    with pytest.raises(StoreError, match="other settings"):
        Writer(folder, header(width=4))
    assert files(folder) == before


def test_a_refused_writer_gives_the_lock_back(tmp_path):
    folder = small_run(tmp_path / "run")
    with pytest.raises(StoreError, match="other settings"):
        Writer(folder, header(width=4))
    with Writer(folder, header()):
        pass


def test_status_follows_the_work(tmp_path):
    folder = tmp_path / "run"
    with Writer(folder, header()) as writer:
        assert Run(folder).status() == {"state": "running", "step": 0, "error": None}
        measure(writer, 4, checkpoint=True)
        assert Run(folder).status() == {"state": "running", "step": 4, "error": None}
        writer.finish()
    assert Run(folder).status() == {"state": "finished", "step": 4, "error": None}


def test_an_error_inside_marks_the_run_failed_and_it_can_be_resumed(tmp_path):
    folder = tmp_path / "run"
    with pytest.raises(ZeroDivisionError), Writer(folder, header()) as writer:
        measure(writer, 2, checkpoint=True)
        _ = 1 / 0
    assert Run(folder).status() == {"state": "failed", "step": 2, "error": "ZeroDivisionError: division by zero"}
    with Writer(folder, header()) as writer:
        assert writer.resumed[0] == 2


# --- other people's folders ----------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["notes.txt", "arrays/x/y.npy", ".a.tmp", "metrics.jsonl", "status.json", "run.json", "run.json.bak"]
)
def test_a_strangers_folder_is_refused_and_left_untouched(tmp_path, name):
    path = tmp_path / "theirs" / name
    path.parent.mkdir(parents=True)
    path.write_text("theirs")
    with pytest.raises(StoreError):
        Writer(tmp_path / "theirs", header())
    assert files(tmp_path) == {f"theirs/{name}": b"theirs"}


def test_an_empty_folder_may_become_a_run(tmp_path):
    (tmp_path / "run").mkdir()
    assert len(Run(small_run(tmp_path / "run")).lines) == 4


def test_a_start_that_was_killed_before_its_header_can_be_repeated(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "lock").touch()
    (folder / ".run.json.7.tmp").write_text("{")
    small_run(folder)
    assert not (folder / ".run.json.7.tmp").exists()


@pytest.mark.parametrize("where", ["file", "file/run"])
def test_a_file_in_the_way_is_a_clear_error(tmp_path, where):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(StoreError, match="Choose another folder"):
        Writer(tmp_path / where, header())
    assert files(tmp_path) == {"file": b"mine"}


def test_write_file_below_a_file_is_a_clear_error(tmp_path):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(StoreError, match="could not write"):
        write_file(tmp_path / "file" / "below" / "x.json", b"{}")
    assert files(tmp_path) == {"file": b"mine"}


def test_write_file_puts_a_new_file_in_the_place_of_the_old_one(tmp_path):
    """Whoever is reading the old file goes on reading it whole."""
    write_file(tmp_path / "x.json", b"old")
    with (tmp_path / "x.json").open("rb") as reader:
        write_file(tmp_path / "x.json", b"new and longer")
        assert reader.read() == b"old"
    assert files(tmp_path) == {"x.json": b"new and longer"}


# --- two writers ---------------------------------------------------------------------------------

HOLDER = """
import json, sys
from unlazy.store import Writer
with Writer(sys.argv[1], json.loads(sys.argv[2])):
    print("ready", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def holder(tmp_path):
    """Another process that is writing ``tmp_path/run``."""
    command = [sys.executable, "-c", HOLDER, str(tmp_path / "run"), json.dumps(header())]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout.readline() == "ready\n"
            yield process
        finally:
            process.kill()


def test_a_second_writer_is_refused_while_the_first_lives(tmp_path, holder):
    before = files(tmp_path / "run")
    with pytest.raises(StoreError, match="being written by another process"):
        Writer(tmp_path / "run", header())
    assert files(tmp_path / "run") == before
    assert Run(tmp_path / "run").status()["state"] == "running"


def test_a_killed_writer_frees_its_lock_and_reads_interrupted(tmp_path, holder):
    holder.kill()
    holder.wait()
    assert json.loads((tmp_path / "run" / "status.json").read_text())["state"] == "running"
    assert Run(tmp_path / "run").status()["state"] == "interrupted"
    with Writer(tmp_path / "run", header()):
        assert Run(tmp_path / "run").status()["state"] == "running"


def test_a_reader_that_looks_at_the_lock_does_not_turn_a_writer_away(tmp_path, monkeypatch):
    """Somebody asks for the status at the very moment a writer arrives: the writer waits for the look to end."""
    folder = small_run(tmp_path / "run")
    flock, reader = store.fcntl.flock, os.open(folder / "lock", os.O_RDONLY)
    flock(reader, store.fcntl.LOCK_SH)
    tries = []

    def let_go_after_a_try(descriptor, operation):
        tries.append(operation)
        if len(tries) == 2:
            flock(reader, store.fcntl.LOCK_UN)
        return flock(descriptor, operation)

    monkeypatch.setattr(store.fcntl, "flock", let_go_after_a_try)
    try:
        with Writer(folder, header()) as writer:
            assert writer.resumed[0] == 2
    finally:
        os.close(reader)


# --- finding runs --------------------------------------------------------------------------------


def test_find_runs_lists_good_runs_by_age_and_reports_broken_ones(tmp_path):
    for name, started in (("z", "2024-01-01"), ("deep/a", "2025-01-01")):
        Writer(tmp_path / name, header(started=started)).__exit__(None, None, None)
    for name, text in (("words", "nonsense"), ("future", '{"format": 99}'), ("bare", '{"format": 1}')):
        (tmp_path / name).mkdir()
        (tmp_path / name / "run.json").write_text(text)
    (tmp_path / "not-a-run").mkdir()
    runs, broken = find_runs(tmp_path)
    assert [str(run.folder.relative_to(tmp_path)) for run in runs] == ["z", "deep/a"]
    assert all(isinstance(error, StoreError) for error in broken)
    for name, error in zip(("bare", "future", "words"), broken, strict=True):
        assert str(tmp_path / name) in str(error)


def test_find_runs_below_nothing_finds_nothing(tmp_path):
    assert find_runs(tmp_path / "nowhere") == ([], [])


# --- no pickle -----------------------------------------------------------------------------------


def test_a_pickled_array_is_refused(tmp_path):
    folder = small_run(tmp_path / "run")
    with (folder / "arrays" / "a" / "00000002.npy").open("wb") as file:
        np.save(file, np.array([{"any": "object"}], dtype=object), allow_pickle=True)
    with pytest.raises(StoreError, match=r"00000002\.npy"):
        Run(folder).array("a", 2)


def test_an_object_array_is_not_written(tmp_path):
    with pytest.raises(ValueError, match="pickle"), Writer(tmp_path / "run", header()) as writer:
        writer.record(0, {}, {"a": np.array([{}], dtype=object)})
    assert not list((tmp_path / "run").rglob("*.npy"))


def pickling(source: str) -> list[str]:
    """What in this source would read or write pickles."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            found += [node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)]
        elif isinstance(node, ast.Attribute | ast.keyword):
            found.append(ast.unparse(node))
    banned = {"torch.load", "torch.save", "allow_pickle=True"}
    modules = {"pickle", "_pickle", "cloudpickle", "dill", "joblib", "shelve", "marshal"}
    return [name for name in found if name in banned or name.split(".")[0] in modules]


@pytest.mark.parametrize(
    "source",
    [
        "import pickle as p",
        "from pickle import dumps",
        "from torch import save",
        "torch.load(x)",
        "f(allow_pickle=True)",
    ],
)
def test_the_pickle_search_finds_pickles(source):
    assert pickling(source)


def test_the_package_pickles_nothing():
    """But for the restricted reader of published CIFAR files, which has tests of its own."""
    package = Path(unlazy.__file__).parent
    sources = sorted(set(package.rglob("*.py")) - {package / "data" / "cifar.py"})
    assert len(sources) > 20
    assert {str(path): found for path in sources if (found := pickling(path.read_text()))} == {}


# --- a full disk ---------------------------------------------------------------------------------


def work(folder: Path) -> None:
    """The small run and its end, from wherever it stands."""
    with Writer(folder, header()) as writer:
        first = writer.resumed[0] + 1 if writer.resumed else 0
        for step in range(first, 4):
            measure(writer, step, arrays=step % 2 == 0, checkpoint=step % 2 == 0)
        writer.finish()


def comparable(folder: Path) -> dict:
    found = files(folder)
    return found | {"metrics.jsonl": timeless(found["metrics.jsonl"])}


def fill_the_disk(monkeypatch, at: int, *, for_good: bool) -> list[int]:
    """The ``at``-th write (and all later ones, if ``for_good``) gets half of its bytes out, then the disk is full."""
    put, calls = store._put, []

    def limited(descriptor: int, data: bytes) -> None:
        calls.append(len(data))
        if len(calls) == at or (for_good and len(calls) > at):
            put(descriptor, data[: len(data) // 2])
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        put(descriptor, data)

    monkeypatch.setattr(store, "_put", limited)
    return calls


def writes_of_the_work(folder: Path) -> int:
    with pytest.MonkeyPatch.context() as patch:
        calls = fill_the_disk(patch, 0, for_good=False)
        work(folder)
    return len(calls)


@pytest.mark.parametrize("for_good", [False, True], ids=["one write fails", "the disk stays full"])
def test_a_full_disk_at_any_write_leaves_whole_files_and_a_run_to_go_on_with(tmp_path, for_good):
    total = writes_of_the_work(tmp_path / "whole")
    whole = comparable(tmp_path / "whole")
    assert total > 10
    for at in range(1, total + 1):
        folder = tmp_path / f"full-{at}"
        with pytest.MonkeyPatch.context() as patch:
            fill_the_disk(patch, at, for_good=for_good)
            with pytest.raises(StoreError, match=r"could not write .*: No space left on device\. .*[Ff]ree some space"):
                work(folder)
        found = files(folder)
        steps = timeless(found.pop("metrics.jsonl", b""))
        found.pop("status.json", None)
        assert found.items() <= whole.items()  # so: no temporaries, nothing half-written
        assert steps == whole["metrics.jsonl"][: len(steps)]
        if "run.json" in found:
            run = Run(folder)
            for line in run.lines:
                for quantity in line.arrays:
                    run.array(quantity, line.step)
            run.last_checkpoint()
        work(folder)
        assert comparable(folder) == whole, f"write {at} of {total}"


def test_no_space_for_a_new_file_is_a_clear_error(tmp_path, monkeypatch):
    """The disk is full already when a file is opened, not only when it is written."""
    real = os.open

    def full(path, flags, *rest, **options):
        if flags & os.O_CREAT and Path(path).name == "metrics.jsonl":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(path, flags, *rest, **options)

    monkeypatch.setattr(os, "open", full)
    with pytest.raises(StoreError, match="No space left on device"):
        work(tmp_path / "run")
