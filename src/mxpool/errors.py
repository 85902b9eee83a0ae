"""Every error of mxpool, in one tree.

An error crosses a process as ``(code, message, fields)``, never as a pickle. ``retryable`` says whether
the same request may succeed later without a change.

::

    MxPoolError
    ├── InvalidRequest             the request can never succeed as it is
    │   ├── MalformedMessage           bytes that no encoder of ours can have made
    │   ├── UnsupportedVersion
    │   ├── UnknownModel
    │   ├── InvalidTensor              name, datatype, shape or size is not the model's
    │   ├── BatchTooLarge
    │   ├── InvalidRegion              an arena reference that does not hold
    │   ├── UnknownVerb
    │   └── PermissionDenied
    ├── Rejected                   not accepted now; nothing was run
    │   ├── QueueFull
    │   ├── ModelUnavailable
    │   └── ShuttingDown
    ├── Unanswered                 accepted, but there is no result
    │   ├── DeadlineExceeded
    │   ├── Cancelled
    │   ├── RunFailed
    │   ├── WorkerDied
    │   └── BrokerLost
    ├── LoadFailed                 a model cannot be served
    │   ├── ModelInvalid
    │   ├── NotServable
    │   ├── ProviderUnavailable
    │   └── SharedMemoryShort
    ├── ConfigInvalid
    ├── EndpointInUse
    └── ClientUnusable             closed, or inherited over a fork
"""

from __future__ import annotations

from typing import Any, ClassVar


class MxPoolError(Exception):
    """Base of all errors of mxpool; ``fields`` holds the values that the text names."""

    code: ClassVar[str] = "error"
    retryable: ClassVar[bool] = False
    template: ClassVar[str] = "{reason}"

    def __init__(self, message: str | None = None, /, **fields: Any) -> None:
        """Make the text from ``template`` and ``fields`` unless ``message`` gives it."""
        super().__init__(self.template.format(**fields) if message is None else message)
        self.fields = fields

    @property
    def message(self) -> str:
        """The text alone."""
        return str(self.args[0])


class InvalidRequest(MxPoolError):
    """The request can never succeed as it is."""

    code = "invalid_request"


class MalformedMessage(InvalidRequest):
    """The bytes are not a message of this protocol."""

    code = "malformed"
    template = "malformed message: {reason}"


class UnsupportedVersion(InvalidRequest):
    """The peer speaks another version of the protocol."""

    code = "unsupported_version"
    template = "protocol version {version} is not supported (supported: {minimum} to {maximum})"


class UnknownModel(InvalidRequest):
    """No model of that name is served here."""

    code = "unknown_model"
    template = "no model named {model!r} is served here"


class InvalidTensor(InvalidRequest):
    """A tensor's name, datatype, shape or size is not what the model takes."""

    code = "invalid_tensor"
    template = "tensor {tensor!r}: {reason} (got {got}, expected {expected})"


class BatchTooLarge(InvalidRequest):
    """A request has more rows than the model's batch."""

    code = "batch_too_large"
    template = "{rows} rows are more than max_batch_size {limit} of model {model!r}"


class InvalidRegion(InvalidRequest):
    """An arena reference does not name memory that this client may use."""

    code = "invalid_region"
    template = "arena {field}: {reason}"


class UnknownVerb(InvalidRequest):
    """A control request names no known verb."""

    code = "unknown_verb"
    template = "unknown control verb {verb!r}"


class PermissionDenied(InvalidRequest):
    """The peer's user may not do that."""

    code = "permission_denied"
    template = "uid {uid} may not {action}"


class Rejected(MxPoolError):
    """The request was not accepted; nothing of it was run."""

    code = "rejected"
    retryable = True


class QueueFull(Rejected):
    """The model's queue already holds as much as it may."""

    code = "queue_full"
    template = "queue of {model!r} is full: {depth} of {limit} {unit}; retry after {retry_after_ms} ms"


class ModelUnavailable(Rejected):
    """The model has no worker that can run it, and the reason is known."""

    code = "unavailable"
    template = "model {model!r} is unavailable: {reason}"


class ShuttingDown(Rejected):
    """The broker or the model is draining and takes no new requests."""

    code = "shutting_down"
    template = "{what} is shutting down and takes no new requests"


class Unanswered(MxPoolError):
    """The request was accepted, but there is no result."""

    code = "unanswered"


class DeadlineExceeded(Unanswered):
    """The deadline passed before the answer came."""

    code = "deadline_exceeded"
    template = "no answer within {timeout_s:.3f} s"


class Cancelled(Unanswered):
    """The request was cancelled by its client."""

    code = "cancelled"
    template = "the request was cancelled"


class RunFailed(Unanswered):
    """The runtime refused or failed the batch that held the request."""

    code = "run_failed"
    template = "model {model!r} failed the batch: {reason}"


class WorkerDied(Unanswered):
    """Workers died twice while running the request."""

    code = "worker_died"
    retryable = True
    template = "worker {worker} of model {model!r} died while running the request"


class BrokerLost(Unanswered):
    """The broker went away; whether the request ran is not known."""

    code = "broker_lost"
    retryable = True
    template = "broker at {endpoint} is gone: {reason}"


class LoadFailed(MxPoolError):
    """A model cannot be served."""

    code = "load_failed"
    template = "model {model!r}: {reason}"


class ModelInvalid(LoadFailed):
    """The model file is missing, broken or of an unknown format."""

    code = "model_invalid"
    template = "model file {path}: {reason}"


class NotServable(LoadFailed):
    """The model is valid but has something that cannot be served; it is named."""

    code = "not_servable"
    template = "model file {path}: {what} {name!r} cannot be served: {reason}"


class ProviderUnavailable(LoadFailed):
    """The execution provider asked for is not there; never replaced by another silently."""

    code = "provider_unavailable"
    template = "{provider} was asked for, {actual} is there: {reason} (package: {package})"


class SharedMemoryShort(LoadFailed):
    """Shared memory has not enough room."""

    code = "shm_short"
    retryable = True
    template = (
        "slots need {needed_bytes} bytes of shared memory, /dev/shm has {free_bytes} free; "
        "lower slots or max_batch_size, or raise the container's --shm-size"
    )


class ConfigInvalid(MxPoolError):
    """A config, flag or environment variable is out of its range; says where and what is allowed."""

    code = "config_invalid"
    template = "{source}: {key}: {reason}"


class EndpointInUse(MxPoolError):
    """Another live broker, or something that is not a socket, holds the endpoint's path."""

    code = "endpoint_in_use"
    template = "{path}: {reason}"


class ClientUnusable(MxPoolError):
    """The client is closed, or was made before a fork."""

    code = "client_unusable"


def _tree(root: type[MxPoolError]) -> list[type[MxPoolError]]:
    return [root, *(found for child in root.__subclasses__() for found in _tree(child))]


BY_CODE: dict[str, type[MxPoolError]] = {error.code: error for error in _tree(MxPoolError)}


def from_wire(code: str, message: str, fields: dict[str, Any]) -> MxPoolError:
    """Build the error that a peer sent; an unknown code becomes a plain ``MxPoolError``."""
    error = BY_CODE.get(code, MxPoolError)(message)
    error.fields = fields if error.code == code else {"code": code, **fields}
    return error
