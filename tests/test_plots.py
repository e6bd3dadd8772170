"""Figures that are more than decoration: what they show is what the rows say."""

from __future__ import annotations

from unlazy import plots


def test_the_scorecard_figure_draws_the_verdicts_of_the_parts() -> None:
    words = ("holds", "holds", "fails", "censored")
    mixed = {"id": "C7", "verdict": "2 of 4 parts", "statement": "s", "parts": [{"verdict": word} for word in words]}
    figure = plots.draw_scorecard([mixed, {"id": "C8", "verdict": "not measured", "statement": "t", "parts": []}])
    axis = figure.axes[0]
    lengths: dict[str, float] = {}
    names = {plots.COLOURS[colour]: verdict for verdict, colour in plots.VERDICT_COLOURS.items()}
    for bar in axis.patches:
        colour = "#" + "".join(f"{round(255 * part):02x}" for part in bar.get_facecolor()[:3])
        if bar.get_facecolor()[3] > 0 and -0.5 < bar.get_y() + bar.get_height() / 2 < 0.5:
            lengths[names[colour]] = bar.get_width()
    assert lengths == {"holds": 0.5, "undecided": 0.25, "fails": 0.25}
    assert [label.get_text() for label in axis.get_yticklabels()] == ["C7  2 of 4 parts", "C8  not measured"]
