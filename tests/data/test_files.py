"""Published files on disk: known by their checksums, taken from folders and archives, never half and never elsewhere."""

from __future__ import annotations

import tarfile

import pytest

from published import Published, contents, entry, publish_all, put_archive, tar_gz
from unlazy import InputError
from unlazy.data import sources
from unlazy.data.files import (
    ImportedFile,
    check_file,
    check_source,
    combined_state,
    import_files,
    read_published_file,
    unpack,
)
from unlazy.runtime import data_folder


@pytest.fixture
def published(monkeypatch: pytest.MonkeyPatch) -> dict[str, Published]:
    """Small data sets take the places of the real ones."""
    sets = publish_all()
    for name, one in sets.items():
        monkeypatch.setitem(sources.SOURCES, name, one.source)
    return sets


# --- where -----------------------------------------------------------------------------------------


def test_the_data_folder_is_the_one_asked_for_or_in_the_users_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("UNLAZY_DATA", str(tmp_path / "mine"))
    assert data_folder() == tmp_path / "mine"
    monkeypatch.delenv("UNLAZY_DATA")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert data_folder() == tmp_path / "cache" / "unlazy"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert data_folder() == tmp_path / ".cache" / "unlazy"


def test_the_table_is_well_formed():
    assert list(sources.SOURCES) == ["mnist", "fashion-mnist", "cifar-10", "cifar-100"]
    for source in sources.SOURCES.values():
        for file in source.files:
            algorithm, digits = file.checksum.split(":")
            assert (algorithm, len(bytes.fromhex(digits))) == ("sha256", 32)
            assert source.file(file.name) is file
        assert all(address.startswith("http") and address.endswith("/") for address in source.addresses)
    every = [file.checksum for source in sources.SOURCES.values() for file in source.files]
    assert len(set(every)) == len(every)


# --- checksums -------------------------------------------------------------------------------------


def test_files_are_present_missing_or_damaged(tmp_path, published):
    mnist = published["mnist"]
    source, first = mnist.source, mnist.source.files[0]
    assert combined_state(check_source(source, tmp_path)) == "missing"
    mnist.put(tmp_path)
    assert combined_state(check_source(source, tmp_path)) == "present"
    path = tmp_path / "mnist" / first.name
    path.write_bytes(path.read_bytes()[:-1])
    check = check_file(path, first)
    assert check.state == "damaged"
    assert check.found == entry(first.name, path.read_bytes()).checksum != check.expected == first.checksum
    assert combined_state(check_source(source, tmp_path)) == "damaged"
    path.unlink()
    assert combined_state(check_source(source, tmp_path)) == "incomplete"
    path.mkdir()
    assert check_file(path, first).found == "unreadable (Is a directory)"
    assert check_file(path, first).state == "damaged"


@pytest.mark.parametrize("damage", [lambda data: data[:-1], lambda data: data + b"x", lambda data: data[:-1] + b"x"])
def test_a_damaged_file_is_named_with_expected_and_found_checksum(tmp_path, published, damage):
    mnist = published["mnist"]
    mnist.put(tmp_path)
    file = mnist.source.files[2]
    path = tmp_path / "mnist" / file.name
    path.write_bytes(damage(path.read_bytes()))
    found = entry(file.name, path.read_bytes()).checksum
    with pytest.raises(InputError) as caught:
        read_published_file(mnist.source, file.name, tmp_path)
    for word in (str(path), "damaged", f"expected {file.checksum}", f"found {found}", "unlazy data fetch mnist"):
        assert word in str(caught.value)


def test_a_missing_file_is_named_with_both_ways_to_get_it(tmp_path, published, monkeypatch):
    name = published["mnist"].source.files[0].name
    with pytest.raises(InputError, match=f"{name} is missing; `unlazy data fetch mnist --to .*` downloads it"):
        read_published_file(published["mnist"].source, name, tmp_path)
    monkeypatch.setenv("UNLAZY_DATA", str(tmp_path))
    with pytest.raises(InputError, match="`unlazy data fetch mnist` downloads it, `unlazy data --from DIR` takes it"):
        read_published_file(published["mnist"].source, name, tmp_path)


