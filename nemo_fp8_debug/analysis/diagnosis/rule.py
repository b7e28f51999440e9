"""The interface of a rule, and the registry of all rules."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache

from ...core.table import load_feature_modules
from .facts import Fact, Facts
from .finding import Finding

Find = Callable[[Facts], Iterable[Finding]]
_REGISTRY: dict[str, Rule] = {}


@dataclass(frozen=True)
class Rule:
    """A rule. It reads facts of a run, but never a record, and returns findings."""

    name: str
    #: causes that the rule can name, keys of `finding.CAUSES`
    causes: Sequence[str]
    #: facts that the rule reads
    needs: Sequence[Fact[object]]
    find: Find
    #: kind of the rule's events, one of `events.KINDS`; empty: each finding sets its own kind
    event: str = ""
    #: whether the rule needs no baseline. Run and baseline may then have the same finding
    needs_no_baseline: bool = False

    @property
    def description(self) -> str:
        """Return the docstring of the rule's function, which contains an example."""
        return self.find.__doc__ or ""


def register_rule(
    name: str, causes: Sequence[str], needs: Sequence[Fact[object]], event: str = "", needs_no_baseline: bool = False
) -> Callable[[Find], Find]:
    """Return a decorator that registers a function as a rule.

    Args:
        name: the unique name of the rule.
        causes: keys of `finding.CAUSES`.
        needs: facts that the function reads.
        event: kind of the rule's events, one of `events.KINDS`; empty: each finding sets its own kind.
        needs_no_baseline: whether the rule needs no baseline.
    """

    def register(find: Find) -> Find:
        _REGISTRY[name] = Rule(name, tuple(causes), tuple(needs), find, event, needs_no_baseline)
        return find

    return register


@cache
def load_rules() -> tuple[Rule, ...]:
    """Import the rules of the package `rules` and of all features, and return them sorted by name.

    Example:
        >>> "learning rate" in [rule.name for rule in load_rules()]
        True
    """
    package = importlib.import_module(f"{__package__}.rules")
    for module in pkgutil.iter_modules(package.__path__):
        importlib.import_module(f"{package.__name__}.{module.name}")
    load_feature_modules("rule")
    return tuple(_REGISTRY[name] for name in sorted(_REGISTRY))


def list_needed_facts() -> dict[str, Fact[object]]:
    """Return the facts that all rules need, by name."""
    return {each.name: each for rule in load_rules() for each in rule.needs}


def apply_rules(facts: Facts, leave_out: Collection[str] = ()) -> Iterator[Finding]:
    """Yield the findings of all rules. If the baseline ends before the run, apply the rules without a baseline to the
    remaining steps.

    Args:
        leave_out: names of rules to skip.
    """
    for each in load_rules():
        if each.name in leave_out:
            continue
        found = list(each.find(facts))
        yield from found
        if facts.past_baseline is not None:
            known = {(f.rule, f.layer, f.role) for f in found}
            later = (f for f in each.find(facts.past_baseline) if (f.since or 0) > facts.baseline_end)
            yield from (f for f in later if (f.rule, f.layer, f.role) not in known)
