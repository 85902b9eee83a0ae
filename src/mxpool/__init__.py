"""mxpool: a multi-process inference worker pool over shared memory."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mxpool.client.blocking import Client as Client

__version__ = "0.1.0"
__all__ = ["Client", "__version__"]


def __getattr__(name: str) -> Any:
    """Import ``Client`` on first use: brokers and workers never pay for the client's modules."""
    if name == "Client":
        from mxpool.client.blocking import Client  # noqa: PLC0415

        return Client
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
