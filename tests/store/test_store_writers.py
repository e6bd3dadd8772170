"""Writing to a run folder: resuming, other people's folders, and two writers at once."""

import errno
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from store_runs import files, header, measure, small_run
from unlazy import Scope, store
from unlazy.store import Run, StoreError, Writer, write_file

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


# --- locks, links and pipes ---------------------------------------------------------------------------------------------


def test_a_lock_is_free_when_its_writer_died_although_a_child_lives_on(tmp_path: Path) -> None:
    """A DataLoader's workers are forks; they must not keep the run of a dead training locked."""
    program = f"""
import os, sys, time
from pathlib import Path
from unlazy.store import Writer
writer = Writer({str(tmp_path / "run")!r}, {header()!r})
child = os.fork()
if child == 0:
    os.close(1)
    time.sleep(60)
    os._exit(0)
print(child, flush=True)
os.kill(os.getpid(), 9)
"""
    done = subprocess.run([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, timeout=60)
    child = int(done.stdout)
    try:
        os.kill(child, 0)  # it lives
        assert Run(tmp_path / "run").status()["state"] == "interrupted"
    finally:
        os.kill(child, signal.SIGKILL)


def test_a_child_leaves_the_lock_of_its_parent_alone(tmp_path: Path) -> None:
    with Writer(tmp_path / "run", header()):
        child = os.fork()
        if child == 0:
            os._exit(0)
        os.waitpid(child, 0)
        assert Run(tmp_path / "run").status()["state"] == "running"


@pytest.mark.parametrize("name", ["run.json", "status.json", "metrics.jsonl", "labels.json", "lock"])
def test_a_pipe_in_place_of_a_file_does_not_make_readers_wait(tmp_path: Path, name: str) -> None:
    with Writer(tmp_path / "run", header()) as writer:
        writer.record(1, {"loss": np.array([1.0])})
    (tmp_path / "run" / name).unlink(missing_ok=True)
    os.mkfifo(tmp_path / "run" / name)
    read = "run = Run(sys.argv[1]); run.status(); run.lines; run.labels"
    program = f"import sys; from unlazy.store import Run, StoreError\ntry:\n    {read}\nexcept StoreError:\n    pass"
    subprocess.run([sys.executable, "-c", program, str(tmp_path / "run")], timeout=30, check=True)


def test_a_file_system_without_locks_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("fcntl.flock", refuse)
    with pytest.raises(StoreError, match="cannot lock files"):
        Writer(tmp_path / "run", header())


def test_overwrite_deletes_nothing_through_links_and_nothing_of_others(tmp_path: Path) -> None:
    net, x, y = torch.nn.Linear(3, 2), torch.randn(8, 3), torch.arange(8) % 2
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "00000000.npy").write_bytes(b"mine")
    Scope(net, (x, y), tmp_path / "run").finish()
    (tmp_path / "run" / "arrays" / "linked").symlink_to(elsewhere)
    (tmp_path / "run" / "arrays" / "output" / "notes.npy").write_bytes(b"mine too")
    Scope(net, (x, y), tmp_path / "run", overwrite=True).finish()
    assert (elsewhere / "00000000.npy").read_bytes() == b"mine"
    assert (tmp_path / "run" / "arrays" / "output" / "notes.npy").read_bytes() == b"mine too"
    (tmp_path / "link").symlink_to(tmp_path / "run")
    with pytest.raises(StoreError, match="leads through a link"):
        Scope(net, (x, y), tmp_path / "link", overwrite=True)
    assert Run(tmp_path / "run").status()["state"] == "finished"
