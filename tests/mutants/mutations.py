"""The seeded bugs: what each changes, and tests that are known to go red."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["MUTATIONS", "Mutation"]


@dataclass(frozen=True)
class Mutation:
    """In ``file`` the single occurrence of ``old`` becomes ``new``, which breaks ``guarantee``."""

    name: str
    guarantee: str
    file: str
    old: str
    new: str
    killed_by: tuple[str, ...]


EFFECTS = "pgref/postgres/sql/effects.sql"
SINKS = "pgref/postgres/sql/sinks.sql"
LUA = "pgref/redis/write_fenced.lua"
STORE = "pgref/postgres/effects.py"
CONNECTION = "pgref/postgres/_connection.py"
MEMORY = "pgref/memory/effects.py"
EXECUTION = "celery_integration/execution.py"
RECONCILE = "celery_integration/reconcile.py"


def _on_postgres(*tests: str) -> tuple[str, ...]:
    return tuple(f"tests/contract/test_effects_postgres.py::TestPostgresEffectStore::test_{test}" for test in tests)


def _in_memory(*tests: str) -> tuple[str, ...]:
    return tuple(f"tests/contract/test_effects_memory.py::TestMemoryEffectStore::test_{test}" for test in tests)


def _sink(suite: str, *tests: str) -> tuple[str, ...]:
    return tuple(f"tests/contract/test_sinks_{suite.lower()}.py::Test{suite}Sink::test_{test}" for test in tests)


def _interleaved(*tests: str) -> tuple[str, ...]:
    return tuple(f"tests/faults/test_interleavings.py::test_{test}" for test in tests)


def _pair(scene: str, first: str, second: str) -> tuple[str, ...]:
    return _interleaved(f"a_pair_ends_as_one_of_its_serial_orders[{scene}-{first}-{second}]")


def _only_postgres(*tests: str) -> tuple[str, ...]:
    return tuple(f"tests/contract/test_postgres_only.py::test_{test}" for test in tests)


def _privileges(*tests: str) -> tuple[str, ...]:
    return tuple(f"tests/contract/test_privileges.py::test_{test}" for test in tests)


def _direct(*tests: str) -> tuple[str, ...]:
    return tuple(f"tests/celery/test_direct.py::test_{test}" for test in tests)


MUTATIONS: tuple[Mutation, ...] = (
    # Acquiring
    Mutation(
        "contended judged before uncertain",
        "G2",
        EFFECTS,
        "ELSIF a.state = 2 THEN\n        v.verdict := 'uncertain'",
        "ELSIF a.state = 2 AND NOT EXISTS (SELECT FROM effect_action h WHERE h.key <> p_key AND h.resource = p_resource"
        " AND h.state = 1) THEN\n        v.verdict := 'uncertain'",
        _on_postgres("uncertain_is_judged_before_contended"),
    ),
    Mutation(
        "contended judged before uncertain, in a batch",
        "G2",
        EFFECTS,
        "WHEN a.state = 2 THEN 'uncertain'",
        "WHEN a.state = 2 AND NOT coalesce(effect_is_held(h, r), false) THEN 'uncertain'",
        _on_postgres("acquire_many_agrees_with_acquire"),
    ),
    Mutation(
        "contended judged before uncertain, in memory",
        "G2",
        MEMORY,
        "uncertain_at=datetime() as since):",
        "uncertain_at=datetime() as since) if rival is None:",
        _in_memory("uncertain_is_judged_before_contended"),
    ),
    Mutation(
        "an expired intent is free again",
        "G3",
        EFFECTS,
        "SET state = 2, expired = true, reason = 'lease expired', uncertain_at = p_now",
        "SET state = 0, expired = true, reason = 'lease expired', uncertain_at = p_now",
        _on_postgres("expired_intent_becomes_uncertain"),
    ),
    Mutation(
        "an expired intent is free again, in memory",
        "G3",
        MEMORY,
        'flipped = _uncertain(entry, now, "expired", by="store", why="lease expired")',
        "flipped = replace(entry, state=State.FREE)",
        _in_memory("expired_intent_becomes_uncertain"),
    ),
    Mutation(
        "in flight for other holders only after the release",
        "G4",
        EFFECTS,
        "ELSIF a.state = 1 AND a.holder = p_holder AND a.resource = p_resource THEN",
        "ELSIF a.state = 1 AND a.resource = p_resource AND NOT a.released THEN",
        _on_postgres("in_flight_refuses_a_new_holder"),
    ),
    Mutation(
        "contended is not judged again after the wait",
        "G7",
        EFFECTS,
        "ON CONFLICT DO NOTHING RETURNING fence INTO v.fence",
        "ON CONFLICT (resource) DO UPDATE SET action_key = excluded.action_key, fence = effect_resource.fence + 1,"
        " granted_fence = effect_resource.fence + 1 RETURNING fence INTO v.fence",
        _interleaved("two_keys_on_one_resource_are_granted_once[new-alone-COMMIT]"),
    ),
    Mutation(
        "fence not compared with the one seen",
        "G7",
        EFFECTS,
        "WHERE resource = p_resource AND fence = v_fence AND granted_fence = v_granted FOR UPDATE",
        "WHERE resource = p_resource FOR UPDATE",
        _interleaved("two_keys_on_one_resource_are_granted_once[done-alone-COMMIT]"),
    ),
    Mutation(
        "a batch judges before it has the lock",
        "G7",
        EFFECTS,
        "  ORDER BY resource FOR UPDATE;",
        "  ORDER BY resource;",
        _pair("due", "take_over", "acquire_many"),
    ),
    Mutation(
        "row count of a grant not read",
        "G7",
        EFFECTS,
        "CONTINUE WHEN NOT FOUND;\n      UPDATE effect_resource",
        "UPDATE effect_resource",
        _pair("due", "move", "acquire"),
    ),
    Mutation(
        "isolation of an effect left to the database's default",
        "G13",
        CONNECTION,
        "psycopg.IsolationLevel.READ_COMMITTED",
        "None",
        (
            "tests/contract/test_effects_postgres.py::TestPostgresEffectStoreOnSerializable::test_renewed_within_its_transaction",
        ),
    ),
    Mutation(
        "a fence granted twice",
        "G8",
        EFFECTS,
        "v.fence := v_fence + 1;",
        "v.fence := v_fence;",
        _on_postgres("takeover_of_an_expired_lease", "fences_only_rise"),
    ),
    Mutation(
        "fingerprint not compared",
        "G9",
        EFFECTS,
        "IF a.fingerprint <> p_fingerprint THEN\n        v.verdict",
        "IF false THEN\n        v.verdict",
        _on_postgres("the_result_is_not_shown"),
    ),
    Mutation(
        "attempt not counted",
        "G22",
        EFFECTS,
        "state = 1, attempt = v.attempt + 1,",
        "state = 1, attempt = v.attempt,",
        _on_postgres("attempts_are_counted"),
    ),
    # Locks and clocks
    Mutation(
        "clock read before the lock, in renew",
        "G23",
        EFFECTS,
        "  SELECT * INTO r FROM effect_resource WHERE resource = p_resource FOR UPDATE;\n"
        "  SELECT * INTO a FROM effect_action WHERE key = p_key FOR UPDATE;\n"
        "  t := coalesce(p_now, clock_timestamp());\n",
        "  t := coalesce(p_now, clock_timestamp());\n"
        "  SELECT * INTO r FROM effect_resource WHERE resource = p_resource FOR UPDATE;\n"
        "  SELECT * INTO a FROM effect_action WHERE key = p_key FOR UPDATE;\n",
        _interleaved("a_lease_that_ends_during_the_wait_has_ended"),
    ),
    Mutation(
        "clock read before the lock, in a batch",
        "G23",
        EFFECTS,
        "  ORDER BY key FOR UPDATE;\n    t := coalesce(p_now, clock_timestamp());",
        "  ORDER BY key FOR UPDATE;",
        _interleaved("a_resource_whose_lease_ends_during_the_wait_is_taken_over"),
    ),
    Mutation(
        "clock read before the wait of an insert",
        "G23",
        EFFECTS,
        "IF p_now IS NULL AND clock_timestamp() > t + interval '10 milliseconds' THEN",
        "IF false THEN",
        _interleaved("a_lease_runs_from_after_the_wait"),
    ),
    Mutation(
        "now() for clock_timestamp()",
        "G23",
        EFFECTS,
        "AND t < a.expires_at THEN\n    UPDATE effect_action SET state = 0",
        "AND coalesce(p_now, now()) < a.expires_at THEN\n    UPDATE effect_action SET state = 0",
        _interleaved("a_lease_that_ends_during_the_wait_has_ended"),
    ),
    Mutation(
        "live at the moment of expiry",
        "G23",
        EFFECTS,
        "ELSIF a.state = 1 AND t >= a.expires_at THEN",
        "ELSIF a.state = 1 AND t > a.expires_at THEN",
        _on_postgres("expired_intent_becomes_uncertain"),
    ),
    Mutation(
        "complete locks nothing",
        "G16",
        EFFECTS,
        "    SELECT * INTO r FROM effect_resource WHERE resource = p_resource FOR UPDATE;\n"
        "    SELECT * INTO a FROM effect_action WHERE key = p_key FOR UPDATE;",
        "    SELECT * INTO r FROM effect_resource WHERE resource = p_resource;\n"
        "    SELECT * INTO a FROM effect_action WHERE key = p_key;",
        _pair("flipped", "resolve_not_applied", "complete"),
    ),
    Mutation(
        "begin_reconcile locks nothing",
        "G18",
        EFFECTS,
        "WHERE resource = a.resource FOR UPDATE;\n"
        "  SELECT * INTO a FROM effect_action WHERE key = p_key AND resource = r.resource FOR UPDATE;",
        "WHERE resource = a.resource;\n"
        "  SELECT * INTO a FROM effect_action WHERE key = p_key AND resource = r.resource;",
        _pair("marked", "begin_reconcile", "begin_reconcile"),
    ),
    Mutation(
        "complete_many locks in any order",
        "G7",
        EFFECTS,
        "PERFORM FROM effect_action WHERE key = ANY (p_keys) ORDER BY key FOR UPDATE;",
        "PERFORM FROM effect_action WHERE key = ANY (p_keys) FOR UPDATE;",
        _interleaved("rows_are_locked_in_the_order_of_their_names"),
    ),
    Mutation(
        "acquire_many locks resources in any order",
        "G7",
        EFFECTS,
        "  ORDER BY resource FOR UPDATE;",
        "  FOR UPDATE;",
        _interleaved("rows_are_locked_in_the_order_of_their_names"),
    ),
    Mutation(
        "acquire_many locks keys in any order",
        "G7",
        EFFECTS,
        "  ORDER BY key FOR UPDATE;",
        "  FOR UPDATE;",
        _interleaved("rows_are_locked_in_the_order_of_their_names"),
    ),
    Mutation(
        "acquire locks keys in any order",
        "G7",
        EFFECTS,
        "v_rival) ORDER BY key FOR UPDATE;",
        "v_rival) FOR UPDATE;",
        _interleaved("rows_are_locked_in_the_order_of_their_names"),
    ),
    Mutation(
        "raise_fences locks resources in any order",
        "G7",
        EFFECTS,
        "PERFORM FROM effect_resource ORDER BY resource FOR UPDATE;",
        "PERFORM FROM effect_resource FOR UPDATE;",
        _interleaved("rows_are_locked_in_the_order_of_their_names"),
    ),
    # Credentials
    Mutation(
        "complete checks the resource only",
        "G11",
        EFFECTS,
        "AND NOT released AND fence = p_fence AND holder = p_holder\n      AND resource = p_resource",
        "AND NOT released\n      AND resource = p_resource",
        _on_postgres("wrong_lease"),
    ),
    Mutation(
        "holder not compared",
        "G11",
        EFFECTS,
        "IS DISTINCT FROM p_fence THEN 'fence_stale'\n"
        "  WHEN (a.fence, a.holder, a.resource) IS DISTINCT FROM (p_fence, p_holder, p_resource)",
        "IS DISTINCT FROM p_fence THEN 'fence_stale'\n"
        "  WHEN (a.fence, a.resource) IS DISTINCT FROM (p_fence, p_resource)",
        _on_postgres("wrong_lease"),
    ),
    Mutation(
        "fence of the resource not compared, in memory",
        "G11",
        MEMORY,
        "if lease.fence != seen:",
        "if lease.fence > seen:",
        _in_memory("refused_in_state"),
    ),
    Mutation(
        "complete overwrites the first result",
        "G12",
        EFFECTS,
        "WHERE key = p_key AND state = 1 AND NOT released AND fence = p_fence",
        "WHERE key = p_key AND state IN (1, 3) AND NOT released AND fence = p_fence",
        _on_postgres("complete_many_returns_the_first_results", "completions_of_one_attempt"),
    ),
    Mutation(
        "row count of complete_many not read",
        "G12",
        EFFECTS,
        "CASE WHEN c.key IS NULL THEN 'again' ELSE 'completed' END",
        "'completed'::text",
        _on_postgres("complete_many_returns_the_first_results"),
    ),
    Mutation(
        "a second attempt's data commits although the key is done",
        "G12",
        EFFECTS,
        "p_result, p_now);\n  IF v.verdict <> 'completed' THEN",
        "p_result, p_now);\n  IF v.verdict NOT IN ('completed', 'done') THEN",
        _interleaved("a_rival_before_an_expired_database_effect[resolve_applied-COMMIT]"),
    ),
    Mutation(
        "renew revives an expired lease",
        "G13",
        EFFECTS,
        "AND a.state = 1 AND t < a.expires_at THEN\n    UPDATE effect_action SET expires_at",
        "AND a.state = 1 THEN\n    UPDATE effect_action SET expires_at",
        _on_postgres("refused_in_state"),
    ),
    Mutation(
        "a mark frees the resource",
        "G14",
        EFFECTS,
        "SET state = 2, reason = p_reason,",
        "SET state = 2, released = true, reason = p_reason,",
        _on_postgres("mark_keeps_the_resource_until_release"),
    ),
    Mutation(
        "a mark in two commits",
        "G14",
        STORE,
        'self._settle(action, lease, "mark_uncertain", reason, valid_text(by, "by"), self._clock.now())',
        'self._settle(action, lease, "mark_uncertain", reason, "", self._clock.now())\n'
        '        self._settle(action, lease, "mark_uncertain", reason, valid_text(by, "by"), self._clock.now())',
        _only_postgres("one_statement_in_one_transaction[mark_uncertain]"),
    ),
    Mutation(
        "a mark without history",
        "G21",
        EFFECTS,
        "VALUES (p_key, t, 'marked', p_fence, p_by, p_reason);",
        "SELECT p_key, t, 'marked', p_fence, p_by, p_reason WHERE false;",
        _on_postgres("mark_is_recorded"),
    ),
    Mutation(
        "release clears the intent",
        "G15",
        EFFECTS,
        "SET released = true\n",
        "SET released = true, state = 0\n",
        _on_postgres("release_and_abandon_differ"),
    ),
    Mutation(
        "a marked attempt completes late",
        "G16",
        EFFECTS,
        "(a.state = 1 OR a.state = 2 AND a.expired)",
        "(a.state IN (1, 2))",
        _on_postgres("refused_completion_is_evidence"),
    ),
    Mutation(
        "evidence not kept",
        "G17",
        EFFECTS,
        "IF a.key IS NOT NULL AND v.verdict <> 'fingerprint_mismatch' THEN",
        "IF false THEN",
        _on_postgres("refused_completion_is_evidence"),
    ),
    # Reconciliation
    Mutation(
        "a claim taken by two",
        "G18",
        EFFECTS,
        "IF a.reconcile_fence IS NOT NULL AND t < a.reconcile_expires_at THEN",
        "IF a.reconcile_fence IS NOT NULL AND t < a.reconcile_expires_at AND a.reconciler = p_holder THEN",
        _on_postgres("one_reconciler_at_a_time"),
    ),
    Mutation(
        "the sweep claims what another has claimed",
        "G18",
        EFFECTS,
        "WHERE uncertain_at IS NOT NULL AND NOT parked AND coalesce(reconcile_expires_at, uncertain_at) <= t",
        "WHERE uncertain_at IS NOT NULL AND NOT parked",
        _on_postgres("a_claim_from_the_backlog_is_a_claim"),
    ),
    Mutation(
        "the sweep claims what is parked",
        "G18",
        EFFECTS,
        "WHERE uncertain_at IS NOT NULL AND NOT parked AND coalesce",
        "WHERE uncertain_at IS NOT NULL AND coalesce",
        _on_postgres("parked_keys_wait_for_a_person"),
    ),
    Mutation(
        "a batch of claims mints one seal for two keys of a resource",
        "G27",
        EFFECTS,
        "ELSE fence + row_number() OVER (PARTITION BY resource, spared ORDER BY since, key) END AS seal",
        "ELSE fence + 1 END AS seal",
        _on_postgres("the_fence_of_a_claim_from_the_backlog"),
    ),
    Mutation(
        "a batch of claims disturbs a live holder",
        "G27",
        EFFECTS,
        "AND r.granted_fence > v_floor AS spared",
        "AND false AS spared",
        _on_postgres("a_batch_does_not_disturb_a_live_holder"),
    ),
    Mutation(
        "a claim that has passed to another puts the key off",
        "G18",
        EFFECTS,
        "ELSIF a.reconciler IS DISTINCT FROM p_claim THEN",
        "ELSIF false THEN",
        _on_postgres("a_claim_that_ended"),
    ),
    Mutation(
        "what was put off is looked at all the same",
        "G18",
        EFFECTS,
        "ELSIF NOT p_early AND (a.parked OR",
        "ELSIF NOT p_early AND a.parked AND (a.parked OR",
        _on_postgres("nobody_looks_before_the_time"),
    ),
    Mutation(
        "parking is not in the history",
        "G21",
        EFFECTS,
        "IF FOUND AND p_for IS NULL THEN",
        "IF FOUND AND false THEN",
        _on_postgres("parked_keys_wait_for_a_person"),
    ),
    Mutation(
        "an attempt that was seen to run gives its lease to its successor",
        "G13",
        EFFECTS,
        "AND a.fence = u.fence AND a.state = 1 AND t < a.expires_at\n          AND (NOT a.released",
        "AND a.state = 1 AND t < a.expires_at\n          AND (NOT a.released",
        _on_postgres("another_attempt_is_not_renewed"),
    ),
    Mutation(
        "a claim forbids the late completion",
        "G16",
        EFFECTS,
        "UPDATE effect_resource SET fence = v.fence WHERE resource = r.resource",
        "UPDATE effect_resource SET fence = v.fence, granted_fence = v.fence WHERE resource = r.resource",
        _on_postgres("a_reconciler_does_not_forbid_it"),
    ),
    Mutation(
        "a claim seals a live holder off",
        "G27",
        EFFECTS,
        "IF coalesce(effect_is_held(h, r) AND t < h.expires_at, false)",
        "IF false",
        _on_postgres("claim_does_not_disturb_a_live_holder"),
    ),
    Mutation(
        "the second ruling wins",
        "G19",
        EFFECTS,
        "  IF a.state = 3 THEN\n    v.verdict := 'applied'; v.value := a.result;",
        "  IF a.state = 3 THEN\n    UPDATE effect_action SET result = p_result WHERE key = p_key;\n"
        "    v.verdict := 'applied'; v.value := p_result;",
        _on_postgres("first_ruling_wins", "completion_counts_as_a_ruling"),
    ),
    Mutation(
        "an UNSAFE key freed without force",
        "G20",
        EFFECTS,
        "ELSIF NOT a.retry_safe AND NOT p_force THEN",
        "ELSIF false THEN",
        _on_postgres("unsafe_is_not_freed"),
    ),
    Mutation(
        "an UNSAFE key freed without force, in memory",
        "G20",
        MEMORY,
        "not resolution.applied and not resolution.force_retryable and",
        "not resolution.applied and resolution.force_retryable and",
        _in_memory("unsafe_is_not_freed"),
    ),
    # Upkeep
    Mutation(
        "retention lowers a fence",
        "G8",
        EFFECTS,
        "DELETE FROM effect_history WHERE key = ANY (v_keys);",
        "DELETE FROM effect_history WHERE key = ANY (v_keys);\n"
        "  DELETE FROM effect_resource WHERE action_key = ANY (v_keys);",
        _on_postgres("fences_go_on_rising"),
    ),
    Mutation(
        "retention removes what was done just now",
        "G25",
        EFFECTS,
        "AND state = 3 AND completed_at < v_before",
        "AND state = 3",
        _on_postgres("the_horizon", "the_later_of_grant_and_completion_counts"),
    ),
    Mutation(
        "raised fences leave intents in flight",
        "G28",
        EFFECTS,
        "reason = 'fences raised', uncertain_at = t WHERE state = 1\n",
        "reason = 'fences raised', uncertain_at = t WHERE state = 1 AND fence > p_floor\n",
        _on_postgres("intents_become_uncertain"),
    ),
    Mutation(
        "raised fences do not hold for new resources",
        "G28",
        EFFECTS,
        "UPDATE effect_store SET fence_floor = p_floor WHERE fence_floor < p_floor;",
        "",
        _on_postgres("later_grants_are_above_the_floor"),
    ),
    # Sinks
    Mutation(
        "`<=` for `<` in the sink in memory",
        "G31",
        "pgref/memory/sinks.py",
        "if fence < seen:",
        "if fence <= seen:",
        _sink("Memory", "equal_fence_passes"),
    ),
    Mutation(
        "the first fence stands in the sink",
        "G31",
        SINKS,
        "DO UPDATE SET fence = excluded.fence WHERE s.fence <= excluded.fence",
        "DO NOTHING",
        _sink("Postgres", "higher_fence_raises_seen"),
    ),
    Mutation(
        "fence and data of a sink in two commits",
        "G32",
        "pgref/postgres/sinks.py",
        "            self._admit(connection, resource, fence)\n",
        "            with self._database.transaction() as other:\n"
        "                self._admit(other, resource, fence)\n",
        _sink("Postgres", "failed_write", "failed_first_write"),
    ),
    Mutation(
        "`<=` for `<` in the sink's script",
        "G31",
        LUA,
        "if lower(fence, seen) then",
        "if not lower(seen, fence) then",
        _sink("Redis", "equal_fence_passes"),
    ),
    Mutation(
        "the sink's script compares texts",
        "G30",
        LUA,
        "if #one ~= #other then",
        "if false then",
        ("tests/contract/test_sinks_redis.py::test_neighbours_differ",),
    ),
    Mutation(
        "the sink's script does not undo",
        "G32",
        LUA,
        "pcall(undo, seen)",
        "true",
        ("tests/contract/test_sinks_redis.py::test_a_refused_command_undoes_all",),
    ),
    # Connections and rights
    Mutation(
        "a lost answer is not asked for again",
        "G26",
        CONNECTION,
        "failure not in {Failure.AMBIGUOUS, Failure.REPEAT}",
        "failure is not Failure.REPEAT",
        ("tests/faults/test_wires.py::test_a_wire_cut_at_any_message[complete]",),
    ),
    Mutation(
        "an ambiguous failure taken for a definite one",
        "G26",
        "pgref/postgres/_errors.py",
        '"57P": Failure.AMBIGUOUS',
        '"57P": Failure.UNAVAILABLE',
        ("tests/unit/test_error_table.py::test_a_connection_that_went_is_ambiguous",),
    ),
    Mutation(
        "a connection given back in the middle of something",
        "G26",
        CONNECTION,
        "if not _is_idle(self.connection):\n            self._fairy.invalidate()",
        "if self.connection.closed:\n            self._fairy.invalidate()",
        ("tests/faults/test_processes.py::test_a_connection_in_the_middle_of_something_leaves_the_pool",),
    ),
    Mutation(
        "signals not held off from a loan",
        "G26",
        CONNECTION,
        "mask = hold()\n        try:\n            loan = ",
        "mask = None\n        try:\n            loan = ",
        ("tests/faults/test_signals.py::test_a_signal_while_a_connection_changes_hands",),
    ),
    Mutation(
        "signals not held off from a return",
        "G26",
        CONNECTION,
        "mask = hold()\n        finally:",
        "mask = None\n        finally:",
        ("tests/faults/test_signals.py::test_a_signal_while_a_connection_changes_hands",),
    ),
    Mutation(
        "signals not held off",
        "G26",
        "pgref/signals.py",
        "pthread_sigmask(signal.SIG_BLOCK, _HELD)",
        "pthread_sigmask(signal.SIG_BLOCK, ())",
        ("tests/unit/test_leases.py",),
    ),
    Mutation(
        "SECURITY DEFINER dropped",
        "G70",
        EFFECTS,
        "p_fence bigint, p_holder uuid\n) RETURNS effect_answer\nLANGUAGE plpgsql SECURITY DEFINER",
        "p_fence bigint, p_holder uuid\n) RETURNS effect_answer\nLANGUAGE plpgsql",
        _privileges("only_helpers_are_out_of_the_applications_reach"),
    ),
    Mutation(
        "search_path left to the session",
        "G70",
        SINKS,
        "LANGUAGE plpgsql SECURITY DEFINER SET search_path FROM CURRENT",
        "LANGUAGE plpgsql SECURITY DEFINER",
        _privileges("every_function_of_the_contract_pins_its_search_path"),
    ),
    Mutation(
        "EXECUTE left to PUBLIC",
        "G70",
        "pgref/postgres/migrations/env.py",
        'context.execute(f"REVOKE ALL ON ALL FUNCTIONS IN SCHEMA {quoted} FROM PUBLIC")',
        "pass",
        _privileges("nobody_else_may_call_a_function"),
    ),
    # Celery
    Mutation(
        "an exit of the process is not marked",
        "G14",
        EXECUTION,
        "(writes.connection, call.action, lease, text)\n        except BaseException as error:",
        "(writes.connection, call.action, lease, text)\n        except Exception as error:",
        _direct("an_exit_is_recorded_at_once"),
    ),
    Mutation(
        "an exit of the process is not withdrawn",
        "G15",
        EXECUTION,
        "return value\n        except BaseException as error:",
        "return value\n        except Exception as error:",
        _direct("an_exit_is_recorded_at_once"),
    ),
    Mutation(
        "an ambiguous error frees the key",
        "G14",
        EXECUTION,
        "if not completing and _did_not_happen(error, effect, call):",
        "if not completing:",
        _direct("a_probe_that_looked_too_slowly_frees_no_later_attempt"),
    ),
    Mutation(
        "a refused completion is swallowed",
        "G12",
        EXECUTION,
        "if completing and isinstance(error, (Refused, Unavailable, OutcomeUnknown)):\n"
        "                raise Interrupted(str(error)) from error",
        "if completing and isinstance(error, (Refused, Unavailable, OutcomeUnknown)):\n                return value",
        _direct("a_completion_that_fails_is_no_success"),
    ),
    Mutation(
        "a refused completion after a sink is swallowed",
        "G12",
        EXECUTION,
        "except (Refused, Unavailable, OutcomeUnknown) as error:\n            raise Interrupted(str(error)) from error",
        "except (Refused, Unavailable, OutcomeUnknown):\n            return value",
        _direct("a_completion_that_fails_is_no_success"),
    ),
    Mutation(
        "an ambiguous error of a sink frees the key",
        "G14",
        EXECUTION,
        "if not sending or definite or",
        "if not sending or not definite or",
        ("tests/celery/test_ways.py::test_a_sink_whose_answer_is_lost_is_sealed_and_probed",),
    ),
    Mutation(
        "a retry after something went out frees the key",
        "G14",
        EXECUTION,
        "return not effect.started",
        "return True",
        _direct("a_retry_after_something_went_out_is_uncertain"),
    ),
    Mutation(
        "a probe's no frees whatever is uncertain by then",
        "G18",
        RECONCILE,
        "return gate.effects.resolve_uncertain(action, ruling, claim=claim)",
        "return gate.effects.resolve_uncertain(action, ruling)",
        _direct("a_probe_that_looked_too_slowly_frees_no_later_attempt"),
    ),
    Mutation(
        "a provider is asked before it has settled",
        "G20",
        RECONCILE,
        "if unsettled > 0:",
        "if unsettled > 10**9:",
        ("tests/backlog/test_sweep.py::test_a_provider_is_given_its_time",),
    ),
    Mutation(
        "what was attempted too often is asked about, and runs",
        "G22",
        RECONCILE,
        "if record.reason == NEEDS_A_PERSON:",
        "if record.reason == record.key:",
        ("tests/unit/test_plan.py::test_what_was_attempted_too_often_is_parked",),
    ),
    Mutation(
        "a lease is renewed though another message's attempt runs",
        "G13",
        "celery_integration/running.py",
        'return record.fence if json.loads(record.payload)["options"].get("task_id") == task_id else None',
        "return record.fence",
        ("tests/backlog/test_sweep.py::test_exactly_what_is_reported_is_renewed",),
    ),
    Mutation(
        "a person frees what is not safe to run again",
        "G20",
        "celery_integration/cli/operate.py",
        "if not (ruling.applied or ruling.force_retryable) and _is_unsafe(record):",
        "if False:",
        ("tests/backlog/test_cli.py::test_what_is_not_safe_needs_force",),
    ),
)
