"""Claims C1 to C6 and C26 of the half-space paper, judged on a results table. Thresholds were fixed before the runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from unlazy.claims.verdict import Part, Row, summary
from unlazy.studies.halfspace.theorems.settings import KINDS, stack_name
from unlazy.studies.results import judged_row, numbers
from unlazy.theory.examples import TWO_PARTS

EXACT = 1e-12  # relative error of sums over paths in float64, and shares of exceptions, of which there must be none
REGRESSION = 1e-10  # C26: least squares loses what its condition number (about 1e5) takes
JUMP = 0.2  # C5: of the circle; half-plane to quadrant is a quarter
CONTINUOUS = 1.01  # C5: movement over the most that continuity allows, and a hundredth for rounding
Table = Mapping[str, Any]


def claims(table: Table) -> list[Row]:
    """One row per claim, from the measured table alone; the smoke scale judges nothing."""
    return [judge(table) for judge in (_c1, _c2, _c3, _c4, _c5, _c6, _c26)]


def _parts(
    table: Table, quantity: str, kinds: Sequence[str], what: str, below: float = EXACT, unit: str = ""
) -> list[Part]:
    """The same test on every random network of these kinds, and on the worst of them all: an exact claim has no exceptions."""
    values = {kind: numbers(table["networks"][f"{quantity}_{kind}"]) for kind in kinds}
    worst = np.array([max(found.max() for found in values.values())])
    parts = [Part(f"{KINDS[kind]}: {what}", "<", below, unit, found) for kind, found in values.items()]
    return [*parts, Part(f"the worst network of all: {what}", "<", below, unit, worst)]


def _controls(table: Table, quantity: str, kinds: Sequence[str], what: str, unit: str = "") -> list[Row]:
    return [summary(f"{KINDS[kind]}: {what}", numbers(table["networks"][f"{quantity}_{kind}"]), unit) for kind in kinds]


def _c1(table: Table) -> Row:
    what = "sum over paths against the output, relative error"
    parts = _parts(table, "path_sum", ["relu"], what)
    controls = _controls(table, "path_sum", ["relu-biases"], f"{what} (bias paths included)")
    controls += _controls(table, "lemma", ["relu", "relu-biases"], "partial paths against every hidden unit")
    why = (
        "An identity, to rounding, on every random network; it also holds layer by layer, and with biases once each layer's "
        "constant node begins paths of its own."
    )
    return judged_row(table, "C1", parts, why=why, controls=controls, figure="identities")


def _c2(table: Table) -> Row:
    kinds, what = ["dlgn", "pwc", "linear"], "sum over paths against the output, relative error"
    parts = _parts(table, "path_sum", kinds, what)
    controls = _controls(table, "path_sum", ["dlgn-biases", "pwc-biases"], f"{what} (bias paths included)")
    controls += _controls(table, "path_sum", ["dlgn-soft"], f"{what} (the gate of a path is a product of sigmoids)")
    controls += _controls(table, "lemma", kinds, "partial paths against every hidden unit")
    why = (
        "An identity, to rounding, on every random network, with biases and with soft gates too: it uses only that the value "
        "branch is linear between its gates."
    )
    return judged_row(table, "C2", parts, why=why, controls=controls, figure="identities")


def _c3(table: Table) -> Row:
    what = "product over layers against counting common paths one by one, relative error"
    parts = _parts(table, "overlap", ["relu", "dlgn", "relu-biases", "dlgn-biases"], what)
    controls = _controls(
        table,
        "antipodal",
        ["dlgn"],
        "open at x plus open at -x, less the width: largest departure in any layer",
        "units",
    )
    why = (
        "Counts are whole numbers and agree exactly. Without biases a DLGN's counts at x and -x are tied: the open units of each "
        "layer add up to its width, so paths won on one side are lost on the opposite one."
    )
    return judged_row(table, "C3", parts, why=why, controls=controls, figure="identities")


def _c4(table: Table) -> Row:
    found, wanted = table["examples"]["two_parts"], [end for part in TWO_PARTS for end in part]
    off = np.abs(np.subtract(found, wanted)) if len(found) == len(wanted) else np.array([np.inf])
    parts = _parts(
        table, "leaving", ["dlgn", "dlgn-biases"], "segments inside a path region at both ends that leave it"
    )
    parts += _parts(table, "polyhedron", ["dlgn", "dlgn-biases"], "points where region and polyhedron differ")
    parts.append(Part("ReLU example: parts of its path region", ">", 1, "parts", np.array([len(found) / 2])))
    parts.append(Part("ReLU example: distance of its ends from 0.5, 1.5, 2.5, 3.5", "<", EXACT, "", off))
    controls = _controls(table, "leaving", ["relu", "relu-biases"], "segments that leave the region between their ends")
    controls += _controls(table, "split", ["relu", "dlgn"], "path regions in several parts, in the plane")
    for key, found in table["regions"].items():
        for position in (0, -1) if "split" in found["values"] else ():
            name = f"{stack_name(key)}, epoch {found['epochs'][position]}: path regions in several parts, in the plane"
            controls.append(summary(name, numbers(found["values"]["split"][position])))
    why = (
        "A DLGN's path region is the polyhedron of its units' half-spaces, point for point. The ReLU example is no rarity: of "
        "the path regions of bias-free ReLU nets on the circle about a fifth fall into several parts before training and three "
        "tenths after it; of a DLGN's none does."
    )
    return judged_row(table, "C4", parts, why=why, controls=controls, figure="fig01_examples")


def _c5(table: Table) -> Row:
    examples = table["examples"]
    name = "ReLU example: share of the circle by which the region differs between eps and -eps, for eps 0.1 to 1e-12"
    parts = [Part(name, ">", JUMP, "", numbers(examples["jump_relu"]))]
    what = "movement of half-space normals over the most that continuity allows, for relative steps 0.1 to 1e-12"
    parts += _parts(table, "normals", ["dlgn"], what, below=CONTINUOUS)
    controls = [summary("the example's weights as a DLGN: the same share", numbers(examples["jump_dlgn"]))]
    what = "largest change of any path region's share of the circle under a relative step of 1e-9"
    controls += _controls(table, "change", ["dlgn", "relu"], what)
    why = (
        "The example jumps by a quarter of the circle however small eps is, and as a DLGN does not move at all. It sits at a "
        "degenerate point of the parameters: random ReLU nets do not jump, their regions move by about the size of the step."
    )
    return judged_row(table, "C5", parts, why=why, controls=controls, figure="fig01_examples")


def _c6(table: Table) -> Row:
    errors = numbers(table["examples"]["pattern_count_error"])
    name = "patterns that leave a path open, counted one by one, against 2^((m-1)(L-1)), relative error, by size"
    parts = [Part(name, "<", EXACT, "", errors)]
    what = "points where being active differs from having one of these patterns"
    parts += _parts(table, "union", ["relu", "dlgn", "relu-biases", "dlgn-biases"], what)
    controls = []
    for key, found in table["regions"].items():
        name = f"{stack_name(key)}, epoch {found['epochs'][-1]}: activation patterns that occur on the circle"
        controls.append(summary(name, numbers(found["values"]["cells"][-1])))
        name = f"{stack_name(key)}, epoch {found['epochs'][-1]}: share of the paths that are active somewhere on it"
        controls.append(summary(name, numbers(found["values"]["path_regions"][-1])))
    width, depth = (table["settings"][name] for name in ("width", "depth"))
    why = (
        "Exact, and nearly all of these patterns are empty in the plane: on the circle the trained networks meet one or two "
        f"hundred of 2^{width * depth}. A bias-free DLGN meets exactly two for every unit, trained or not: training only moves "
        "boundaries."
    )
    return judged_row(table, "C6", parts, why=why, controls=controls, figure="regions_over_training")


def _c26(table: Table) -> Row:
    kinds = ["dlgn", "relu"]
    what = "least squares on paths against kernel regression, at new points, over the largest target"
    parts = _parts(table, "ridge", kinds, f"{what}, with a ridge", REGRESSION)
    parts += _parts(table, "ridgeless", kinds, f"{what}, without", REGRESSION)
    controls = _controls(table, "ridge", ["dlgn-biases", "relu-biases"], f"{what}, with a ridge")
    for kind in ("dlgn", "pwc"):
        scores = numbers(table["law_networks"][f"law_{kind}"])
        name = f"{KINDS[kind]}: value kernel averaged over fresh values, distance from L s^(2(L-1)) H"
        controls.append(summary(name, scores, "standard errors"))
    law = table["law"]
    stack = stack_name(law["stack"])
    for position in (0, -1):
        epoch, values = law["epochs"][position], law["values"]
        name = f"{stack}, gates of epoch {epoch}: averaged value kernel over that law"
        controls.append(summary(name, numbers(values["ratio"][position])))
        name = f"{stack}, epoch {epoch}: cosine of the value kernel at the trained values with that law"
        controls.append(summary(name, numbers(values["cosine_trained"][position])))
    why = (
        "Exact. Real experts are products of shared weights, not free constants: averaged over fresh weights their tangent "
        "kernel is the overlap kernel times that of the inputs, at any width and with the gates of any epoch, but once the "
        "values are trained too it is far from it."
    )
    return judged_row(table, "C26", parts, why=why, controls=controls, figure="value_kernel_law")
