"""The files of the image data sets: names, lengths, checksums, and where they are published.

Every SHA-256 was computed from a file whose MD5 sum is the published one. The CIFAR archives are known by their
published MD5 sum alone, so each file taken out of one is held against its own SHA-256.
"""

from __future__ import annotations

from dataclasses import dataclass

from unlazy.runtime import InputError


@dataclass(frozen=True)
class File:
    """One published file: its name, its length in bytes, and its checksum as ``algorithm:hex``."""

    name: str
    size: int
    checksum: str


@dataclass(frozen=True)
class Source:
    """A data set on disk: its files in ``folder`` below the data folder, and the addresses that offer them.

    Addresses are web folders, tried in order. They offer the files one by one, or an ``archive`` (.tar.gz) of them all.
    """

    name: str
    folder: str
    files: tuple[File, ...]
    addresses: tuple[str, ...]
    archive: File | None = None

    def file(self, name: str) -> File:
        """The file of that name."""
        return next(file for file in self.files if file.name == name)


def find_source(name: str) -> Source:
    """The source of that name, or an error that lists them all."""
    if name not in SOURCES:
        what = "digits come with scikit-learn, without files" if name == "digits" else f"there is no data set {name!r}"
        raise InputError(f"{what}; data sets with files are {', '.join(SOURCES)}.")
    return SOURCES[name]


def _files(table: str) -> tuple[File, ...]:
    """Lines of ``sha256 size name``."""
    rows = [line.split() for line in table.strip().splitlines()]
    return tuple(File(name, int(size), f"sha256:{digest}") for digest, size, name in rows)


_ALL = (
    Source(
        name="mnist",
        folder="mnist",
        files=_files("""
440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609  9912422  train-images-idx3-ubyte.gz
3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c    28881  train-labels-idx1-ubyte.gz
8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6  1648877  t10k-images-idx3-ubyte.gz
f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6     4542  t10k-labels-idx1-ubyte.gz
"""),
        addresses=(
            "https://ossci-datasets.s3.amazonaws.com/mnist/",
            "https://storage.googleapis.com/cvdf-datasets/mnist/",
        ),
    ),
    Source(
        name="fashion-mnist",
        folder="fashion-mnist",
        files=_files("""
3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84  26421880  train-images-idx3-ubyte.gz
a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845     29515  train-labels-idx1-ubyte.gz
346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073   4422102  t10k-images-idx3-ubyte.gz
67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5      5148  t10k-labels-idx1-ubyte.gz
"""),
        addresses=("http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",),
    ),
    Source(
        name="cifar-10",
        folder="cifar-10-batches-py",
        files=_files("""
54636561a3ce25bd3e19253c6b0d8538147b0ae398331ac4a2d86c6d987368cd  31035704  data_batch_1
766b2cef9fbc745cf056b3152224f7cf77163b330ea9a15f9392beb8b89bc5a8  31035320  data_batch_2
0f00d98ebfb30b3ec0ad19f9756dc2630b89003e10525f5e148445e82aa6a1f9  31035999  data_batch_3
3f7bb240661948b8f4d53e36ec720d8306f5668bd0071dcb4e6c947f78e9682b  31035696  data_batch_4
d91802434d8376bbaeeadf58a737e3a1b12ac839077e931237e0dcd43adcb154  31035623  data_batch_5
f53d8d457504f7cff4ea9e021afcf0e0ad8e24a91f3fc42091b8adef61157831  31035526  test_batch
f962466ef690d46b226450fb9aadc74ba4bc64a76aa526b5827fe4bc5c7125cb       158  batches.meta
"""),
        addresses=("https://www.cs.toronto.edu/~kriz/",),
        archive=File("cifar-10-python.tar.gz", 170498071, "md5:c58f30108f718f92721af3b95e74349a"),
    ),
    Source(
        name="cifar-100",
        folder="cifar-100-python",
        files=_files("""
735e79b04f092ca3d2e6d07f368c0a7d70d48c48d28865950cc24454cf45129b  155249918  train
4b67687d9933c4db8f0831104447f15b93774f4f464bd0516f0f0f2ac83b7864   31049707  test
a5d4786345c961390f865e93b434dbd5c6904ce880667e0cb888c97d449f28b9       1473  meta
"""),
        addresses=("https://www.cs.toronto.edu/~kriz/",),
        archive=File("cifar-100-python.tar.gz", 169001437, "md5:eb9058c3a382ffc7106e4002c42a8d85"),
    ),
)

SOURCES = {source.name: source for source in _ALL}
"""The data sets that are read from files, by name."""
