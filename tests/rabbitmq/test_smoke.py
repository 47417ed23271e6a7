"""Smoke tests, over RabbitMQ with quorum queues and native delayed delivery."""

from tests.smoke.test_effects import (  # noqa: F401
    test_a_child_killed_in_the_body,
    test_a_cold_shutdown_in_the_body,
    test_a_replay_lets_the_chain_go_on,
    test_a_warm_shutdown_lets_the_body_end,
    test_a_worker_killed_in_the_body,
    test_ten_calls_at_once_are_one_effect,
    test_ten_copies_of_one_message_are_one_effect,
    test_the_setup_is_pytest_celerys_own,
)
