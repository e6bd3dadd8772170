"""Folders of the repository, for tests that read committed files."""

from pathlib import Path

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "results"
DOCS = ROOT / "docs"
SUPPORT = ROOT / "tests" / "support"
