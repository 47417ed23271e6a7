"""Sizes of the generated tests: `quick` by default, `thorough` and `hunt` by ``--hypothesis-profile``."""

from hypothesis import HealthCheck, Phase, settings

settings.register_profile(
    "quick",
    max_examples=60,
    stateful_step_count=40,
    deadline=None,
    print_blob=True,
    phases=[phase for phase in Phase if phase is not Phase.explain],
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.large_base_example],
)
settings.register_profile("thorough", settings.get_profile("quick"), max_examples=500, stateful_step_count=50)
# Says at once that there is a difference, in a sequence that is not made short.
settings.register_profile(
    "hunt", settings.get_profile("thorough"), phases=[Phase.explicit, Phase.generate], database=None
)
settings.load_profile("quick")
