"""Tags and notes of a run, and its deletion."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from store_runs import files, header, small_run
from unlazy import InputError, Run, StoreError
from unlazy.store import Writer


def test_labels_are_replaced_one_by_one_and_leave_run_json_alone(tmp_path: Path) -> None:
    run = Run(small_run(tmp_path / "run"))
    before = files(run.folder)
    assert run.labels == {"tags": [], "notes": ""}
    run.set_labels(tags=["a", " b ", "a"])
    run.set_labels(notes="two\nlines")
    assert Run(run.folder).labels == {"tags": ["a", "b"], "notes": "two\nlines"}
    run.set_labels(tags=[])
    assert Run(run.folder).labels == {"tags": [], "notes": "two\nlines"}
    after = files(run.folder)
    del after["labels.json"]
    assert after == before


@pytest.mark.parametrize(
    "damage", [b"", b"nonsense", b"[]", b'{"tags": 3, "notes": ""}', b'{"tags": [3], "notes": ""}']
)
def test_damaged_labels_hide_no_run(tmp_path: Path, damage: bytes) -> None:
    run = Run(small_run(tmp_path / "run"))
    (run.folder / "labels.json").write_bytes(damage)
    assert run.labels == {"tags": [], "notes": ""}
    assert run.set_labels(tags=["a"]) == json.loads((run.folder / "labels.json").read_text())


@pytest.mark.parametrize("tags", ["sweep", [""], ["x" * 61], ["a\nb"], [str(i) for i in range(51)]])
def test_tags_that_are_none_are_refused(tmp_path: Path, tags: list[str]) -> None:
    run = Run(small_run(tmp_path / "run"))
    with pytest.raises(InputError, match="tag"):
        run.set_labels(tags=tags)
    with pytest.raises(InputError, match="notes must be a text"):
        run.set_labels(notes="x" * 10_001)
    assert not (run.folder / "labels.json").exists()


def test_a_run_that_is_being_written_takes_labels_but_is_not_deleted(tmp_path: Path) -> None:
    with Writer(tmp_path / "run", header()):
        run = Run(tmp_path / "run")
        run.set_labels(tags=["live"])
        before = files(run.folder)
        with pytest.raises(StoreError, match="being written"):
            run.delete()
        assert files(run.folder) == before


def test_a_deleted_run_leaves_nothing_but_what_is_not_its_own(tmp_path: Path) -> None:
    gone, kept = Run(small_run(tmp_path / "gone")), Run(small_run(tmp_path / "kept"))
    (kept.folder / "model.pt").write_text("weights of somebody")
    gone.set_labels(tags=["a"])
    assert gone.delete() == []
    assert not gone.folder.exists()
    assert kept.delete() == [kept.folder / "model.pt"]
    assert files(kept.folder) == {"model.pt": b"weights of somebody"}


def test_a_run_behind_a_link_is_not_deleted(tmp_path: Path) -> None:
    folder = small_run(tmp_path / "real" / "run")
    before = files(folder)
    (tmp_path / "link").symlink_to(folder)
    (tmp_path / "parent").symlink_to(folder.parent)
    for path in (tmp_path / "link", tmp_path / "parent" / "run"):
        with pytest.raises(StoreError, match="leads through a link"):
            Run(path).delete()
    assert files(folder) == before


def test_arrays_behind_a_link_stay(tmp_path: Path) -> None:
    folder = small_run(tmp_path / "run")
    (folder / "arrays").rename(tmp_path / "elsewhere")
    (folder / "arrays").symlink_to(tmp_path / "elsewhere")
    before = files(tmp_path / "elsewhere")
    Run(folder).delete()
    assert not folder.exists()
    assert files(tmp_path / "elsewhere") == before
