"""Device tests can leave their figures in a file: pytest tests/device/... --figures FILE."""

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--figures", default=None, help="write the measured figures of device tests to this JSON file")
