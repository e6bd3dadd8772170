"""How far do hard gates go? Single changes to small networks, then wide ones with a teacher (beside Table 2; no claim).

A variant changes one thing of a common base. Small networks are trained briefly and judged on the last tenth of the training
images, so that the test images play no part in the choice. The gates of Table 2 are the best variant of gates on the small
network, by one seed. Wide networks have the chosen gates, all training images, patches of other images and a ReLU ResNet-34 as
teacher, and are judged on the test images.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from unlazy.studies.halfspace.image_networks import HELD_OUT, Network, measure, network_from
from unlazy.studies.study import Settings, Study

# --- what varies ---------------------------------------------------------------------------------------------

SCALES: dict[str, dict[str, Any]] = {
    "smoke": {
        "data": "digits",
        "layout": "tiny",
        "epochs": 1,
        "deep_epochs": 0,  # no deep network
        "wide": (("digits", "tiny", 1),),
        "teacher_layout": "tiny",
        "teacher_epochs": 1,
        "images": 120,
        "test_images": 40,
        "batch": 32,
        "augment": False,
    },
    "paper": {
        "data": "cifar-10",
        "layout": "small",
        "epochs": 8,
        "deep_epochs": 6,
        "wide": (
            ("cifar-10", "wide", 30),
            ("cifar-10", "wide", 130),
            ("cifar-100", "wide", 30),
            ("cifar-100", "wide", 60),
            ("cifar-10", "resnet-34", 60),
            ("cifar-100", "resnet-34", 60),
        ),
        "teacher_layout": "resnet-34",
        "teacher_epochs": 20,  # as in Table 2
        "images": 50_000,
        "test_images": 10_000,
        "batch": 512,
        "augment": True,
    },
}
GATES: dict[str, dict[str, Any]] = {  # how gradients pass hard gates; the first is the base
    "base: beta 4": {},
    "beta 1": {"hard_beta": 1.0},
    "beta 2": {"hard_beta": 2.0},
    "beta 10": {"hard_beta": 10.0},
    "normalised gates, beta 1": {"hard_beta": 1.0, "normalised_gates": True},
    "normalised gates, beta 2": {"hard_beta": 2.0, "normalised_gates": True},
    "normalised gates, beta 4": {"normalised_gates": True},
    "gate rate x 0.3": {"gate_lr": 0.3},
    "gate rate x 3": {"gate_lr": 3.0},
}
SMALL_ONLY = ("beta 2", "beta 10", "gate rate x 0.3")  # variants of gates that the deep network does not have
CHOSEN = "normalised gates, beta 1"


def list_variants(base: Network) -> dict[str, dict[str, Any]]:
    """The fields of the base that each variant changes, by the name of the variant."""
    return GATES | {
        "no gate bias": {"gate_bias": False},
        "constant experts": {"model": "pwc-hard"},
        "rate x 0.5": {"lr": 0.15},
        "rate x 2": {"lr": 0.6},
        "twice as long": {"epochs": 2 * base.epochs},
        "twice as wide": {"width": 2.0},
        "teacher": {"distil": 1.0, "teacher": replace(base, model="relu", seed=1)},
        "the ReLU twin": {"model": "relu"},
        "rate x 4": {"lr": 1.2},
        "half the batch": {"batch": base.batch // 2},
        "weight decay x 2": {"weight_decay": 1e-3},
        "whitened pictures": {"whiten": 0.1},
        "the ReLU twin, whitened pictures": {"model": "relu", "whiten": 0.1},
        "the ReLU twin, rate x 2": {"model": "relu", "lr": 0.6},
        "normalised gates, beta 1, rate x 2": {**GATES["normalised gates, beta 1"], "lr": 0.6},
    }


def cases(settings: Settings, seeds: Sequence[int]) -> list[Network]:
    """Seed by seed: every variant, variants of gates also on a deep narrow network, then wide networks with a teacher."""
    found = []
    for seed in seeds:
        hard: dict[str, Any] = {"model": "dlgn-hard", "lr": 0.3, "seed": seed}
        base = network_from(settings, **hard, judged_on=HELD_OUT, train_probe=5000)
        variants = [replace(base, variant=name, **changes) for name, changes in list_variants(base).items()]
        # digits have too few pixels for the patches of whitening
        found += [case for case in variants if case.whiten == 0 or case.data != "digits"]
        if settings.deep_epochs:
            deep = replace(base, layout="resnet-110", epochs=settings.deep_epochs)
            found += [replace(deep, variant=name, **GATES[name]) for name in GATES if name not in SMALL_ONLY]
        for data, layout, epochs in settings.wide:
            place = {"layout": settings.teacher_layout, "epochs": settings.teacher_epochs, "data": data}
            teacher = network_from(settings, **place, model="relu", lr=0.3, seed=0)
            wide = replace(teacher, layout=layout, epochs=epochs, variant=f"{layout}, teacher, patches", **hard)
            found.append(replace(wide, teacher=teacher, distil=1.0, mixed=0.5, **GATES[CHOSEN]))
    return found


STUDY = Study(
    name="hard-gate-search",
    paper="half-space",
    scales=SCALES,
    seeds={"smoke": 1, "paper": 1},
    cases=cases,
    measure=measure,
    columns=("data", "layout", "variant", "model", "epochs", "lr", "judged_on"),
    needs_gpu=("paper",),
)
