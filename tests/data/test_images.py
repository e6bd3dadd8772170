"""Images: the published pixels in the published order, scaled and standardised by their formulas."""

from __future__ import annotations

import hashlib
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch

from published import publish_all
from unlazy import Circle, InputError
from unlazy.data import sources
from unlazy.data.cifar import read_batch
from unlazy.data.files import check_source, combined_state
from unlazy.data.images import DIGITS_TRAIN, MOMENTS, Images, load_images
from unlazy.runtime import data_folder

SETS = publish_all()


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A data folder with small data sets in the places of the real ones."""
    for name, one in SETS.items():
        monkeypatch.setitem(sources.SOURCES, name, one.source)
        one.put(tmp_path)
    return tmp_path


def some(**changes) -> Images:
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randint(0, 256, (6, 2, 3, 4), generator=generator).to(torch.uint8)
    labels = torch.tensor([0, 2, 1, 2, 0, 2])
    whole = Images("mine", "train", pixels, labels, ("a", "b", "c"), mean=(0.5, 0.25), deviation=(0.1, 0.2))
    return replace(whole, **changes)


# --- files -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("split", ["train", "test"])
@pytest.mark.parametrize("name", SETS)
def test_images_are_those_that_were_written(folder, name, split):
    images = load_images(name, split, folder)
    pixels, labels = SETS[name].arrays[split]
    np.testing.assert_array_equal(images.pixels.numpy(), pixels)
    assert images.labels.tolist() == labels.tolist()
    assert (images.name, images.split, images.white, len(images)) == (name, split, 255, len(labels))
    assert len(images.classes) == (100 if name == "cifar-100" else 10)


def test_classes_have_their_names(folder):
    assert load_images("mnist", "test", folder).classes == tuple("0123456789")
    assert load_images("fashion-mnist", "test", folder).classes[9] == "Ankle boot"
    assert load_images("cifar-10", "test", folder).classes[3] == "kind 3"  # from the meta file
    assert load_images("cifar-100", "test", folder).classes[42] == "fine 42"


def test_the_folder_is_the_data_folder_unless_told(folder, monkeypatch):
    monkeypatch.setenv("UNLAZY_DATA", str(folder))
    assert load_images("mnist").fingerprint == load_images("mnist", "train", folder).fingerprint


@pytest.mark.parametrize("name", SETS)
def test_missing_and_damaged_files_are_named(folder, name):
    source = SETS[name].source
    path = folder / source.folder / source.files[0].name
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(
        InputError, match=f"{path.name} is damaged: expected {source.files[0].checksum} .*found sha256:"
    ):
        load_images(name, "train", folder)
    path.unlink()
    with pytest.raises(InputError, match=f"{path.name} is missing; `unlazy data fetch {name} .*unlazy data --from DIR"):
        load_images(name, "train", folder)


def test_a_file_is_not_opened_before_its_checksum_fits(folder, monkeypatch):
    opened = []

    def spy(data, path, key):
        opened.append(path.name)
        return read_batch(data, path, key)

    monkeypatch.setattr("unlazy.data.images.read_batch", spy)
    path = folder / "cifar-10-batches-py" / "data_batch_3"
    path.write_bytes(path.read_bytes() + b" ")  # still the same pickle to an unpickler
    assert len(read_batch(path.read_bytes(), path, b"labels")[1]) == 3
    with pytest.raises(InputError, match="data_batch_3 is damaged"):
        load_images("cifar-10", "train", folder)
    assert opened == ["data_batch_1", "data_batch_2"]


def test_unknown_names_and_splits_are_refused():
    with pytest.raises(
        InputError, match="no data set 'emnist'; there are: mnist, fashion-mnist, cifar-10, cifar-100, digits"
    ):
        load_images("emnist")
    with pytest.raises(InputError, match="split must be 'train' or 'test', got 'valid'"):
        load_images("mnist", "valid")


# --- numbers ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("white", [255, 300])
def test_floats_and_rows_follow_their_formulas(white):
    images = some(white=white)
    flat, standard = images.flat(), images.flat(standardise=True)
    assert flat.dtype == standard.dtype == torch.float32
    assert flat.shape == standard.shape == (6, 24)
    for n in range(6):
        for channel, row, column in np.ndindex(2, 3, 4):
            value = int(images.pixels[n, channel, row, column]) / white
            position = channel * 12 + row * 4 + column
            assert float(flat[n, position]) == pytest.approx(value, abs=1e-6)
            expected = (value - (0.5, 0.25)[channel]) / (0.1, 0.2)[channel]
            assert float(standard[n, position]) == pytest.approx(expected, abs=1e-5)
    assert torch.equal(images.floats().flatten(1), flat)
    assert float(flat.min()) >= 0
    assert float(flat.max()) <= 1


def test_one_hot_has_one_at_the_class():
    assert some().one_hot().tolist() == [[float(label == k) for k in range(3)] for label in (0, 2, 1, 2, 0, 2)]


@pytest.mark.parametrize("rows", [slice(1, 4), torch.tensor([5, 0, 0]), torch.tensor([True, False] * 3)])
def test_taking_some_keeps_pictures_and_labels_together(rows):
    images = some()
    taken = images.take(rows)
    numbers = torch.arange(6)[rows]
    for position, number in enumerate(numbers.tolist()):
        assert torch.equal(taken.pixels[position], images.pixels[number])
        assert taken.labels[position] == images.labels[number]
    assert len(taken) == len(numbers)
    assert torch.equal(taken.flat(standardise=True), images.flat(standardise=True)[rows])
    assert (taken.name, taken.split, taken.classes) == (images.name, images.split, images.classes)


def test_the_fingerprint_sees_every_value():
    images = some()
    assert images.fingerprint == some().fingerprint
    for where in ((0, 0, 0, 0), (5, 1, 2, 3)):
        pixels = images.pixels.clone()
        pixels[where] ^= 1
        assert some(pixels=pixels).fingerprint != images.fingerprint
    labels = images.labels.clone()
    labels[3] = 0
    assert some(labels=labels).fingerprint != images.fingerprint
    assert some(pixels=images.pixels.reshape(6, 2, 4, 3)).fingerprint != images.fingerprint
    assert images.take(torch.arange(6)).fingerprint == images.fingerprint


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"labels": torch.tensor([0, 1, 2, 3, 0, 0])}, "labels from 0 to 3, but there are 3 classes"),
        ({"labels": torch.tensor([0, 1, -1, 0, 0, 0])}, "labels from -1 to 1"),
        ({"white": 16}, "but white is 16"),
    ],
)
def test_images_that_do_not_fit_together_are_refused(changes, said):
    with pytest.raises(InputError, match=rf"images 'mine' \(train\).*{said}"):
        some(**changes)


def test_no_images_are_refused():
    with pytest.raises(InputError, match=r"\[n, channels, height, width\] expected, got \(0, 2, 3, 4\)"):
        some().take(slice(0, 0))


def test_images_without_moments_say_what_is_missing():
    with pytest.raises(InputError, match="2 channels, but a mean for 0 and a deviation for 2"):
        some(mean=()).flat(standardise=True)


# --- digits ----------------------------------------------------------------------------------------


def test_images_and_data_sets_introduce_themselves_in_a_line():
    assert repr(load_images("digits")) == "Images('digits', 'train': 1437 of 1 x 8 x 8, 10 classes)"
    assert repr(Circle(n=8).dataset()) == "Dataset('circle': x [8, 2], y [8, 1], groups top, bottom)"


def test_digits_are_scikit_learns_split_in_order():
    datasets = pytest.importorskip("sklearn.datasets")
    bunch = datasets.load_digits()
    train, test = load_images("digits"), load_images("digits", "test")
    assert (len(train), len(test)) == (DIGITS_TRAIN, 360)
    for images, rows in ((train, slice(0, 1437)), (test, slice(1437, 1797))):
        np.testing.assert_array_equal(images.flat().numpy() * 16, bunch.data[rows])
        assert images.labels.tolist() == bunch.target[rows].tolist()
        assert images.labels.bincount().min() > 0.9 * len(images) / 10  # every digit in both parts
    standard = train.flat(standardise=True).double()
    assert float(standard.mean()) == pytest.approx(0, abs=1e-4)
    assert float(standard.std(correction=0)) == pytest.approx(1, abs=1e-4)


def test_digits_without_scikit_learn_say_so(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn", None)
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(InputError, match="digits come with scikit-learn, which is not installed"):
        load_images("digits")


# --- the real files, where they are ----------------------------------------------------------------

CONTENTS = {  # SHA-256 of pixels (image, channel, row, column) and labels, one byte each
    ("mnist", "train"): ("741c988805d008ac6e4c904b69001ba1", "1feba77c54802fa5339a11837ea4b286"),
    ("mnist", "test"): ("6d87418db22cc8025d05968bec9bd5c3", "ddeff807876a9661a1110d45c266c862"),
    ("fashion-mnist", "train"): ("2e487a6c89124f78f2d7521542223caf", "657fbd221bfc9f4198cc14b5619cc33e"),
    ("fashion-mnist", "test"): ("c867c93ff95360594e8ec3287995350b", "3d0e6c6ea990b53b6f8f500a41cac938"),
    ("cifar-10", "train"): ("9d5c2eddadb0deff02c14c350c0385aa", "2b7cd2f24487317614016b72ffd53071"),
    ("cifar-10", "test"): ("177777c33ba79825320efa646ad04a94", "cec8a24a1e92aa2ecaa0bbd3dbfa86bf"),
    ("cifar-100", "train"): ("de64658905c6b161606e3649ddafce7c", "9f11b9f97aad759ba6df0a33e3218b01"),
    ("cifar-100", "test"): ("83c56492b2c11211ad1bb2dbd4f2eef4", "4dad7d09c7c97d33f6cb928d705cf419"),
}


@pytest.mark.slow
@pytest.mark.parametrize(("name", "split"), CONTENTS)
def test_the_real_data_sets_hold_what_they_should(name, split):
    if combined_state(check_source(sources.SOURCES[name], data_folder())) != "present":
        pytest.skip(f"{name} is not in {data_folder()}; `unlazy data fetch {name}` brings it")
    images = load_images(name, split)
    arrays = images.pixels.numpy(), images.labels.to(torch.uint8).numpy()
    assert tuple(hashlib.sha256(array.tobytes()).hexdigest()[:32] for array in arrays) == CONTENTS[name, split]
    if split == "train":
        histograms = [np.bincount(channel.ravel(), minlength=256) for channel in np.moveaxis(arrays[0], 1, 0)]
        level = np.arange(256) / 255
        for histogram, mean, deviation in zip(histograms, *MOMENTS[name], strict=True):
            share = histogram / histogram.sum()
            assert mean == pytest.approx(share @ level, abs=1e-5)
            assert deviation == pytest.approx(np.sqrt(share @ (level - share @ level) ** 2), abs=1e-5)
