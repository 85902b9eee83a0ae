from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from fake_client import IMAGES, PAIR, ROWS, SINGLE, FakeClient, mxpool
from PIL import Image

from mxpool.errors import BrokerLost, InvalidTensor, QueueFull


def rows(path: Path, count: int = 5, start: int = 0) -> Path:
    np.save(path, np.arange(start, start + count * 3, dtype=np.float32).reshape(count, 3))
    return path


def test_every_frame_of_a_file_becomes_a_row_and_the_answers_come_back_in_order(tmp_path: Path) -> None:
    client = FakeClient()
    out = tmp_path / "out.npz"
    ran = mxpool(client, "push", "ranking", rows(tmp_path / "a.npy"), "--rows-per-request", 2, "-o", out)
    assert (ran.exit_code, ran.stderr) == (0, "")
    assert [len(sent["x"]) for sent in client.sent] == [2, 2, 1]
    assert np.load(out)["y"].tolist() == (2 * np.arange(15).reshape(5, 3)).tolist()
    assert ran.stdout.startswith("3 requests, 5 rows in ")
    assert client.closed == 1


def test_a_model_without_a_batch_axis_gets_frames_one_by_one_as_they_are(tmp_path: Path) -> None:
    client = FakeClient(SINGLE)
    out = tmp_path / "out.npz"
    ran = mxpool(client, "push", "ranking", rows(tmp_path / "a.npy", 4), "--rows-per-request", 2, "-o", out)
    assert ran.exit_code == 0
    assert [sent["x"].shape for sent in client.sent] == [(3,)] * 4
    assert np.load(out)["y"].shape == (4, 3)


def test_a_whole_file_is_one_request(tmp_path: Path) -> None:
    client = FakeClient()
    ran = mxpool(client, "push", "ranking", rows(tmp_path / "a.npy"), "--whole", "--json")
    assert [sent["x"].shape for sent in client.sent] == [(5, 3)]
    figures = json.loads(ran.stdout)
    assert (figures["requests"], figures["rows"]) == (1, 5)


def test_sources_are_repeated_as_often_as_asked(tmp_path: Path) -> None:
    client = FakeClient()
    mxpool(client, "push", "ranking", rows(tmp_path / "a.npy", 2), "--repeat", 3)
    assert len(client.sent) == 6


def test_answers_as_lines_name_the_source_of_each_row(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    source = rows(tmp_path / "a.npy", 3)
    mxpool(FakeClient(), "push", "ranking", source, "--rows-per-request", 2, "-o", out)
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert lines == [{"source": f"{source}[{i}]", "outputs": {"y": [6 * i, 6 * i + 2, 6 * i + 4]}} for i in range(3)]


def test_images_are_resized_scaled_and_laid_out_for_the_model(tmp_path: Path) -> None:
    Image.new("RGB", (12, 8), (255, 51, 0)).save(tmp_path / "a.png")
    client = FakeClient(IMAGES)
    flags = ("--scale", 1 / 255, "--mean", "0.5,0,0", "--std", "0.5,1,1")
    assert mxpool(client, "push", "ranking", tmp_path, *flags).exit_code == 0
    image = client.sent[0]["image"]
    assert (image.shape, image.dtype) == ((1, 3, 4, 6), np.dtype(np.float32))
    assert image[0, :, 0, 0] == pytest.approx([1.0, 0.2, 0.0], abs=1e-6)


def test_an_error_names_the_file_and_row_that_it_happened_at_and_exits_by_its_kind(tmp_path: Path) -> None:
    source = rows(tmp_path / "a.npy")
    refused = InvalidTensor(tensor="x", reason="shape", got="[1, 3]", expected="[1, 4]")
    ran = mxpool(FakeClient(failures={3: refused}), "push", "ranking", source, "--in-flight", 1)
    assert ran.exit_code == 4
    assert f"at {source}[3], after 3 answers:" in ran.stderr
    assert "invalid_tensor: tensor 'x'" in ran.stderr
    assert "Traceback" not in ran.stderr


@pytest.mark.parametrize(
    ("error", "exit_code"),
    [
        (BrokerLost(endpoint="ipc:///x", reason="end of file"), 3),
        (QueueFull(model="ranking", depth=1, limit=1, unit="requests", retry_after_ms=1), 4),
    ],
)
def test_the_exit_code_tells_a_lost_broker_from_a_refusal(tmp_path: Path, error: Exception, exit_code: int) -> None:
    ran = mxpool(FakeClient(failures={0: error}), "push", "ranking", rows(tmp_path / "a.npy"))  # type: ignore[dict-item]
    assert ran.exit_code == exit_code


def test_after_an_error_no_archive_passes_half_of_the_answers_for_all(tmp_path: Path) -> None:
    out = tmp_path / "out.npz"
    lost = BrokerLost(endpoint="ipc:///x", reason="end of file")
    mxpool(FakeClient(failures={3: lost}), "push", "ranking", rows(tmp_path / "a.npy"), "-o", out)
    assert not out.exists()


def test_a_broken_file_in_the_middle_is_named_after_the_frames_before_it(tmp_path: Path) -> None:
    rows(tmp_path / "a.npy", 2)
    (tmp_path / "b.npy").write_bytes(b"not numpy")
    client = FakeClient()
    ran = mxpool(client, "push", "ranking", tmp_path)
    assert ran.exit_code == 2
    assert ran.stderr.startswith(f"{tmp_path / 'b.npy'}: not a file of plain numpy arrays")
    assert len(client.sent) == 2


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--input", "z"), "the model's inputs are x"),
        (("--size", "12"), "not WxH"),
        (("--size", "0x5"), "not WxH"),
        (("--mean", "a"), "not a number"),
        (("--std", "1,0"), "cannot be 0"),
        (("-o", "out.csv"), "written as .npz or .jsonl"),
        (("-o", "/nowhere/out.jsonl"), "/nowhere/out.jsonl: No such file"),
    ],
)
def test_flags_that_cannot_be_used_are_refused_before_anything_is_sent(
    tmp_path: Path, flags: tuple[str, str], words: str
) -> None:
    client = FakeClient(ROWS)
    ran = mxpool(client, "push", "ranking", rows(tmp_path / "a.npy"), *flags)
    assert ran.exit_code == 2
    assert words in ran.stderr
    assert client.sent == []


def test_a_model_with_two_inputs_takes_archives_or_asks_which_input_is_meant(tmp_path: Path) -> None:
    np.savez(tmp_path / "both.npz", a=np.zeros((3, 2), np.float32), b=np.zeros((3, 1), np.int64))
    client = FakeClient(PAIR)
    assert mxpool(client, "push", "ranking", tmp_path / "both.npz").exit_code == 0
    assert [set(sent) for sent in client.sent] == [{"a", "b"}] * 3
    ran = mxpool(client, "push", "ranking", rows(tmp_path / "a.npy"))
    assert (ran.exit_code, "choose with --input" in ran.stderr) == (2, True)


def test_an_unknown_model_is_refused_with_exit_code_4(tmp_path: Path) -> None:
    ran = mxpool(FakeClient(), "push", "other", rows(tmp_path / "a.npy"))
    assert (ran.exit_code, ran.stderr) == (
        4,
        "unknown_model: no model named 'other' is served here; there are: ranking\n",
    )
