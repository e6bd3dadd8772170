"""Partly hard labels: who keeps theirs, who gets which, and that nothing but labels changes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from unlazy import InputError
from unlazy.data.images import Images
from unlazy.data.relabelling import Cut, Relabelling, cut_classes, nearest_centroid, random_splits, relabel

SHADES = (10, 60, 110, 160, 210)


def blobs(n: int, split: str, seed: int, classes: int = 4) -> tuple[Images, torch.Tensor]:
    """Pictures of five clearly different kinds in every class, and the kind of each."""
    random = torch.Generator().manual_seed(seed)
    kind, label = torch.arange(n) % 5, torch.arange(n) // 5 % classes
    pixels = torch.tensor(SHADES)[kind][:, None, None, None] + torch.randint(0, 20, (n, 1, 3, 3), generator=random)
    order = torch.randperm(n, generator=random)
    names = tuple(str(one) for one in range(classes))
    return Images("blobs", split, pixels.to(torch.uint8)[order], label[order], names), kind[order]


def halves(classes: int = 10):
    return st.permutations(range(classes)).map(lambda order: tuple(sorted(order[: classes // 2])))


# --- tables of labels ------------------------------------------------------------------------------


@settings(max_examples=50)
@given(easy=halves(), seed=st.integers(0, 10**6), labels=st.sampled_from(["balanced", "independent"]))
def test_easy_classes_keep_their_label_and_hard_ones_share_theirs(easy, seed, labels):
    rule = Relabelling(easy, labels, seed)
    table, hard = rule.table(10, 5), rule.hard(10)
    for label in easy:
        assert table[label].tolist() == [label] * 5
    assert set(table[list(hard)].flatten().tolist()) <= set(hard)
    if labels == "balanced":
        assert torch.bincount(table[list(hard)].flatten(), minlength=10)[list(hard)].tolist() == [5] * 5


@settings(max_examples=50)
@given(easy=halves(), seed=st.integers(0, 10**6))
def test_swapping_mirrors_the_pattern_on_the_other_half(easy, seed):
    rule = Relabelling(easy, seed=seed)
    mirror = rule.swap(10)
    assert mirror.swap(10) == rule
    table, mirrored = rule.table(10, 5), mirror.table(10, 5)
    for place in range(5):
        mine, other = rule.hard(10)[place], mirror.hard(10)[place]
        assert [rule.hard(10).index(label) for label in table[mine].tolist()] == [
            mirror.hard(10).index(label) for label in mirrored[other].tolist()
        ]


def test_labels_belong_to_their_seed():
    tables = [Relabelling(seed=seed).table() for seed in range(20)]
    assert torch.equal(tables[7], Relabelling(seed=7).table())
    assert len({tuple(table.flatten().tolist()) for table in tables}) == 20


def test_independent_draws_need_not_balance():
    counts = [
        torch.bincount(Relabelling(labels="independent", seed=seed).table()[5:].flatten())[5:] for seed in range(20)
    ]
    assert any(count.tolist() != [5] * 5 for count in counts)
    assert 3 < torch.stack(counts).double().mean(0).min() <= torch.stack(counts).double().mean(0).max() < 7


def test_all_easy_is_the_original():
    assert Relabelling(tuple(range(10))).table(10, 5).tolist() == [[label] * 5 for label in range(10)]


def test_relabelling_changes_labels_and_nothing_else():
    images, kind = blobs(200, "train", 0)
    rule = Relabelling((0, 2), seed=3)
    changed = relabel(images, kind, rule)
    assert torch.equal(changed.pixels, images.pixels)
    table = rule.table(4, 5)
    for row in range(200):
        old, new = int(images.labels[row]), int(changed.labels[row])
        assert new == int(table[old, kind[row]])
        assert (new == old) if old in (0, 2) else (new in (1, 3))


# --- cutting classes -------------------------------------------------------------------------------


@pytest.fixture
def find_centroids() -> None:
    pytest.importorskip("sklearn")


def test_k_means_finds_kinds_that_are_there(find_centroids):
    train, kind = blobs(400, "train", 0)
    test, unseen = blobs(100, "test", 1)
    groups = cut_classes(train, test, Cut(restarts=3))
    for label in range(4):
        mine, theirs = train.labels == label, test.labels == label
        found = set(zip(kind[mine].tolist(), groups.train[mine].tolist(), strict=True))
        found |= set(zip(unseen[theirs].tolist(), groups.test[theirs].tolist(), strict=True))
        assert len(found) == 5  # one group for every kind, in training and test images alike


def test_images_go_to_the_nearest_mean_of_their_class(find_centroids):
    random = torch.Generator().manual_seed(0)
    pixels = torch.randint(0, 256, (300, 1, 4, 4), generator=random).to(torch.uint8)
    labels = torch.randint(0, 3, (300,), generator=random)
    whole = Images("noise", "train", pixels, labels, ("a", "b", "c"))
    train, test = whole.take(slice(200)), whole.take(slice(200, None))
    groups = cut_classes(train, test, Cut(groups=4, restarts=2))
    for label in range(3):
        mine, theirs = train.labels == label, test.labels == label
        x, unseen = train.take(mine).flat().double(), test.take(theirs).flat().double()
        means = torch.stack([x[groups.train[mine] == group].mean(0) for group in range(4)])
        for images, found in ((x, groups.train[mine]), (unseen, groups.test[theirs])):
            distance = ((images[:, None] - means[None]) ** 2).sum(-1)
            assert torch.equal(distance.argmin(1), found)


def test_a_class_is_cut_by_its_own_images_alone(find_centroids):
    train, _ = blobs(200, "train", 0)
    test, _ = blobs(100, "test", 1)
    pixels = train.pixels.clone()
    pixels[train.labels == 3] = 255 - pixels[train.labels == 3]
    first, second = (cut_classes(images, test, Cut(restarts=1)) for images in (train, replace(train, pixels=pixels)))
    for label in range(3):
        assert torch.equal(first.train[train.labels == label], second.train[train.labels == label])
        assert torch.equal(first.test[test.labels == label], second.test[test.labels == label])


def test_the_cut_is_the_same_with_any_number_of_workers(find_centroids):
    random = torch.Generator().manual_seed(0)
    pixels = torch.randint(0, 256, (600, 1, 6, 6), generator=random).to(torch.uint8)
    whole = Images("noise", "train", pixels, torch.arange(600) % 3, ("a", "b", "c"))
    cuts = [cut_classes(whole, whole.take(slice(50)), workers=workers) for workers in (1, 3)]
    assert torch.equal(cuts[0].train, cuts[1].train)
    assert torch.equal(cuts[0].test, cuts[1].test)
    other = cut_classes(whole, whole.take(slice(50)), Cut(restarts=1, seed=1))
    assert not torch.equal(cuts[0].train, other.train)


def test_nearest_agrees_with_distances():
    random = torch.Generator().manual_seed(0)
    x, centroids = (torch.randn(n, 5, generator=random, dtype=torch.float64) for n in (40, 3))
    assert torch.equal(nearest_centroid(x, centroids), torch.cdist(x, centroids).argmin(1))


def test_lots_are_equal_in_number_and_blind():
    train, _ = blobs(200, "train", 0)
    test, _ = blobs(60, "test", 1)
    groups = cut_classes(train, test, Cut(how="random"))
    for label in range(4):
        assert torch.bincount(groups.train[train.labels == label]).tolist() == [10] * 5
    blank = replace(train, pixels=torch.zeros_like(train.pixels))
    assert torch.equal(cut_classes(blank, test, Cut(how="random")).train, groups.train)
    assert not torch.equal(cut_classes(train, test, Cut(how="random", seed=1)).train, groups.train)


# --- splits ----------------------------------------------------------------------------------------


def test_splits_are_different_halves():
    splits = random_splits(126)
    assert len({frozenset((frozenset(easy), frozenset(range(10)) - frozenset(easy))) for easy in splits}) == 126
    assert all(len(easy) == 5 and easy == tuple(sorted(easy)) for easy in splits)
    assert random_splits(20) == splits[:20]
    assert random_splits(20, seed=1) != splits[:20]


def test_bad_requests_are_refused():
    images, kind = blobs(20, "train", 0)
    with pytest.raises(InputError, match="126"):
        random_splits(127)
    with pytest.raises(InputError, match="even"):
        random_splits(2, classes=5)
    with pytest.raises(InputError, match=r"0\.\.3"):
        Relabelling((0, 7)).table(4)
    with pytest.raises(InputError, match="differ"):
        Relabelling((1, 1))
    with pytest.raises(InputError, match="k-means or random"):
        Cut(how="by hand")
    with pytest.raises(InputError, match="balanced or independent"):
        Relabelling(labels="any")
    with pytest.raises(InputError, match="20 images"):
        relabel(images, kind[:5], Relabelling((0, 2)))
    with pytest.raises(InputError, match="class 3 has no training image"):
        cut_classes(images.take(images.labels != 3), images)
    with pytest.raises(InputError, match="5 images for 6 groups"):
        cut_classes(images, images, Cut(groups=6))
