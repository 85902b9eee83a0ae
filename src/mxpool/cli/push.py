"""``mxpool push``: every frame of files, images and folders through a model."""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from mxpool.cli import answers, printing, sources
from mxpool.cli.exits import BadSource, reported
from mxpool.cli.flags import InFlight, Json, Model, Timeout
from mxpool.cli.images import ImageReader, Layout
from mxpool.cli.surroundings import Arrays, Calls, around, rows_of, signature
from mxpool.errors import MxPoolError
from mxpool.tensors import Signature, TensorSpec


@reported()
def push(
    ctx: typer.Context,
    model: Model,
    *,
    paths: Annotated[list[Path], typer.Argument(metavar="SOURCES...", help=".npy, .npz, images, and folders of them.")],
    whole: Annotated[bool, typer.Option("--whole", help="Each array file is one request, batch axis and all.")] = False,
    input_name: Annotated[
        str, typer.Option("--input", help="What .npy files and images are for, if there are several inputs.")
    ] = "",
    size: Annotated[str, typer.Option(metavar="WxH", help="Resize images to this; default: the model's dims.")] = "",
    layout: Annotated[Layout, typer.Option(help="Where the channels of an image go.")] = Layout.nchw,
    scale: Annotated[float, typer.Option(help="A pixel p of 0 to 255 becomes (p * scale - mean) / std.")] = 1.0,
    mean: Annotated[str, typer.Option(metavar="M[,M,M]", help="One for all channels, or one for each.")] = "0",
    std: Annotated[str, typer.Option(metavar="S[,S,S]", help="Likewise.")] = "1",
    rows_per_request: Annotated[int, typer.Option(help="Rows joined to one request.", min=1)] = 1,
    in_flight: InFlight = 64,
    repeat: Annotated[int, typer.Option(help="Push all sources this many times.", min=1)] = 1,
    output: Annotated[Path | None, typer.Option("-o", "--output", help="Write the answers: .npz or .jsonl.")] = None,
    timeout: Timeout = 30.0,
    json: Json = False,
) -> None:
    """Push every frame through a model; the first axis of an array counts its frames."""
    files = sources.files(paths)
    means, stds = _values("mean", mean), _values("std", std)
    with closing(around(ctx).client()) as client:
        served = signature(client, model)
        reader = ImageReader(_fed(served, input_name, files), layout, _size(size), scale, means, stds)

        def once() -> Iterator[sources.Request]:
            if whole:
                return sources.whole(files, reader.spec.name)
            frames = sources.frames(files, reader.spec.name, reader)
            return sources.requests(frames, rows_per_request) if served.batched else sources.singly(frames)

        requests = itertools.chain.from_iterable(once() for _ in range(repeat))
        with answers.open_answers(output, batched=served.batched) as file:
            count = Count(model, served.batched)
            _send(client, requests, file, count, in_flight, timeout, quiet=json)
    figures = count.figures()
    if json:
        printing.show_json(figures)
    else:
        typer.echo(
            "{requests:,} requests, {rows:,} rows in {seconds:.2f} s: {rows_per_s:,.1f} rows/s".format(**figures)
        )


def _fed(served: Signature, input_name: str, files: Sequence[Path]) -> TensorSpec:
    """The input that .npy files and images are for."""
    names = [spec.name for spec in served.inputs]
    if input_name and input_name not in names:
        raise BadSource(f"--input {input_name!r}: the model's inputs are {', '.join(names)}")
    if not input_name and len(names) > 1 and any(file.suffix.lower() != ".npz" for file in files):
        raise BadSource(f"the model has several inputs ({', '.join(names)}): choose with --input, or push .npz files")
    return next(spec for spec in served.inputs if spec.name == (input_name or names[0]))


def _size(text: str) -> tuple[int, int] | None:
    width, _, height = text.partition("x")
    if not text:
        return None
    if not (width.isdecimal() and height.isdecimal() and 0 < int(width) <= 65_535 and 0 < int(height) <= 65_535):
        raise BadSource(f"--size {text!r}: not WxH, such as 192x48")
    return int(width), int(height)


def _values(flag: str, text: str) -> tuple[float, ...]:
    try:
        values = tuple(float(part) for part in text.split(","))
    except ValueError:
        raise BadSource(f"--{flag} {text!r}: not a number, or several with commas") from None
    if flag == "std" and 0 in values:
        raise BadSource("--std cannot be 0")
    return values


@dataclass(slots=True)
class Count:
    """What has been answered so far."""

    model: str
    batched: bool
    requests: int = 0
    rows: int = 0
    seconds: float = 0.0

    def figures(self) -> dict[str, Any]:
        """Counts and rates, for printing."""
        seconds = max(self.seconds, 1e-9)
        rates = {"requests_per_s": round(self.requests / seconds, 1), "rows_per_s": round(self.rows / seconds, 1)}
        counts = {"model": self.model, "requests": self.requests, "rows": self.rows}
        return {**counts, "seconds": round(self.seconds, 3), **rates}


def _send(
    client: Calls,
    requests: Iterator[sources.Request],
    file: answers.AnswerFile,
    count: Count,
    in_flight: int,
    timeout_s: float,
    *,
    quiet: bool,
) -> None:
    """Send all and keep the answers; an error is told with the file that it happened at."""
    waiting: deque[sources.Request] = deque()

    def feed() -> Iterator[Arrays]:
        for request in requests:
            waiting.append(request)
            yield request.arrays

    started_s = time.monotonic()
    with _progress(quiet=quiet) as progress:
        task = progress.add_task(count.model, total=None, rate="")
        try:
            for found in client.push(count.model, feed(), in_flight=in_flight, timeout_s=timeout_s):
                request = waiting.popleft()
                file.add(request.labels, found)
                count.requests += 1
                count.rows += rows_of(request.arrays, batched=count.batched)
                count.seconds = time.monotonic() - started_s
                progress.update(task, completed=count.rows, rate=f"{count.figures()['rows_per_s']:,.0f} rows/s")
        except MxPoolError:
            if waiting:  # answers come in order: the oldest without one is the one that failed
                typer.echo(f"at {_span(waiting[0].labels)}, after {count.requests} answers:", err=True)
            raise


def _span(labels: list[str]) -> str:
    return labels[0] if len(labels) == 1 else f"{labels[0]} to {labels[-1]}"


def _progress(*, quiet: bool) -> Progress:
    """A line on stderr that counts rows; nothing where stderr is no terminal."""
    console = printing.console(stderr=True)
    columns = (SpinnerColumn(), TextColumn("{task.description} {task.completed:,.0f} rows {task.fields[rate]}"))
    return Progress(*columns, TimeElapsedColumn(), console=console, disable=quiet or not console.is_terminal)
