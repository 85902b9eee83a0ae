from __future__ import annotations

import json

from fake_client import FakeClient, mxpool


def test_slots_are_shown_for_the_model_asked_for() -> None:
    slot = {"slot": 3, "state": "running", "generation": 9, "requests": 2, "rows": 77, "worker": "r-0", "held_us": 5}
    client = FakeClient(replies={"slots": {"slots": [slot]}})
    ran = mxpool(client, "slots", "ranking")
    assert client.verbs == [("slots", "ranking")]
    assert all(word in ran.stdout for word in ("running", "77", "r-0"))
    assert json.loads(mxpool(client, "slots", "ranking", "--json").stdout) == {"slots": [slot]}


def test_a_refused_question_exits_with_4_and_closes_the_client() -> None:
    client = FakeClient()
    ran = mxpool(client, "slots", "other")
    assert (ran.exit_code, client.closed) == (4, 1)
    assert ran.stderr == "unknown_model: no model named 'other' is served here; there are: ranking\n"