# --- archives --------------------------------------------------------------------------------------


def test_an_archive_gives_the_files_and_nothing_else(tmp_path, published):
    one = published["cifar-10"]
    unpack(put_archive(one, tmp_path), one.source, tmp_path / "data")
    found = contents(tmp_path / "data")
    assert found == {f"cifar-10-batches-py/{name}": content for name, content in one.contents.items()}


def _link(name: str, kind: bytes, target: str) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, target
    return info


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.DIRTYPE, tarfile.FIFOTYPE, tarfile.CHRTYPE])
def test_a_member_that_is_not_a_plain_file_is_refused(tmp_path, published, kind):
    one = published["cifar-100"]
    (tmp_path / "secret").write_bytes(one.contents["train"])
    link = _link("cifar-100-python/train", kind, str(tmp_path / "secret"))
    path = put_archive(one, tmp_path / "origin", tar_gz({"cifar-100-python/train": link}))
    with pytest.raises(InputError, match="cifar-100-python/train is a link, folder or device"):
        unpack(path, one.source, tmp_path / "data")
    assert not (tmp_path / "data").exists()


def test_members_that_lead_elsewhere_are_never_written(tmp_path, published):
    one = published["cifar-100"]
    good = {f"cifar-100-python/{name}": content for name, content in one.contents.items()}
    bad = {
        "../escaped": b"x",
        "cifar-100-python/../../escaped": b"x",
        str(tmp_path / "absolute"): b"x",
        "cifar-100-python/unknown": b"x",
        "cifar-100-python": _link("cifar-100-python", tarfile.SYMTYPE, str(tmp_path)),
    }
    unpack(put_archive(one, tmp_path / "origin", tar_gz({**bad, **good})), one.source, tmp_path / "data")
    assert contents(tmp_path / "data").keys() == good.keys()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data", "origin"]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda content: content + b"x", r"cifar-100-python/test has \d+ bytes, expected \d+"),
        (lambda content: content[:-1] + b"x", "cifar-100-python/test is damaged: expected sha256:.*, found sha256:"),
    ],
)
def test_a_changed_member_is_refused(tmp_path, published, change, said):
    one = published["cifar-100"]
    members = {f"cifar-100-python/{name}": content for name, content in one.contents.items()}
    members["cifar-100-python/test"] = change(members["cifar-100-python/test"])
    with pytest.raises(InputError, match=said):
        unpack(put_archive(one, tmp_path, tar_gz(members)), one.source, tmp_path / "data")
    assert not (tmp_path / "data" / "cifar-100-python" / "test").exists()


def test_an_archive_without_a_file_says_which(tmp_path, published):
    one = published["cifar-100"]
    path = put_archive(one, tmp_path, tar_gz({"cifar-100-python/meta": one.contents["meta"]}))
    with pytest.raises(InputError, match="does not hold cifar-100-python/train, cifar-100-python/test"):
        unpack(path, one.source, tmp_path / "data")


@pytest.mark.parametrize("share", [0.0, 0.3, 0.9])
def test_a_cut_archive_is_named(tmp_path, published, share):
    one = published["cifar-100"]
    path = put_archive(one, tmp_path, one.archive[: int(share * len(one.archive))] or b"no archive")
    with pytest.raises(InputError, match=r"cifar-100-python.tar.gz is not a whole .tar.gz archive"):
        unpack(path, one.source, tmp_path / "data")


# --- taking files from a folder --------------------------------------------------------------------


def outcomes(arrivals: list[ImportedFile]) -> dict[str, tuple[str | None, str]]:
    return {arrival.path.name: (arrival.source, arrival.outcome) for arrival in arrivals}


