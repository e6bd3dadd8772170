"""The exclusive-or data: labels are what a slow loop says, and less than all relevant inputs say nothing."""

from __future__ import annotations

from itertools import combinations

import pytest
import torch

from unlazy.data.interactions import LAWS, Interaction
from unlazy.runtime import InputError


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("order", [1, 2, 5])
def test_labels_are_the_product_of_signs(law: str, order: int) -> None:
    made = Interaction(n=60, inputs=7, order=order, law=law, seed=3, choice=4)
    data = made.dataset(dtype=torch.float64)
    for x, y in zip(data.x.tolist(), data.y.tolist(), strict=True):
        product = 1.0
        for coordinate in made.relevant():
            product *= 1 if x[coordinate] > 0 else -1
        assert y == ([0, 1] if product > 0 else [1, 0])


def test_fewer_than_all_relevant_inputs_say_nothing() -> None:
    """Over the whole cube, every product of a proper subset of relevant inputs is uncorrelated with the label."""
    made = Interaction(n=1, inputs=6, order=4)
    cube = torch.cartesian_prod(*[torch.tensor([-1.0, 1.0])] * 6)
    sign = 2.0 * made.labels(cube) - 1
    for size in range(1, 4):
        for some in combinations(range(6), size):
            assert float((cube[:, list(some)].prod(1) * sign).mean()) == 0
    assert torch.equal(cube[:, list(made.relevant())].prod(1), sign)


def test_inputs_belong_to_seed_law_and_split_alone() -> None:
    base = Interaction(n=40, order=2, seed=1)
    assert torch.equal(base.points(), Interaction(n=40, order=5, seed=1, choice=9).points())
    assert not torch.equal(base.points(), base.points("test"))
    assert not torch.equal(base.points(), Interaction(n=40, order=2, seed=2).points())
    assert set(base.points().unique().tolist()) == {-1.0, 1.0}


def test_relevant_inputs_differ_between_choices() -> None:
    chosen = {Interaction(order=3, choice=choice).relevant() for choice in range(10)}
    assert len(chosen) > 5
    assert all(len(set(some)) == 3 and max(some) < 20 for some in chosen)


def test_gaussian_inputs_are_standard_normal() -> None:
    x = Interaction(n=4000, law="gaussian").points()
    assert float(x.mean()) == pytest.approx(0, abs=0.02)
    assert float(x.std()) == pytest.approx(1, abs=0.02)


@pytest.mark.parametrize(
    ("options", "says"),
    [({"order": 21}, "between 1 and"), ({"order": 0}, "between 1"), ({"law": "dice"}, "law"), ({"n": 0}, "n must")],
)
def test_bad_settings_are_refused(options: dict, says: str) -> None:
    with pytest.raises(InputError, match=says):
        Interaction(**options)
