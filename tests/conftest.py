pytest_plugins = [
    "tests.plugins.hypothesis_profiles",
    "tests.plugins.pgbouncer",
    "tests.plugins.servers",
    "tests.plugins.workers",
]
