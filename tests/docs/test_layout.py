"""The house: imports go one way, heavy packages stay out of the hall, nothing speaks of somewhere else."""

from __future__ import annotations

import ast
import builtins
import dis
import doctest
import graphlib
import importlib
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import CodeType

import pytest

import unlazy
from repository import ROOT

PACKAGE = ROOT / "src" / "unlazy"

# A room may import from rooms on earlier lines, and from itself.
ORDER = [
    {"runtime"},
    {"checks"},
    {"curves"},
    {"run_card"},
    {"run_comparison"},
    {"store"},
    {"data", "models"},
    {"kernels"},
    {"probes", "theory"},
    {"training"},
    {"scope"},
    {"adaptive", "emergence", "images"},  # topics of the door: names of several rooms
    {"claims", "plots", "bench"},
    {"estimators", "widths"},
    {"studies"},
    {"studio"},
    {"cli"},
]
COMPUTES = {"data", "models", "kernels", "probes", "theory", "scope", "training"}
ALLOWED = {"torch", "numpy", "safetensors", "jaxtyping", "unlazy"}
FRAMEWORKS = {"lightning.py": "lightning", "huggingface.py": "transformers", "skorch.py": "skorch"}  # scope/adapters


def room(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported(path: Path, *, everywhere: bool) -> set[str]:
    """Names of imported modules: at module level only, or anywhere."""
    tree = ast.parse(path.read_text())
    nodes = ast.walk(tree) if everywhere else iter(tree.body)
    found = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= (
                {f"{node.module}.{alias.name}" for alias in node.names} if node.module == "unlazy" else {node.module}
            )
    return found


SOURCES = sorted(path for path in PACKAGE.rglob("*.py") if path.name != "__init__.py" or path.parent != PACKAGE)


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_go_one_way(path: Path) -> None:
    level = next(index for index, rooms in enumerate(ORDER) if room(path) in rooms)
    reachable = set().union(*ORDER[:level]) | {room(path)}
    for name in imported(path, everywhere=True):
        if name.startswith("unlazy."):
            assert name.split(".")[1] in reachable, f"{path} may not import {name}"


def module_name(path: Path) -> str:
    return ".".join(("unlazy", *path.relative_to(PACKAGE).with_suffix("").parts)).removesuffix(".__init__")


def runtime_imports(path: Path, modules: set[str]) -> set[str]:
    """Modules of the package that a file imports at any time, also in functions; not what only type checkers import."""
    tree = ast.parse(path.read_text())
    blocks = [n for n in ast.walk(tree) if isinstance(n, ast.If) and ast.unparse(n.test).endswith("TYPE_CHECKING")]
    skipped = {id(node) for block in blocks for statement in block.body for node in ast.walk(statement)}
    found = set()
    for node in (node for node in ast.walk(tree) if id(node) not in skipped):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= names & modules or {node.module}
    return found & modules


def test_no_import_cycle() -> None:
    """Imports inside functions count too."""
    files = {module_name(path): path for path in PACKAGE.rglob("*.py")}
    graph = {module: runtime_imports(path, set(files)) for module, path in files.items()}
    order = graphlib.TopologicalSorter(graph)
    try:
        order.prepare()
    except graphlib.CycleError as error:
        pytest.fail(f"import cycle: {' -> '.join(reversed(error.args[1]))}")


@pytest.mark.parametrize("path", [p for p in SOURCES if room(p) in COMPUTES], ids=lambda p: str(p.relative_to(PACKAGE)))
def test_computing_needs_little(path: Path) -> None:
    import sys

    own = FRAMEWORKS.get(path.name) if path.parent.name == "adapters" else None
    for name in imported(path, everywhere=False):
        top = name.split(".")[0]
        assert top in ALLOWED | {own} or top in sys.stdlib_module_names, f"{path} imports {name} at module level"


def codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from codes(constant)


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_functions_use_names_that_exist(path: Path) -> None:
    """Linters are told to overlook unknown names, since shapes in annotations are full of them."""
    module = compile(path.read_text(), str(path), "exec")
    known = {step.argval for step in dis.get_instructions(module) if step.opname in ("STORE_NAME", "STORE_GLOBAL")}
    used = {
        step.argval for code in codes(module) for step in dis.get_instructions(code) if step.opname == "LOAD_GLOBAL"
    }
    assert used - known - set(dir(builtins)) - {"__file__", "__name__"} == set()


def test_every_room_is_in_the_order() -> None:
    rooms = {room(path) for path in SOURCES}
    assert rooms <= set().union(*ORDER)


TOPICS = [importlib.import_module(f"unlazy.{topic}") for topic in unlazy._TOPICS]


def test_every_public_name_loads_and_is_explained() -> None:
    for module in (unlazy, *TOPICS):
        for name in module.__all__:
            value = getattr(module, name)
            assert name == "__version__" or (value.__doc__ or "").strip(), f"{module.__name__}.{name} has no docstring"
    with pytest.raises(AttributeError, match=r"nothing_of_the_kind'$"):
        unlazy.nothing_of_the_kind  # noqa: B018
    with pytest.raises(AttributeError, match=r"it is unlazy\.theory\.path_sum"):
        unlazy.path_sum  # noqa: B018


def test_the_door_is_narrow_and_every_name_has_one_address() -> None:
    assert len(unlazy.__all__) <= 50
    addresses = Counter(name for module in (unlazy, *TOPICS) for name in module.__all__)
    assert {name for name, times in addresses.items() if times > 1} == set()


@pytest.mark.parametrize("name", sorted(unlazy._HOME))
def test_names_at_the_door_say_where_users_find_them(name: str) -> None:
    value = getattr(unlazy, name)
    assert value.__module__ == "unlazy"
    # pytest finds the examples of a class by its module, so those of the door's classes are run here
    home = importlib.import_module(f"unlazy.{unlazy._HOME[name]}")
    for examples in doctest.DocTestFinder().find(value, name, module=False, globs=dict(vars(home))):
        assert doctest.DocTestRunner().run(examples).failed == 0


def test_editors_see_the_same_names_as_the_program() -> None:
    tree = ast.parse((PACKAGE / "__init__.py").read_text())
    (block,) = [node for node in tree.body if isinstance(node, ast.If)]
    seen = {
        (alias.name, node.module) for node in block.body if isinstance(node, ast.ImportFrom) for alias in node.names
    }
    names = {(name, f"unlazy.{home}") for name, home in unlazy._HOME.items()}
    assert seen == names | {(topic, "unlazy") for topic in unlazy._TOPICS}


def test_every_module_says_what_it_is() -> None:
    for path in SOURCES:
        assert ast.get_docstring(ast.parse(path.read_text())), f"{path} has no docstring"


def test_symbols_name_things_that_exist() -> None:
    """Names in code type in docs/reference/symbols.md are public, attributes of a network, or marked as planned."""
    text = (ROOT / "docs" / "reference" / "symbols.md").read_text()
    for module, name in re.findall(r"`unlazy\.([a-z_.]+)\.([a-zA-Z_]+)`", text):
        assert hasattr(importlib.import_module(f"unlazy.{module}"), name), f"{module}.{name}"
