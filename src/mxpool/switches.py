"""Three environment variables that override every model's table: the way back when a feature misbehaves.

======================  ==============================================  ==============================================
variable                0                                               1
======================  ==============================================  ==============================================
MX_MACA_GRAPH           ``graph`` is off for every model                 off becomes prefer; prefer and require stay
MX_SHARED_QUEUE         ``queue`` is per_worker                          ``queue`` is shared
MX_FIXED_INPUT_BUFFERS  arrays are made anew for each batch, no graphs   input memory is fixed
======================  ==============================================  ==============================================

Unset, the file's value holds. Where they meet, MX_FIXED_INPUT_BUFFERS=0 wins: a graph needs fixed addresses.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mxpool.config import Config, ModelConfig
from mxpool.errors import ConfigInvalid

GRAPH, SHARED_QUEUE, FIXED_INPUTS = "MX_MACA_GRAPH", "MX_SHARED_QUEUE", "MX_FIXED_INPUT_BUFFERS"


def _switch(environ: Mapping[str, str], name: str) -> bool | None:
    value = environ.get(name)
    if value not in (None, "0", "1"):
        raise ConfigInvalid(source="environment", key=name, reason=f"{value!r} is neither 0 nor 1")
    return None if value is None else value == "1"


def apply(config: Config, environ: Mapping[str, str]) -> Config:
    """``config`` with what the switches in ``environ`` change.

    Raises:
        ConfigInvalid: for a value that is neither 0 nor 1.
    """
    graph, shared, fixed = (_switch(environ, name) for name in (GRAPH, SHARED_QUEUE, FIXED_INPUTS))

    def switched(model: ModelConfig) -> ModelConfig:
        update: dict[str, Any] = {}
        if graph is not None and (not graph or model.graph == "off"):
            update["graph"] = "prefer" if graph else "off"
        if shared is not None:
            update["queue"] = "shared" if shared else "per_worker"
        if fixed is not None:
            update["fixed_input_buffers"] = fixed
        if not update.get("fixed_input_buffers", model.fixed_input_buffers):
            update["graph"] = "off"
        return model.model_copy(update=update)

    return config.model_copy(update={"models": {name: switched(model) for name, model in config.models.items()}})
