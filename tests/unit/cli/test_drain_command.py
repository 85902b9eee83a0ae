from __future__ import annotations

import pytest
from fake_client import FakeClient, mxpool


@pytest.mark.parametrize(
    ("args", "asked", "said"), [((), "", "the broker is draining"), (("m",), "m", "m is draining")]
)
def test_drain_asks_for_a_model_or_for_all(args: tuple[str, ...], asked: str, said: str) -> None:
    client = FakeClient(replies={"drain": {"draining": True}})
    ran = mxpool(client, "drain", *args)
    assert (ran.exit_code, ran.stdout, client.verbs) == (0, f"{said}\n", [("drain", asked)])
