from __future__ import annotations

import pytest
from worker_rig import make_spec

from mxpool.errors import ProviderUnavailable
from mxpool.workers.process import set_device


@pytest.mark.parametrize("kind", ["cuda", "maca"])
def test_a_device_worker_sees_its_own_device_only(kind: str) -> None:
    environment: dict[str, str] = {}
    set_device(make_spec(device_kind=kind, device_index=3), environment)
    assert environment.pop("CUDA_DEVICE_ORDER") == "PCI_BUS_ID"
    assert environment == {"CUDA_VISIBLE_DEVICES": "3", "MACA_VISIBLE_DEVICES": "3"}


def test_the_index_counts_among_the_devices_that_the_service_sees() -> None:
    environment = {"CUDA_VISIBLE_DEVICES": "5, GPU-1234", "MACA_VISIBLE_DEVICES": ""}
    set_device(make_spec(device_kind="cuda", device_index=1), environment)
    assert environment.pop("CUDA_DEVICE_ORDER") == "PCI_BUS_ID"
    assert environment == {"CUDA_VISIBLE_DEVICES": "GPU-1234", "MACA_VISIBLE_DEVICES": "1"}


def test_a_device_that_the_service_does_not_see_is_refused_by_name() -> None:
    with pytest.raises(ProviderUnavailable, match=r"cuda device 2 .*CUDA_VISIBLE_DEVICES=0,1 hides it"):
        set_device(make_spec(device_kind="cuda", device_index=2), {"CUDA_VISIBLE_DEVICES": "0,1"})


def test_a_cpu_worker_sees_no_device() -> None:
    environment = {"CUDA_VISIBLE_DEVICES": "0"}
    set_device(make_spec(), environment)
    assert environment.pop("CUDA_DEVICE_ORDER") == "PCI_BUS_ID"
    assert environment == {"CUDA_VISIBLE_DEVICES": "", "MACA_VISIBLE_DEVICES": ""}


def test_an_order_of_devices_that_was_chosen_is_kept() -> None:
    environment = {"CUDA_DEVICE_ORDER": "FASTEST_FIRST"}
    set_device(make_spec(device_kind="cuda"), environment)
    assert environment["CUDA_DEVICE_ORDER"] == "FASTEST_FIRST"
