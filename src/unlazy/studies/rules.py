"""Records which rule each claim has, since when, and which seeds had been measured before the rule was written.

Measuring the same seeds again does not make a rule older: the mark *rule written after a first measurement* stays until a claim
is judged on seeds that had not been measured when its rule was recorded.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from unlazy.store import write_file

RULES_FILE = "rules.json"


@dataclass(frozen=True)
class RuleEntry:
    """The rule of a claim, by its hash.

    ``recorded``: when it was first seen. ``seen``: seeds measured before that. ``first_measured``: when the claim first had
    numbers. ``earlier``: the rules that the claim had before.
    """

    rule: str
    recorded: str
    seen: tuple[int, ...] = ()
    first_measured: str | None = None
    earlier: tuple[Mapping[str, str], ...] = ()
    note: str = ""

    def after_data(self, seeds: Iterable[int]) -> bool:
        """Whether some of these seeds had been measured before the rule was written."""
        return bool(set(self.seen) & set(seeds))


@dataclass(frozen=True)
class RuleBook:
    """The rules of a study at one scale, kept in a file beside its table."""

    path: Path
    claims: Mapping[str, RuleEntry] = field(default_factory=dict)

    @classmethod
    def read(cls, path: Path) -> RuleBook:
        """The book in a file; an empty one where there is no file."""
        if not path.exists():
            return cls(path)
        entries = json.loads(path.read_text())
        claims = {
            name: RuleEntry(**{**entry, "seen": tuple(entry["seen"]), "earlier": tuple(entry["earlier"])})
            for name, entry in entries.items()
        }
        return cls(path, claims)

    def with_rules(self, rules: Mapping[str, str], measured: Iterable[int], now: str) -> RuleBook:
        """The book with these rules, hash by claim. New and changed rules get the date ``now`` and the seeds measured so far."""
        seen = tuple(sorted(set(measured)))
        claims = dict(self.claims)
        for name, rule in rules.items():
            before = claims.get(name)
            if before is None:
                claims[name] = RuleEntry(rule, now, seen)
            elif before.rule != rule:
                earlier = (*before.earlier, {"rule": before.rule, "recorded": before.recorded})
                known = tuple(sorted({*before.seen, *seen}))
                claims[name] = RuleEntry(rule, now, known, before.first_measured, earlier)
        return RuleBook(self.path, claims)

    def with_first_measurement(self, names: Iterable[str], now: str) -> RuleBook:
        """The book once these claims have numbers: ``now`` is the first measurement of those that had none before."""
        claims = dict(self.claims)
        for name in names:
            if name in claims and claims[name].first_measured is None:
                claims[name] = replace(claims[name], first_measured=now)
        return RuleBook(self.path, claims)

    def write(self) -> None:
        """Write the file."""
        entries = {name: asdict(entry) for name, entry in self.claims.items()}
        write_file(self.path, (json.dumps(entries, indent=1) + "\n").encode())
