"""The study of rare classes: its training sets have a long tail, and a class's accuracy is that of its own images."""

from __future__ import annotations

import torch

from unlazy.data.images import Images
from unlazy.models.build import build_stack
from unlazy.models.spec import NetSpec
from unlazy.studies.beyond import rare_classes as study


def test_a_seed_draws_its_order_and_images() -> None:
    labels = torch.arange(4000) % 10
    sizes = study.class_sizes(300, 3)
    assert sizes[0] == 300
    assert sizes[-1] == 3
    rows, classes = study.long_tail(labels, 5, sizes)
    assert sorted(classes) == list(range(10))
    assert len(rows.unique()) == len(rows) == sum(sizes)
    assert [int((labels[rows] == name).sum()) for name in classes] == sizes
    again, other = study.long_tail(labels, 5, sizes)[0], study.long_tail(labels, 6, sizes)[1]
    assert torch.equal(rows, again)
    assert classes != other


def test_accuracy_is_counted_class_by_class() -> None:
    pixels = torch.randint(0, 256, (40, 1, 4, 4), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    names = tuple(str(name) for name in range(10))
    test = Images("made", "test", pixels, torch.arange(40) % 10, names, mean=(0.5,), deviation=(0.3,))
    net = build_stack(NetSpec(16, 10, width=8, depth=2), [0, 1])
    found = study.accuracy_by_class(net, test)
    with torch.no_grad():
        said = net(test.flat(standardise=True)).argmax(-1)
    for member in range(2):
        for name in range(10):
            own = [int(said[member, image] == name) for image in range(40) if image % 10 == name]
            assert float(found[member, name]) == sum(own) / len(own)


def test_cases_on_cifar_have_fewer_arms_and_seeds() -> None:
    cases = study.cases(study.STUDY.settings("desk"), range(10))
    assert {case.arm for case in cases if case.data == "cifar-10"} == set(study.SHORT)
    assert {len(case.seeds) for case in cases} == {5, 10}
