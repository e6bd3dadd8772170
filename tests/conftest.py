"""Fixtures that several files of tests share."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from torch import Tensor, nn

import scope_nets
import studio_runs
from browser import Browser, open_browser, serve_studio
from unlazy.runtime import chromium_path
from unlazy.studio.api import StudioApi
from unlazy.studio.run_index import RunIndex

# The gate tries the same examples every time: what passes here passes there. `make fuzz` looks for new ones.
# Neither asks how long an example took: that is the machine's business.
settings.register_profile(
    "gate",
    derandomize=True,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
settings.register_profile("fuzz", settings.get_profile("gate"), derandomize=False, print_blob=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "gate"))


@pytest.fixture
def mlp() -> tuple[nn.Module, Tensor, Tensor]:
    """A small network for a scope, with inputs and classes."""
    return scope_nets.build("mlp")


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """A folder with a run further down and a smaller one at its top."""
    studio_runs.write_run(tmp_path / "a" / "first")
    studio_runs.write_run(tmp_path / "second", members=3, n=6)
    return tmp_path


@pytest.fixture
def api(store: Path) -> StudioApi:
    """What the studio says of these runs."""
    return StudioApi(RunIndex(store))


@pytest.fixture(scope="module")
def home(root: Path) -> Iterator[str]:
    """The address of a studio on the folder that the file's own ``root`` made."""
    with serve_studio(root) as address:
        yield address


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Chromium with lists of its requests and console messages. Continuous integration always installs Chromium."""
    if chromium_path() is None and not os.environ.get("CI"):
        pytest.skip("there is no Chromium: run `make browser`, or set UNLAZY_CHROMIUM.")
    with open_browser() as opened:
        yield opened
