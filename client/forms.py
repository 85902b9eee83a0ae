"""What the client knows of each model's signature: asked for once, and again when it may have changed."""

from __future__ import annotations

from mxpool.client.arrays import RequestForm
from mxpool.client.exchange import Exchange
from mxpool.clock import now_us
from mxpool.errors import ModelUnavailable
from mxpool.tensors import Signature

LOADING_PAUSE_US = 50_000


class Forms:
    """Request forms by model, of one broker. May be shared between threads: at worst two of them ask."""

    def __init__(self) -> None:
        self._forms: dict[str, RequestForm] = {}

    def of(self, exchange: Exchange, model: str, deadline_us: int) -> RequestForm:
        """The form for ``model``; a model that is loading is waited for.

        Raises:
            UnknownModel, ModelUnavailable: as the broker says.
            MxPoolError: if there is no answer.
        """
        return self._forms.get(model) or self._ask(exchange, model, deadline_us)

    def changed(self, exchange: Exchange, form: RequestForm, deadline_us: int) -> RequestForm | None:
        """Ask anew: the form by which arrays may fit that did not fit ``form``; None if the model is the same."""
        renewed = self._ask(exchange, form.model, deadline_us)
        return renewed if renewed.signature != form.signature else None

    def forget(self, model: str) -> None:
        """Ask again the next time."""
        self._forms.pop(model, None)

    def clear(self) -> None:
        """Forget everything: another broker may serve other models."""
        self._forms.clear()

    def _ask(self, exchange: Exchange, model: str, deadline_us: int) -> RequestForm:
        while True:
            started_us = now_us()
            ticket = exchange.ask("metadata", model, max(deadline_us - started_us, 0), {})
            try:
                fields = exchange.complete(ticket)
            except ModelUnavailable as error:
                again_us = started_us + LOADING_PAUSE_US
                if error.fields.get("reason") != "loading" or again_us >= deadline_us:
                    raise
                exchange.rest(again_us)
                continue
            form = RequestForm(model, Signature.from_wire(fields), exchange.connection.message_bytes_max)
            self._forms[model] = form
            return form
