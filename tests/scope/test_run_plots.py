"""Figures, tables and cards of scopes and runs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from torch import nn

from unlazy import InputError, Run, Scope, find_runs
from unlazy.curves import MOST_NAMED, WORD_COLOURS, plot_curves
from unlazy.scope.history import History

X = torch.randn(40, 6, generator=torch.Generator().manual_seed(1))
Y = torch.arange(40) % 2


def train(folder: Path | None, rate: float) -> Scope:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 2))
    optimiser = torch.optim.SGD(net.parameters(), rate)
    with Scope(net, (X, Y), folder, config={"lr": rate, "note": "<b>"}, budget=float("inf")) as scope:
        for step in range(1, 9):
            optimiser.zero_grad()
            F.cross_entropy(net(X), Y).backward()
            optimiser.step()
            scope.step(step)
    return scope


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("plots")
    for name, rate in (("slow", 0.01), ("fast", 1.0)):
        train(root / name, rate)
    return root


def test_a_figure_holds_the_numbers_of_the_run(root: Path) -> None:
    run = Run(root / "fast")
    figure = run.plot()
    assert isinstance(figure, Figure)
    labels = [axes.get_ylabel() for axes in figure.axes if axes.get_visible()]
    assert labels[0] == "loss on the probe set"
    assert len(labels) == 4
    steps, losses = run.scalars("loss")
    line = figure.axes[0].lines[0]
    assert np.array_equal(line.get_xdata(), steps)
    assert np.allclose(line.get_ydata(), losses[:, 0])


def test_scope_and_run_draw_the_same_curves() -> None:
    scope = train(None, 0.5)
    [drawn] = scope.plot("loss").axes[0].lines
    steps, losses = scope.history.series("loss")
    assert np.array_equal(drawn.get_xdata(), steps)
    assert np.allclose(drawn.get_ydata(), losses)


def test_one_panel_goes_into_the_axes_of_the_user(root: Path) -> None:
    own = Figure().subplots(1, 2)
    figure = Run(root / "slow").plot(ax=own[1])
    assert figure is own[1].figure
    assert not own[0].lines
    assert own[1].get_ylabel() == "loss on the probe set"
    Run(root / "slow").plot("parameter_motion", ax=own[0])
    assert own[0].get_ylabel() == "parameter motion"
    with pytest.raises(InputError, match="no nonsense to draw; panels are loss, gap"):
        Run(root / "slow").plot("nonsense")


def test_phases_are_drawn_in_the_colours_of_their_words() -> None:
    curve = (np.arange(4), np.ones((4, 1)))
    figure = plot_curves(
        {"": lambda name: curve}, "loss", phases=[{"word": "rich", "first": 1, "last": 3, "until": None}]
    )
    [patch] = figure.axes[0].patches
    assert (
        "#{:02x}{:02x}{:02x}".format(*(round(255 * part) for part in patch.get_facecolor()[:3])) == WORD_COLOURS["rich"]
    )
    assert (patch.get_x(), patch.get_width()) == (1, 2)


def test_a_phase_begins_where_the_one_before_ended() -> None:
    curve = (np.arange(9), np.ones((9, 1)))
    phases = [
        {"word": "mixed", "first": 1, "last": 3, "until": 4},
        {"word": "rich", "first": 8, "last": 8, "until": None},
    ]
    patches = plot_curves({"": lambda name: curve}, "loss", phases=phases).axes[0].patches
    assert [(patch.get_x(), patch.get_x() + patch.get_width()) for patch in patches] == [(1, 4), (4, 8)]


def test_members_become_a_median_and_a_band() -> None:
    values = np.array([[1.0, 2.0, 30.0], [4.0, 5.0, np.nan]])
    [line] = plot_curves({"a": lambda name: (np.arange(2), values)}, "loss").axes[0].lines
    assert list(line.get_ydata()) == [2.0, 4.5]


def test_many_runs_share_a_figure_without_a_legend(root: Path) -> None:
    few, many = (Run.compare([root / "fast"] * count).plot("loss") for count in (2, MOST_NAMED + 1))
    assert [text.get_text() for text in few.axes[0].get_legend().get_texts()] == ["fast (1)", "fast (2)"]
    assert many.axes[0].get_legend() is None
    assert len(many.axes[0].lines) == MOST_NAMED + 1


def test_comparison_as_table_text_and_page(root: Path) -> None:
    comparison = Run.compare(find_runs(root)[0])
    frame = comparison.to_frame()
    assert sorted(frame.index) == ["fast", "slow"]
    assert frame.loc["fast", "config.lr"] == 1.0
    assert frame.loc["slow", "loss"] == Run(root / "slow").scalars("loss")[1][-1, 0]
    assert "config.note" not in frame.columns
    assert "verdict" in str(comparison)
    assert "<td>config.lr</td>" in comparison._repr_html_()
    with pytest.raises(InputError, match="at least one run"):
        Run.compare([])


def test_history_as_tables() -> None:
    history = History()
    history.add(0, {"loss": 1.0}, {})
    history.add(2, {"loss": 0.5, "gap": 0.1}, {})
    history.add(3, {"gap": float("nan")}, {})
    frame, table = history.to_frame(), history.to_polars()
    assert list(frame.index) == [0, 2, 3]
    assert frame.index.name == "step"
    np.testing.assert_array_equal(frame["loss"], [1.0, 0.5, np.nan])
    assert table.columns == ["step", "loss", "gap"]
    assert table["loss"].to_list() == [1.0, 0.5, None]  # not measured
    assert np.isnan(table["gap"].to_list()[2])  # measured, and not a number
    assert History().to_frame().empty
    assert History().to_polars().columns == ["step"]


def test_tables_of_a_run_hold_its_scalars(root: Path) -> None:
    run = Run(root / "fast")
    frame = History.from_run(run).to_frame()
    steps, values = run.scalars("tangent_distance")
    assert np.allclose(frame["tangent_distance"].dropna(), values[:, 0])
    assert list(frame["tangent_distance"].dropna().index) == list(steps)


def test_cards_say_what_a_run_is_and_escape_it(root: Path) -> None:
    run = Run(root / "fast")
    card = run._repr_html_()
    assert "Sequential, 2 layers, 146 parameters" in card
    assert "&lt;b&gt;" in card
    assert "<b>" not in card
    assert repr(run).endswith(f"finished, {len(run.lines)} measurements)")
    history = History.from_run(run)
    assert f"{history.last('loss'):.4g}" in history._repr_html_()
    assert "measurements of" in repr(history)
