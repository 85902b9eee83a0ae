"""A scripted broker, and a client of it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from fake_broker import FakeBroker

from mxpool import Client


@pytest.fixture
def endpoint(tmp_path: Path) -> str:
    return f"ipc://{tmp_path}/b.sock"


@pytest.fixture
def broker(endpoint: str) -> Iterator[FakeBroker]:
    with FakeBroker(endpoint) as broker:
        yield broker


@pytest.fixture
def client(broker: FakeBroker) -> Iterator[Client]:
    with Client(broker.endpoint) as client:
        yield client
