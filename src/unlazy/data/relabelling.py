"""Make some classes of an image data set hard: cut them into groups and shuffle the labels of the groups.

The half-space paper's modified Fashion-MNIST. The images stay as they are. An *easy* class keeps its label. A *hard* class is
cut into groups, and every group gets one of the hard classes' labels at random, so that images that look alike no longer have
one label. The paper does not say how it cuts; the groups here are k-means clusters of the pixels, or random.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from math import comb

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from unlazy.data.images import Images
from unlazy.runtime import InputError, require, stream

CUTS = ("k-means", "random")
LABELS = ("balanced", "independent")
Labels = Int64[Tensor, " n"]


@dataclass(frozen=True)
class Cut:
    """The way every class is cut into groups.

    ``k-means``: nearest of ``groups`` centroids of the class's training images (k-means++, the best of ``restarts`` starts).
    ``random``: at random, in equal numbers; the pixels then say nothing about the group.
    """

    groups: int = 5
    how: str = "k-means"
    restarts: int = 10
    seed: int = 0

    def __post_init__(self) -> None:
        require(self.how in CUTS, f"a class is cut by {' or '.join(CUTS)}, not {self.how!r}.")
        require(self.groups >= 1 and self.restarts >= 1, "groups and restarts must be at least 1.")


@dataclass(frozen=True)
class Groups:
    """The group of every image within its own class, for whatever classes are easy or hard later."""

    train: Int64[Tensor, " n_train"]
    test: Int64[Tensor, " n_test"]


def cut_classes(train: Images, test: Images, cut: Cut = Cut(), *, workers: int = 1) -> Groups:  # noqa: B008
    """Cut each class of the training images; a test image joins the group of the nearest centroid of its class."""
    rows = [(train.labels == label, test.labels == label) for label in range(len(train.classes))]
    for label, both in enumerate(rows):
        require(all(bool(some.any()) for some in both), f"class {label} has no training image, or no test image.")
    parts = [(train.take(mine), test.take(theirs)) for mine, theirs in rows]
    with ThreadPoolExecutor(workers) as pool:
        found = list(pool.map(lambda label: _cut_class(*parts[label], cut, label), range(len(parts))))
    groups = Groups(torch.zeros_like(train.labels), torch.zeros_like(test.labels))
    for (mine, theirs), (seen, unseen) in zip(rows, found, strict=True):
        groups.train[mine], groups.test[theirs] = seen, unseen
    return groups


def _cut_class(train: Images, test: Images, cut: Cut, label: int) -> tuple[Tensor, Tensor]:
    """The groups of the training and of the test images of one class."""
    if cut.how == "random":
        return _random_groups(len(train), cut, "train", label), _random_groups(len(test), cut, "test", label)
    require(len(train) >= cut.groups, f"class {label} has {len(train)} images for {cut.groups} groups.")
    pixels = train.flat()
    centroids = find_centroids(pixels, cut, label)
    return nearest_centroid(pixels, centroids), nearest_centroid(test.flat(), centroids)


def find_centroids(pixels: Float[Tensor, "n d"], cut: Cut, label: int = 0) -> Float[Tensor, "k d"]:
    """The k-means centroids of one class.

    It runs on one thread: several would add in changing order, and one seed would give different centroids.
    """
    try:
        from sklearn.cluster import KMeans
        from threadpoolctl import threadpool_limits
    except ImportError:
        raise InputError("k-means comes with scikit-learn, which is not installed: pip install scikit-learn.") from None
    state = int(torch.randint(2**31 - 1, (), generator=stream(cut.seed, "k-means", label)))
    with threadpool_limits(1):
        fitted = KMeans(cut.groups, n_init=cut.restarts, random_state=state).fit(pixels.numpy())
    return torch.from_numpy(fitted.cluster_centers_).to(pixels)


def nearest_centroid(pixels: Float[Tensor, "n d"], centroids: Float[Tensor, "k d"]) -> Labels:
    """Number of the nearest centroid of every image."""
    distance = centroids.square().sum(1) - 2 * pixels @ centroids.T  # plus the image's squared norm
    return distance.argmin(1)


def _random_groups(n: int, cut: Cut, split: str, label: int) -> Labels:
    """Groups drawn at random in equal numbers."""
    return torch.randperm(n, generator=stream(cut.seed, "lots", split, label)) % cut.groups


@dataclass(frozen=True)
class Relabelling:
    """Which classes stay easy, and which label each group of the hard ones gets.

    ``balanced``: every hard label goes to equally many groups. ``independent``: each group draws its label alone. The draw
    knows the place of a class among the hard ones and not the class itself: swapping easy and hard classes gives the same
    pattern on the other half.

    >>> Relabelling(easy=(0, 1)).table(classes=3, groups=2).tolist()
    [[0, 0], [1, 1], [2, 2]]
    """

    easy: tuple[int, ...] = (0, 1, 2, 3, 4)
    labels: str = "balanced"
    seed: int = 0

    def __post_init__(self) -> None:
        require(len(set(self.easy)) == len(self.easy), f"easy classes must differ, got {self.easy}.")
        require(self.labels in LABELS, f"labels are {' or '.join(LABELS)}, not {self.labels!r}.")

    def hard(self, classes: int = 10) -> tuple[int, ...]:
        """The classes that are not easy, in order."""
        require(
            all(0 <= c < classes for c in self.easy), f"easy classes must lie in 0..{classes - 1}, got {self.easy}."
        )
        return tuple(c for c in range(classes) if c not in self.easy)

    def swap(self, classes: int = 10) -> Relabelling:
        """The relabelling with easy and hard classes exchanged."""
        return Relabelling(self.hard(classes), self.labels, self.seed)

    def table(self, classes: int = 10, groups: int = 5) -> Int64[Tensor, "classes groups"]:
        """The new label of every group of every class."""
        hard = torch.tensor(self.hard(classes), dtype=torch.int64)
        cells, random = len(hard) * groups, stream(self.seed, "labels of groups")
        if self.labels == "balanced":
            places = torch.randperm(cells, generator=random) % max(1, len(hard))
        else:
            places = torch.randint(max(1, len(hard)), (cells,), generator=random)
        table = torch.arange(classes)[:, None].repeat(1, groups)
        table[hard] = hard[places].reshape(len(hard), groups)
        return table


def relabel(images: Images, groups: Labels, relabelling: Relabelling, count: int = 5) -> Images:
    """The same images with new labels; ``groups`` as :func:`cut_classes` gives them, ``count`` of them in every class."""
    require(len(groups) == len(images), f"{len(images)} images, but groups of {len(groups)}.")
    most = int(groups.max()) if len(groups) else 0
    require(count > most, f"count={count}, but there is a group {most}; count says how many groups every class has.")
    return replace(images, labels=relabelling.table(len(images.classes), count)[images.labels, groups])


def redraw_labels(images: Images, hard: Sequence[int], share: float, seed: int = 0) -> Images:
    """The same images; each image of a ``hard`` class gets, with probability ``share``, a label drawn from all hard ones.

    No network can know these labels: on test images at most ``1 - share * (1 - 1 / len(hard))`` of the hard half can be right.
    """
    require(0 <= share <= 1, f"share must lie in [0, 1], got {share!r}.")
    random, count = stream(seed, "drawn labels", images.split), len(images)
    drawn = torch.tensor(tuple(hard))[torch.randint(len(hard), (count,), generator=random)]
    chosen = torch.isin(images.labels, torch.tensor(tuple(hard))) & (torch.rand(count, generator=random) < share)
    return replace(images, labels=torch.where(chosen, drawn, images.labels))


def random_splits(count: int, classes: int = 10, seed: int = 0) -> tuple[tuple[int, ...], ...]:
    """``count`` different random halves of the classes; no half comes with its own complement."""
    most = _count_halves(classes)
    require(1 <= count <= most, f"{classes} classes have {most} different splits in halves; {count} were asked for.")
    random, found = stream(seed, "splits", classes), dict[tuple[int, ...], None]()
    while len(found) < count:
        easy = tuple(sorted(torch.randperm(classes, generator=random)[: classes // 2].tolist()))
        if _complement(easy, classes) not in found:
            found[easy] = None
    return tuple(found)


def _count_halves(classes: int) -> int:
    """How many ways there are to split the classes into two halves."""
    require(classes >= 2 and classes % 2 == 0, f"only an even number of classes has halves, not {classes}.")
    return comb(classes, classes // 2) // 2


def _complement(easy: Sequence[int], classes: int) -> tuple[int, ...]:
    return tuple(c for c in range(classes) if c not in easy)
