"""What docs/reference/scope.md says runs and is true."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from repository import DOCS
from unlazy import InputError, Run, Scope

PAGE = (DOCS / "reference" / "scope.md").read_text()


def test_the_code_runs_as_it_stands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", PAGE, re.S)
    assert blocks
    names: dict[str, object] = {}
    for block in blocks:
        exec(compile(block, "docs/reference/scope.md", "exec"), names)
    assert capsys.readouterr().out.startswith("Verdict: ")
    run = Run("runs/mine")
    assert run.status() == {"state": "finished", "step": 300, "error": None}
    assert any("batch_loss" in line.scalars for line in run.lines)
    scope = names["scope"]
    assert isinstance(scope, Scope)
    assert "scope.report()" in PAGE
    assert str(scope.verdict()).splitlines()[0] in scope.report()


class Returns(nn.Module):
    """A network that wraps its scores."""

    def __init__(self, wrap: object) -> None:
        super().__init__()
        self.scores, self.wrap = nn.Linear(4, 3), wrap

    def forward(self, x: Tensor) -> object:
        return self.wrap(self.scores(x))  # type: ignore[operator]


@pytest.mark.parametrize(
    ("wrap", "understood"),
    [
        (lambda out: (out.mean(), out), True),
        (lambda out: [out], True),
        (lambda out: {"loss": out.mean(), "scores": out}, True),
        (lambda out: (out, out + 1), False),
        (lambda out: {"scores": out, "hidden": out}, False),
    ],
)
def test_outputs_are_understood_as_the_page_says(wrap: object, understood: bool) -> None:
    assert "`(loss, logits)` with a loss that is a single number is understood, `(logits, hidden)` is not" in PAGE
    x, y = torch.randn(40, 4), torch.arange(40) % 3
    if understood:
        assert Scope(Returns(wrap), (x, y), views=()).history.steps == [0]
    else:
        with pytest.raises(InputError, match="say which tensor counts"):
            Scope(Returns(wrap), (x, y), views=())


def test_the_page_names_the_second_that_is_always_allowed() -> None:
    assert "at most 5 % of the training time so far. A short training may pay more" in PAGE
    assert "at most one second" in PAGE
