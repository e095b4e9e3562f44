"""Figures of a leader's decisions, as its decision log has them."""

from dataclasses import replace
from typing import Any

from pilotlight.common.deltas import Change, change_of, changed_by
from pilotlight.common.errors import InternalError
from pilotlight.policy.control.plan import ControlRules
from pilotlight.policy.control.reconcile import ReconcileRules
from pilotlight.policy.eviction.base import EvictionPolicy
from pilotlight.policy.eviction.choice import EXPECTED


def rules_change(rules: ControlRules) -> Change:
    """The rules, as they are written down.

    Raises:
        InternalError: they name a policy of eviction that a log cannot name.
    """
    policy = rules.scheme.placement.policy
    if policy.name not in EXPECTED:
        raise InternalError(f"a decision log knows no {policy.name}")
    return change_of(_with_policy(_usual_rules(), policy), _with_policy(rules, policy))


def rules_from(change: Change, eviction: str) -> ControlRules:
    """The rules that were written down, with a policy by its name.

    Raises:
        KeyError: there is no such policy.
    """
    return changed_by(_with_policy(_usual_rules(), EXPECTED[eviction]()), change, ControlRules)


def _usual_rules() -> ControlRules:
    return ControlRules(reconcile=ReconcileRules(term_started_s=0.0, hold_deadline_s=0.0))


def _with_policy(rules: ControlRules, policy: EvictionPolicy) -> ControlRules:
    def placed(one: Any) -> Any:
        return replace(one, placement=replace(one.placement, policy=policy))

    return replace(
        rules, scheme=placed(rules.scheme), drain=placed(rules.drain), turns=placed(rules.turns)
    )
