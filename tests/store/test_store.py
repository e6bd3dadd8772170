"""The run folder: what is written comes back, what is unfinished stays invisible, what is damaged is named."""

import json
import os
from pathlib import Path

import numpy as np
import pytest

from store_runs import files, header, measure, small_run, timeless
from unlazy import store
from unlazy.store import Run, StoreError, Writer, find_runs, write_file

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


def test_an_unknown_array_names_the_known_ones_and_an_unknown_step_the_steps(tmp_path):
    with Writer(tmp_path / "run", header()) as writer:
        writer.record(7, {}, {"kernel": np.eye(2), "output": np.ones(3)})
    run = Run(tmp_path / "run")
    with pytest.raises(StoreError, match="no array 'kernl'; it has: kernel, output"):
        run.array("kernl", 7)
    with pytest.raises(StoreError, match=r"no 'kernel' at step 0; steps: \[7\]"):
        run.array("kernel", 0)


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


def cut_checkpoint(path, kept):
    path.write_bytes(path.read_bytes()[:kept])


def flip_checkpoint(path, at):
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


DAMAGE = [(cut_checkpoint, 0), (cut_checkpoint, 4), (cut_checkpoint, -1), (flip_checkpoint, 3), (flip_checkpoint, -3)]


@pytest.mark.parametrize(("damage", "at"), DAMAGE)
def test_a_damaged_last_checkpoint_falls_back_to_the_one_before(tmp_path, damage, at):
    folder, whole = small_run(tmp_path / "run"), small_run(tmp_path / "whole")
    damage(folder / "checkpoints" / "00000002.safetensors", at)
    warned = pytest.warns(UserWarning, match=r"00000002\.safetensors is damaged.*The one before it is used")
    with warned, Writer(folder, header()) as writer:
        assert writer.resumed is not None
        step, tensors = writer.resumed
        assert step == 0
        assert all(np.array_equal(tensors[name], value) for name, value in Run(whole).checkpoint(0).items())
        for step in range(1, 4):
            measure(writer, step, arrays=step % 2 == 0, checkpoint=step % 2 == 0)
    ours, wanted = files(folder), files(whole)
    assert timeless(ours.pop("metrics.jsonl")) == timeless(wanted.pop("metrics.jsonl"))
    assert ours == wanted


@pytest.mark.parametrize(("damage", "at"), DAMAGE)
def test_a_run_without_any_whole_checkpoint_is_refused_and_stays_as_it_is(tmp_path, damage, at):
    folder = small_run(tmp_path / "run")
    for name in ("00000000", "00000002"):
        damage(folder / "checkpoints" / f"{name}.safetensors", at)
    before = files(folder)
    with (
        pytest.warns(UserWarning, match="00000002"),
        pytest.raises(StoreError, match=r"00000000.*No other one is whole"),
    ):
        Writer(folder, header())
    assert files(folder) == before


def test_checkpoints_of_older_runs_have_no_checksum_and_are_read(tmp_path):
    folder = small_run(tmp_path / "run")
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    old = [json.dumps({name: value for name, value in line.items() if name != "checksum"}) for line in lines]
    (folder / "metrics.jsonl").write_text("\n".join(old) + "\n")
    step, tensors = Run(folder).last_checkpoint()
    assert step == 2
    assert tensors


def test_folders_are_flushed_after_a_file_takes_its_name(tmp_path, monkeypatch):
    flushed, plain = [], os.fsync

    def note(descriptor):
        flushed.append(Path(f"/proc/self/fd/{descriptor}").readlink().relative_to(tmp_path).as_posix())
        plain(descriptor)

    monkeypatch.setattr(os, "fsync", note)
    write_file(tmp_path / "new" / "below" / "file", b"7")
    assert flushed[:2] == ["new", "."]
    assert flushed[2].endswith(".tmp")
    assert flushed[3:] == ["new/below"]


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
