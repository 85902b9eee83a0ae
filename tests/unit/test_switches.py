from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mxpool import switches
from mxpool.config import Config, build
from mxpool.errors import ConfigInvalid

NAMES = (switches.GRAPH, switches.SHARED_QUEUE, switches.FIXED_INPUTS)


def config(**keys: Any) -> Config:
    """Two models, the first with ``keys``."""
    return build({"models": {"a": {"path": "a.onnx", **keys}, "b": {"path": "b.onnx"}}}, "mx.toml")


def test_without_variables_the_file_holds() -> None:
    given = config(graph="off", queue="per_worker", fixed_input_buffers=False)
    assert switches.apply(given, {"HOME": "/root"}).models["a"].queue == "per_worker"
    assert config(graph="require") == switches.apply(config(graph="require"), {})


@pytest.mark.parametrize("graph", ["off", "prefer", "require"])
def test_graph_switch_0_turns_graphs_off_in_every_model(graph: str) -> None:
    changed = switches.apply(config(graph=graph), {"MX_MACA_GRAPH": "0"})
    assert [model.graph for model in changed.models.values()] == ["off", "off"]


@pytest.mark.parametrize(("graph", "then"), [("off", "prefer"), ("prefer", "prefer"), ("require", "require")])
def test_graph_switch_1_turns_off_into_prefer_and_leaves_require(graph: str, then: str) -> None:
    assert switches.apply(config(graph=graph), {"MX_MACA_GRAPH": "1"}).models["a"].graph == then


@pytest.mark.parametrize(("value", "queue"), [("0", "per_worker"), ("1", "shared")])
@pytest.mark.parametrize("before", ["shared", "per_worker"])
def test_queue_switch_chooses_the_queue_of_every_model(value: str, queue: str, before: str) -> None:
    changed = switches.apply(config(queue=before), {"MX_SHARED_QUEUE": value})
    assert [model.queue for model in changed.models.values()] == [queue, queue]


@pytest.mark.parametrize("graph", ["off", "prefer", "require"])
def test_buffer_switch_0_makes_arrays_anew_and_turns_graphs_off_whatever_the_graph_switch_says(graph: str) -> None:
    changed = switches.apply(config(graph=graph), {"MX_FIXED_INPUT_BUFFERS": "0", "MX_MACA_GRAPH": "1"})
    assert [(model.fixed_input_buffers, model.graph) for model in changed.models.values()] == [(False, "off")] * 2


def test_buffer_switch_1_fixes_the_input_memory_again() -> None:
    changed = switches.apply(config(fixed_input_buffers=False), {"MX_FIXED_INPUT_BUFFERS": "1"})
    assert (changed.models["a"].fixed_input_buffers, changed.models["a"].graph) == (True, "prefer")


def test_graph_switch_1_gives_no_graph_to_a_model_whose_file_says_no_fixed_buffers() -> None:
    assert switches.apply(config(fixed_input_buffers=False), {"MX_MACA_GRAPH": "1"}).models["a"].graph == "off"


@given(name=st.sampled_from(NAMES), value=st.text().filter(lambda text: text not in "01" or not text))
def test_any_other_value_is_refused_by_the_name_of_the_variable(name: str, value: str) -> None:
    with pytest.raises(ConfigInvalid, match="is neither 0 nor 1") as caught:
        switches.apply(config(), {name: value})
    assert (caught.value.fields["source"], caught.value.fields["key"]) == ("environment", name)
