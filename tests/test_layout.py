"""The house: imports go one way, heavy packages stay out of the hall, nothing speaks of somewhere else."""

from __future__ import annotations

import ast
import builtins
import dis
import importlib
import re
from collections.abc import Iterator
from pathlib import Path
from types import CodeType

import pytest

import unlazy

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "src" / "unlazy"

# A room may import from rooms on earlier lines, and from itself.
ORDER = [
    {"runtime"},
    {"store"},
    {"data", "models"},
    {"kernels"},
    {"probes", "theory"},
    {"scope"},
    {"training"},
    {"claims", "plots", "bench"},
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


def test_every_public_name_loads_and_is_explained() -> None:
    for name in unlazy.__all__:
        value = getattr(unlazy, name)
        assert name == "__version__" or (value.__doc__ or "").strip(), f"{name} has no docstring"
    with pytest.raises(AttributeError, match="nothing_of_the_kind"):
        unlazy.nothing_of_the_kind  # noqa: B018


def test_editors_see_the_same_names_as_the_program() -> None:
    tree = ast.parse((PACKAGE / "__init__.py").read_text())
    (block,) = [node for node in tree.body if isinstance(node, ast.If)]
    seen = {
        (alias.name, node.module) for node in block.body if isinstance(node, ast.ImportFrom) for alias in node.names
    }
    assert seen == {(name, f"unlazy.{home}") for name, home in unlazy._HOME.items()}


def test_every_module_says_what_it_is() -> None:
    for path in SOURCES:
        assert ast.get_docstring(ast.parse(path.read_text())), f"{path} has no docstring"


def test_symbols_name_things_that_exist() -> None:
    """Names in code type in docs/symbols.md are public, attributes of a network, or marked as planned."""
    text = (ROOT / "docs" / "symbols.md").read_text()
    for module, name in re.findall(r"`unlazy\.([a-z_.]+)\.([a-zA-Z_]+)`", text):
        assert hasattr(importlib.import_module(f"unlazy.{module}"), name), f"{module}.{name}"
