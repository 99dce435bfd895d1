"""How much the tests try: a bare ``pytest`` a part, ``pytest --hypothesis-profile thorough`` (``.ci/run``) all."""

from hypothesis import HealthCheck, settings

#: Examples of a property in a thorough run, as tests/conftest.py says.
THOROUGH = 100


def share(count: int) -> int:
    """``count`` in a thorough run; otherwise its part in proportion to the profile's examples, rounded up."""
    return -(-count * settings.default.max_examples // THOROUGH)


def with_fixtures(examples: int) -> settings:
    """Of a property whose test has fixtures, which all examples share: ``examples`` of them."""
    return settings(
        max_examples=examples,
        suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    )
