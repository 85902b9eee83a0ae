from __future__ import annotations

import json
from typing import Any

from fake_client import FakeClient, mxpool

from mxpool.errors import ModelUnavailable


def test_models_are_listed_with_their_tensors() -> None:
    client = FakeClient()
    assert "x FP32[3]" in mxpool(client, "models").stdout
    about = json.loads(mxpool(client, "models", "--json").stdout)["ranking"]
    assert (about["max_batch_size"], about["inputs"]) == (8, [["x", "FP32", [3]]])


def test_a_model_that_still_loads_is_listed_with_the_reason() -> None:
    class Loading(FakeClient):
        def metadata(self, model: str) -> dict[str, Any]:
            raise ModelUnavailable(model=model, reason="still loading")

    ran = mxpool(Loading(), "models")
    assert (ran.exit_code, "still loading" in ran.stdout) == (0, True)
