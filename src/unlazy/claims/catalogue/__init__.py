"""The claims of the three papers as data: what is claimed, where, and which study judges it."""

from unlazy.claims.catalogue.claim import Claim
from unlazy.claims.catalogue.emergence import EMERGENCE
from unlazy.claims.catalogue.halfspace import HALF_SPACE
from unlazy.claims.catalogue.tangent import TANGENT
from unlazy.claims.nearest import nearest

__all__ = ["CATALOGUE", "Claim", "by_id"]

CATALOGUE: tuple[Claim, ...] = HALF_SPACE + EMERGENCE + TANGENT

_BY_ID: dict[str, Claim] = {claim.id: claim for claim in CATALOGUE}


def by_id(claim_id: str) -> Claim:
    """Return the claim with this id, for example "C9"; raise KeyError when there is none."""
    try:
        return _BY_ID[claim_id]
    except KeyError:
        found = nearest(claim_id, _BY_ID)
        hint = f"did you mean {found!r}?" if found else f"known ids: {', '.join(_BY_ID)}"
        raise KeyError(f"no claim has the id {claim_id!r}; {hint}") from None
