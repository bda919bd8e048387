"""What is behind the options, fixtures and markers of :mod:`npusim.pytest_plugin`."""
