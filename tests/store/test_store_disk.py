"""A full disk leaves whole files and a run to go on with."""

import errno
import os
from pathlib import Path

import pytest

from store_runs import files, header, measure, timeless
from unlazy import store
from unlazy.store import Run, StoreError, Writer


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
    put, calls = store._write_all, []

    def limited(descriptor: int, data: bytes) -> None:
        calls.append(len(data))
        if len(calls) == at or (for_good and len(calls) > at):
            put(descriptor, data[: len(data) // 2])
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        put(descriptor, data)

    monkeypatch.setattr(store, "_write_all", limited)
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
