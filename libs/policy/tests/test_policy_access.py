"""Scopes and roles of keys."""

import pytest

from pilotlight.policy.access import (
    Access,
    AdminNeed,
    AdminRole,
    KeyScope,
    may_administer,
)


def test_an_empty_scope_limits_nothing() -> None:
    assert Access().allows_model("org/any")
    assert Access().allows_route("/v1/chat/completions")


@pytest.mark.parametrize(
    ("name", "allowed"),
    [("acme/a", True), ("acme/", True), ("acme", False), ("fox", True), ("fox-2", False)],
)
def test_models_by_name_and_by_beginning(name: str, allowed: bool) -> None:
    assert KeyScope(models=("acme/*", "fox")).allows_model(name) is allowed


@pytest.mark.parametrize(
    ("path", "allowed"),
    [
        ("/v1/chat", True),
        ("/v1/chat/completions", True),
        ("/v1/chatter", False),
        ("/v1", False),
        ("/api/tags", True),
    ],
)
def test_routes_with_all_below_them(path: str, allowed: bool) -> None:
    assert KeyScope(routes=("/v1/chat", "/api/")).allows_route(path) is allowed


def test_a_key_never_reaches_beyond_its_project() -> None:
    project, key = KeyScope(models=("acme/*",)), KeyScope(models=("*",))
    access = Access(project=project, key=key)
    assert access.allows_model("acme/a")
    assert not access.allows_model("other/a")
    within = Access(project=project, key=KeyScope(models=("acme/a", "other/a")))
    assert within.allows_model("acme/a")
    assert not within.allows_model("acme/b")
    assert not within.allows_model("other/a")


def test_each_role_may_do_what_the_one_before_it_may() -> None:
    reach = [{need for need in AdminNeed if may_administer(role, need)} for role in AdminRole]
    assert reach[0] == {AdminNeed.READ}
    assert reach[1] == {AdminNeed.READ, AdminNeed.OPERATE}
    assert reach[2] == set(AdminNeed)
