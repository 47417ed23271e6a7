pytest_plugins = ["tests.plugins.servers", "tests.plugins.workers"]
