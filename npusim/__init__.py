"""npusim: a simulated Ascend NPU for tests."""

__version__ = "0.1.0"
