"""Whether a request's header and body fit the model: checked before a byte of it is placed. Pure."""

from __future__ import annotations

from mxpool.errors import BatchTooLarge, InvalidRequest, InvalidTensor
from mxpool.tensors import Signature, TensorSpec
from mxpool.wire import Request, decode_tensors

KNOWN_MAX = 1024  # tensor descriptions kept as checked; more (hostile or odd) row counts just cost a parse


class Admission:
    """Checks requests for one model. A ``tensors`` description that was found good is remembered by its bytes."""

    def __init__(self, model: str, signature: Signature) -> None:
        self._model = model
        self._signature = signature
        self.row_bytes = sum(spec.row_bytes for spec in signature.inputs)
        self._known: dict[bytes, int] = {}

    def check(self, request: Request, body_bytes: int) -> None:
        """Accept an INFER header with a body of ``body_bytes`` bytes.

        Raises:
            BatchTooLarge, InvalidTensor, InvalidRequest, MalformedMessage: naming the value and the limit.
        """
        rows = self._known.get(request.tensors)
        if rows is None:
            rows = self._learn(request.tensors)
        if request.rows != rows:
            raise InvalidRequest(reason=f"rows is {request.rows}, the tensors have {rows}")
        if body_bytes != rows * self.row_bytes:
            raise InvalidTensor(
                tensor="body", reason="wrong size", got=f"{body_bytes} bytes", expected=f"{rows * self.row_bytes} bytes"
            )

    def _learn(self, description: bytes) -> int:
        tensors = decode_tensors(description)
        wanted = self._signature.inputs
        if [name for name, _, _ in tensors] != [spec.name for spec in wanted]:
            raise InvalidTensor(
                tensor="*",
                reason="the model's inputs are others, or in another order",
                got=", ".join(name[:64] for name, _, _ in tensors[:16]),
                expected=", ".join(spec.name for spec in wanted),
            )
        rows = self._rows(tensors[0][2])
        for (_, datatype, shape), spec in zip(tensors, wanted, strict=True):
            self._check_tensor(spec, datatype, shape, rows)
        if len(self._known) >= KNOWN_MAX:
            self._known.clear()
        self._known[description] = rows
        return rows

    def _rows(self, shape: tuple[int, ...]) -> int:
        if not self._signature.batched:
            return 1
        rows = shape[0] if shape else 0
        if rows > self._signature.max_batch_size:
            raise BatchTooLarge(rows=rows, limit=self._signature.max_batch_size, model=self._model)
        if rows < 1:
            raise InvalidRequest(reason="a request needs at least one row")
        return rows

    def _check_tensor(self, spec: TensorSpec, datatype: str, shape: tuple[int, ...], rows: int) -> None:
        if datatype != spec.datatype:
            raise InvalidTensor(tensor=spec.name, reason="wrong datatype", got=datatype[:64], expected=spec.datatype)
        expected = self._signature.shape(spec, rows)
        if shape != expected:
            raise InvalidTensor(tensor=spec.name, reason="wrong shape", got=list(shape), expected=list(expected))
