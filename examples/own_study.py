"""A claim of one's own: do wider networks move less? `unlazy reproduce examples/own_study.py` measures, judges and draws it."""

import torch
from torch.nn.utils import parameters_to_vector

import unlazy as ul
from unlazy import plots


def measure(case, work):
    """Train one network; how far did its parameters go, relative to their size at the start?"""
    torch.manual_seed(case.seed)
    data = ul.Circle().dataset()
    net = torch.nn.Sequential(torch.nn.Linear(2, case.width), torch.nn.ReLU(), torch.nn.Linear(case.width, 1))
    start = parameters_to_vector(net.parameters()).detach().clone()
    optimiser = torch.optim.Adam(net.parameters(), 1e-2)
    for _ in range(case.steps):
        optimiser.zero_grad()
        (net(data.x) - data.y).square().mean().backward()
        optimiser.step()
    rows = ul.Rows()
    rows.add("motion", float((parameters_to_vector(net.parameters()).detach() - start).norm() / start.norm()))
    return rows


def difference(one, other):
    return one - other


NARROW, MIDDLE, WIDE = (ul.Quantity("motion", width=width) for width in (16, 128, 1024))
CLAIM = ul.Claim(
    "W1",
    says="The wider a network is, the less its parameters move, relative to their size.",
    where="folklore",
    paper="no number",
    parts=[
        ul.Part("motion at width 16 less that at 128", (NARROW, MIDDLE), by=difference, above=0),
        ul.Part("motion at width 128 less that at 1024", (MIDDLE, WIDE), by=difference, above=0),
    ],
    figure="motion",
)


def draw(results):
    """How far parameters moved against width: median and middle half of the seeds."""
    figure, axes = plots.grid(1, 1, (4, 3))
    plots.draw_band(axes[0, 0], *results.table.series("motion", over="width"), "median", "blue", marker="o")
    axes[0, 0].set(xscale="log", xlabel="width", ylabel="how far the parameters moved")
    return figure


STUDY = ul.Study(
    name="width",
    paper="ours",
    scales={"smoke": {"steps": 5}, "desk": {"steps": 200}},
    seeds={"smoke": 2, "desk": 10},
    varies={"width": (16, 128, 1024)},
    measure=measure,
    claims=(CLAIM,),
    figures=(ul.Figure("motion", "Motion by width", draw),),
)
