"""What a claim is."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Claim:
    """One statement that a study finds to hold, to hold partly, or to fail.

    id: short name. C1, C2, ... and F1, F2, ... belong to the half-space paper (F: failure cases and checks
        named in its published summary), B1, ... to the emergence paper, L1, ... to the tangent paper.
    paper: "half-space" (Half-Space Feature Learning in Neural Networks), "emergence" (A Theoretical Analysis
        on Feature Learning in Neural Networks) or "tangent" (An Adaptive Tangent Feature Perspective of
        Neural Networks).
    where: the theorem, figure, table or section that makes the claim, or the kind of source.
    statement: the claim in one sentence of our own that can be true or false.
    paper_value: what the paper gives or implies, in a few words; "no number" where it gives none.
    study: the name of the study that judges it.
    """

    id: str
    paper: str
    where: str
    statement: str
    paper_value: str
    study: str