def test_files_are_found_anywhere_and_known_by_their_checksum(tmp_path, published):
    """MNIST and Fashion-MNIST use the same names; here both lie where nothing says which is which."""
    origin, data = tmp_path / "origin", tmp_path / "data"
    for folder, name in (("a/raw", "mnist"), ("b/deeper/raw", "fashion-mnist"), ("c", "cifar-10"), ("c", "cifar-100")):
        (origin / folder).mkdir(parents=True, exist_ok=True)
        for file, content in published[name].contents.items():
            (origin / folder / file).write_bytes(content)
    arrivals = import_files(origin, data)
    assert {arrival.outcome for arrival in arrivals} == {"copied"}
    expected = {
        f"{one.source.folder}/{file}": content for one in published.values() for file, content in one.contents.items()
    }
    assert contents(data) == expected
    assert {arrival.outcome for arrival in import_files(origin, data)} == {"already there"}
    assert contents(data) == expected


def test_a_folder_with_a_wrong_name_misleads_nobody(tmp_path, published):
    one = published["fashion-mnist"]
    one.put(tmp_path / "origin")
    (tmp_path / "origin" / "fashion-mnist").rename(tmp_path / "origin" / "mnist")
    import_files(tmp_path / "origin", tmp_path / "data")
    assert contents(tmp_path / "data") == {f"fashion-mnist/{file}": content for file, content in one.contents.items()}


def test_archives_are_unpacked_unless_the_files_are_there(tmp_path, published):
    one, data = published["cifar-10"], tmp_path / "data"
    put_archive(one, tmp_path / "origin")
    assert outcomes(import_files(tmp_path / "origin", data)) == {one.source.archive.name: ("cifar-10", "unpacked")}
    assert combined_state(check_source(one.source, data)) == "present"
    assert outcomes(import_files(tmp_path / "origin", data)) == {one.source.archive.name: ("cifar-10", "already there")}


def test_damaged_files_are_reported_and_left_alone(tmp_path, published):
    one, data = published["mnist"], tmp_path / "data"
    one.put(tmp_path / "origin")
    name = one.source.files[1].name
    bad = tmp_path / "origin" / "mnist" / name
    bad.write_bytes(b"not labels")
    [arrival] = [arrival for arrival in import_files(tmp_path / "origin", data) if arrival.outcome == "damaged"]
    assert (arrival.path, arrival.source) == (bad, None)
    assert arrival.expected == f"{one.source.files[1].checksum} (mnist)"
    assert arrival.found == entry(name, b"not labels").checksum
    assert len(contents(data)) == len(one.contents) - 1
    stray = tmp_path / "elsewhere" / name
    stray.parent.mkdir()
    stray.write_bytes(b"not labels")
    [arrival] = import_files(stray.parent, data)
    assert arrival.expected.endswith("(fashion-mnist)")
    assert "(mnist) or sha256:" in arrival.expected


def test_a_damaged_archive_is_reported_and_not_opened(tmp_path, published):
    one = published["cifar-10"]
    put_archive(one, tmp_path / "origin", one.archive[:-1])
    [arrival] = import_files(tmp_path / "origin", tmp_path / "data")
    assert (arrival.outcome, arrival.expected) == ("damaged", f"{one.source.archive.checksum} (cifar-10)")
    assert not (tmp_path / "data").exists()


def test_files_of_others_that_share_a_plain_name_are_passed_over(tmp_path, published):
    (tmp_path / "origin" / "project").mkdir(parents=True)
    (tmp_path / "origin" / "project" / "train").write_text("#!/bin/sh")
    (tmp_path / "origin" / "test").mkdir()
    with pytest.raises(InputError, match=r"no standard file below .*; looked for train-images-idx3-ubyte\.gz"):
        import_files(tmp_path / "origin", tmp_path / "data")
    (tmp_path / "origin" / "cifar-100-python").mkdir()
    (tmp_path / "origin" / "cifar-100-python" / "train").write_text("#!/bin/sh")
    [arrival] = import_files(tmp_path / "origin", tmp_path / "data")  # in that folder it can only be meant
    assert arrival.outcome == "damaged"


def test_a_damaged_file_in_the_data_folder_is_replaced(tmp_path, published):
    one, data = published["mnist"], tmp_path / "data"
    one.put(tmp_path / "origin")
    one.put(data)
    name = one.source.files[0].name
    (data / "mnist" / name).write_bytes(b"damaged")
    assert outcomes(import_files(tmp_path / "origin", data))[name] == ("mnist", "copied")
    assert combined_state(check_source(one.source, data)) == "present"
