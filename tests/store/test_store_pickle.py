"""Nothing in a run is ever pickled."""

import ast
from pathlib import Path

import numpy as np
import pytest

import unlazy
from store_runs import header, small_run
from unlazy.store import Run, StoreError, Writer


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
    """But for the restricted reader of published CIFAR files, which has tests of its own, and code for a Dask cluster."""
    package = Path(unlazy.__file__).parent
    sources = sorted(
        set(package.rglob("*.py")) - {package / "data" / "cifar.py", package / "kernels" / "gram_cluster.py"}
    )
    assert len(sources) > 20
    assert {str(path): found for path in sources if (found := pickling(path.read_text()))} == {}
