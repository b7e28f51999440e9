"""A record on S3: moto's server over real HTTP, behind a proxy that cuts off, slows down, throttles and lists late.

Each fault by itself, with a Monitor: scripts/validation/s3_faults.py.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import s3_faults
from s3_proxy import Faults, Proxy, new_address, s3
from samples import FINGERPRINT
from small_record import measured

from nemo_fp8_debug import read_record
from nemo_fp8_debug.record.writer import RunRecord


@pytest.fixture(scope="module")
def proxy() -> Iterator[Proxy]:
    with s3() as found:
        yield found


def test_nothing_is_lost_and_starts_stay_apart(proxy: Proxy) -> None:
    address = new_address()
    proxy.faults = Faults(cut_before=7, cut_after=11, late=1.0)
    for step in range(2):
        record = RunRecord(address)
        record.open(FINGERPRINT)
        record.record(measured(step))
        record.close()
        assert record.attempt >= step and record.lost == 0
    assert proxy.hit
    proxy.faults = Faults()
    time.sleep(max(0.0, 1.0 - (time.monotonic() - max(proxy.written.values()))))
    for step in range(2):
        assert read_record(address, where={"step": step})["mse"].to_list() == measured(step).columns["mse"]


def test_committed_results_are_about_todays_faults() -> None:
    found = json.loads(Path(s3_faults.__file__).with_suffix(".json").read_text())
    assert list(found) == list(s3_faults.FAULTS)
    assert all(row["tensors_compared"] == 3 for row in found.values())
    assert all(row["hit"] for name, row in found.items() if name not in ("none", "slow, 50 ms a request"))
