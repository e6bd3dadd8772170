"""The list of studies, found by their files without importing any of them (or torch), and how one is loaded."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import sys
import traceback
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from unlazy.claims.nearest import nearest
from unlazy.runtime import InputError, UnlazyError, short_hash

if TYPE_CHECKING:
    from unlazy.studies.study import Study

FOLDER = Path(__file__).parent
PAPERS = {  # by folder
    "halfspace": "half-space",
    "emergence": "emergence",
    "tangent": "tangent",
    "scope": "scope",
    "estimators": "estimators",
    "beyond": "beyond",
}


@dataclass(frozen=True)
class StudyEntry:
    """A study of the package: its name, its paper, the first line of its docstring, and its module."""

    name: str
    paper: str
    help: str
    module: str


@cache
def studies() -> tuple[StudyEntry, ...]:
    """Every study of the package (a file that declares ``STUDY``), paper by paper."""
    found = []
    for folder, paper in PAPERS.items():
        for path in sorted((FOLDER / folder).glob("*.py")):
            source = path.read_text()
            if "\nSTUDY = Study(" in source:
                first_line = (ast.get_docstring(ast.parse(source)) or "").split("\n", 1)[0]
                module = f"unlazy.studies.{folder}.{path.stem}"
                found.append(StudyEntry(path.stem.replace("_", "-"), paper, first_line, module))
    return tuple(found)


def find_studies(name: str) -> list[str]:
    """What to give :func:`load_study`, one entry a study: for a study's name, a paper's name (all its studies), or a file."""
    if name.endswith(".py"):
        if not Path(name).is_file():
            raise InputError(f"there is no file {name}; a study of your own is a Python file with STUDY = Study(...).")
        return [str(Path(name).resolve())]
    found = [entry.name for entry in studies() if name in (entry.name, entry.paper)]
    if not found:
        known = sorted({entry.name for entry in studies()} | {entry.paper for entry in studies()})
        meant = nearest(name, known)
        hint = f"did you mean {meant}? `unlazy studies` lists all" if meant else f"there is: {', '.join(known)}"
        raise InputError(f"there is no study or paper {name!r}; {hint}. A file of your own ends in .py.")
    return found


def load_study(reference: str) -> Study:
    """The study of this name, or the one that a Python file declares."""
    if reference.endswith(".py"):
        module = _import_file(Path(reference))
    else:
        (entry,) = [entry for entry in studies() if entry.name == reference]
        module = importlib.import_module(entry.module)
    study: Study | None = getattr(module, "STUDY", None)
    if study is None:
        raise InputError(f"{reference} declares no study; it needs a line STUDY = Study(...).")
    if reference.endswith(".py") and study.name in {entry.name for entry in studies()}:
        raise InputError(f"{reference}: there is a study {study.name!r} in the package already; choose another name.")
    return study


def _import_file(path: Path) -> object:
    """The module in a file; a file is imported once. An error in it is raised as ``InputError`` with the file's line."""
    name = f"unlazy_study_{path.stem}_{short_hash(str(path))}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    sys.path.insert(0, str(path.parent))
    try:
        spec.loader.exec_module(module)
    except UnlazyError:
        del sys.modules[name]
        raise
    except Exception as error:
        del sys.modules[name]
        lines = [entry.lineno for entry in traceback.extract_tb(error.__traceback__) if entry.filename == str(path)]
        line = getattr(error, "lineno", None) or (lines[-1] if lines else None)
        raise InputError(f"{path}, line {line}: {type(error).__name__}: {error}") from error
    finally:
        sys.path.remove(str(path.parent))
    return module
