"""The figures of control's decisions, from the settings."""

from pilotlight.policy.coldstart.chosen import SEARCH_STEPS, ChoiceRules
from pilotlight.policy.coldstart.servers import StartRules
from pilotlight.policy.control.plan import ControlRules
from pilotlight.policy.control.reconcile import ReconcileRules
from pilotlight.policy.drain import DrainRules
from pilotlight.policy.eviction.base import EvictionRules
from pilotlight.policy.eviction.choice import expected_policy
from pilotlight.policy.parallelism import SchemeRules
from pilotlight.policy.placement import PlacementRules, ServiceRules
from pilotlight.policy.scaling import ScalingRules
from pilotlight.policy.turns import TurnRules
from pilotlight.scheduler.settings import SchedulerSettings


def rules_of(settings: SchedulerSettings, term_started_s: float) -> ControlRules:
    """Figures of the decisions, as they are set."""
    placement = PlacementRules(
        eviction=EvictionRules(min_residency_s=settings.min_residency_s),
        policy=expected_policy(settings.eviction_policy),
        service=ServiceRules(min_loads=settings.min_service_loads),
    )
    return ControlRules(
        reconcile=ReconcileRules(
            term_started_s=term_started_s, hold_deadline_s=settings.hold_deadline_s
        ),
        scaling=ScalingRules(
            instance_requests=settings.instance_requests, forecast=settings.forecast_starts
        ),
        scheme=SchemeRules(
            placement=placement,
            choice=ChoiceRules(
                policy=settings.start_policy,
                start=StartRules(
                    max_stages=settings.max_stages,
                    max_steps=SEARCH_STEPS,
                    least_full=1,
                    full_leads=True,
                    share_nodes=True,
                ),
            ),
        ),
        drain=DrainRules(replace_within_s=settings.drain_replace_s, placement=placement),
        consolidate=settings.consolidate,
        turns=TurnRules(patience_slo_factor=settings.patience_slo_factor, placement=placement),
    )
