"""Every rule of the ablation is a function that is there; it is switched off where it is used."""

from __future__ import annotations

import inspect
from collections import Counter
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from bench.ablation.__main__ import main
from bench.ablation.describe import PAGE, page
from bench.ablation.measure import measure
from bench.ablation.rules import RULES
from bench.ablation.switch import Rule, alike, lines_of, switched_off, watched
from dpuflow.entries import blockers, dating

RELEASED = next(rule for rule in RULES if rule.name == "entries.blockers:inputs_and_offers")
ANSWERS = next(rule for rule in RULES if rule.name == "entries.dating:_own_answers")


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_a_rule_is_a_function_that_is_there(rule: Rule) -> None:
    assert callable(rule.function)
    assert lines_of(rule) > 0


@pytest.mark.parametrize(
    "name", ["calls:put_instances", "sockets:socket_instances", "structured:p2p_instances"]
)
def test_what_finds_nothing_leaves_its_rows_over(name: str) -> None:
    """Its rows, whatever else it is given: a kernel that gets others reads what is not there."""
    rule = next(rule for rule in RULES if rule.name == f"matching.{name}")
    assert rule.neutral(None, tuple(inspect.signature(rule.function).parameters)) == ([], "rows")


def test_every_rule_says_what_it_claims() -> None:
    result = CliRunner().invoke(main, ["--list"])
    assert result.exit_code == 0, result.output
    rows = result.output.splitlines()
    assert len(rows) == len(RULES)
    assert all(len(row.split(maxsplit=2)) > 2 for row in rows)


def test_the_page_of_rules_is_what_the_code_says() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "python -m bench.ablation.describe"


def test_names_are_not_listed_twice() -> None:
    assert max(Counter(rule.name for rule in RULES).values()) == 1


def test_a_rule_is_switched_off_where_it_was_imported_and_back_on() -> None:
    original = blockers.inputs_and_offers
    with switched_off(RELEASED):
        assert dating.inputs_and_offers is blockers.inputs_and_offers
        assert dating.inputs_and_offers is not original
    assert dating.inputs_and_offers is blockers.inputs_and_offers is original


def test_lines_of_a_rule_hold_those_of_its_own_helpers_only() -> None:
    heard = next(rule for rule in RULES if rule.name.endswith(":likely_entries"))
    assert lines_of(heard) > 2 * lines_of(RELEASED) > 10


def test_results_are_compared_value_by_value() -> None:
    one: Any = (np.array([1.0, np.nan]), [{"a": np.arange(3)}])
    assert alike(one, (np.array([1.0, np.nan]), [{"a": np.arange(3)}]))
    assert not alike(one, (np.array([1.0, np.nan]), [{"a": np.arange(1, 4)}]))
    assert not alike(np.arange(3), np.arange(4))


def test_ranks_that_answer_and_send_at_once_are_told_by_what_they_send() -> None:
    """On the bundled capture of Open MPI over libfabric."""
    case = "traces/mpi-alltoall-libfabric-n3"
    unheard = Rule("verdicts.bulk:_named", lambda result, args: args[0])
    harmless = Rule("verdicts.links:slow_rows", lambda result, args: result.astype(bool))
    seen, effects = measure(case, ["whole"], [ANSWERS, unheard, harmless])
    assert seen.analyses == 1
    assert seen.entries > 0
    assert [effect.rule for effect in effects] == [ANSWERS.name]
    assert effects[0].changed
    assert effects[0].entries > 0
    with watched([ANSWERS]) as spoke:
        pass
    assert spoke == set()
