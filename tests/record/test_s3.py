"""A record on S3: moto's server over real HTTP, behind a proxy that cuts off, slows down, throttles and lists late.

Each fault by itself, with a Monitor: scripts/validation/s3_faults.py.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator
from dataclasses import replace

import pytest
import s3_faults
from outages import losses_in_tensorboard
from processes import wait_until
from s3_proxy import Faults, Proxy, new_address, s3
from samples import FINGERPRINT
from small_record import measured

from nemo_fp8_debug import read_record
from nemo_fp8_debug.monitor import recorder_queue
from nemo_fp8_debug.record import merging, storage
from nemo_fp8_debug.record.storage import FolderStorage
from nemo_fp8_debug.record.writer import RunRecordWriter


@pytest.fixture(scope="module")
def proxy() -> Iterator[Proxy]:
    with s3() as found:
        yield found


def test_nothing_is_lost_and_starts_stay_apart(proxy: Proxy) -> None:
    address = new_address()
    proxy.faults = Faults(cut_before=7, cut_after=11, late=1.0)
    for step in range(2):
        record = RunRecordWriter(address)
        record.open(FINGERPRINT)
        record.record(measured(step))
        record.close()
        assert record.attempt >= step and record.lost == 0
    assert proxy.hit
    proxy.faults = Faults()
    time.sleep(max(0.0, 1.0 - (time.monotonic() - max(proxy.written.values()))))
    for step in range(2):
        assert read_record(address, where={"step": step})["mse"].to_list() == measured(step).operand_columns["mse"]


def test_a_reader_sees_what_was_written_since_it_looked(proxy: Proxy) -> None:
    address = new_address()
    proxy.faults, run, reader = Faults(late=1e9), RunRecordWriter(address), FolderStorage(address)
    run.open(FINGERPRINT)
    run.record(measured(0))
    reader.list_names(), reader.list_names("metrics"), reader.find_folders_with_file("attempt-*.json")
    proxy.faults = Faults()
    assert reader.has_matching_file("attempt-0.json") and len(reader.find_folders_with_file("attempt-*.json")) == 1
    assert len(reader.list_all_files()) == 3 and reader.measure_size("metrics") > 0
    run.close()


def test_parts_are_merged_behind_faults(proxy: Proxy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(merging, "MERGED", 4)
    proxy.faults, address = Faults(cut_before=7, cut_after=11), new_address()
    record = RunRecordWriter(address)
    record.open(FINGERPRINT)
    for step in range(4):
        record.record(measured(step))
    record.close()
    assert [name[:34] for name in record.storage.list_names("metrics")] == ["attempt-0-steps-00000000-00000003-"]
    expected = [value for step in range(4) for value in measured(step).operand_columns["mse"]]
    assert read_record(address)["mse"].to_list() == expected


@pytest.mark.parametrize("faults", [Faults(silent=True), Faults(gone=True)], ids=["silent", "gone"])
def test_an_outage_costs_two_requests_and_no_step_if_it_ends(
    proxy: Proxy, monkeypatch: pytest.MonkeyPatch, faults: Faults
) -> None:
    """The first one, and another when the run ends; drivers repeat what is refused."""
    monkeypatch.setattr(storage, "LIMIT", 1.2)
    monkeypatch.setattr(storage, "REST", 1000)
    outage = s3_faults.Outage(faults, steps=6, pause=0.0)
    lost = s3_faults.of_outage(proxy, outage, new_address())
    assert lost["steps_recorded"] == s3_faults.LEAVES and (lost["requests"] == 2 or faults.gone)
    assert "cannot be written" in lost["said"][0] and lost["said"][-1].startswith("12 parts of the record were lost")
    address = new_address()
    back = s3_faults.of_outage(proxy, replace(outage, ends=5), address)
    assert back["steps_recorded"] == 6 and not any("lost" in message for message in back["said"])
    assert losses_in_tensorboard(address) == list(range(6))


def test_a_place_that_failed_is_asked_again_later(proxy: Proxy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage, "LIMIT", 1.2)
    monkeypatch.setattr(storage, "REST", 3)
    proxy.faults, place = Faults(silent=True), FolderStorage.open_for_writing(new_address())

    def is_written() -> bool:
        with contextlib.suppress(ConnectionError):
            place.replace_file("name", b"content")
            return True
        return False

    with pytest.raises(TimeoutError, match="no answer within 1 s"):
        is_written()
    with pytest.raises(ConnectionError, match="requests are paused after TimeoutError: no answer"):
        place.replace_file("name", b"content")
    proxy.faults, proxy.requests = Faults(), 0
    wait_until(is_written)
    assert proxy.requests == 1 and place.read_file("name") == b"content"


def test_committed_results_are_about_todays_faults() -> None:
    found = json.loads(s3_faults.RESULT.read_text())
    assert list(found["faults"]) == list(s3_faults.FAULTS)
    assert all(row["tensors_compared"] == 3 for row in found["faults"].values())
    assert all(row["hit"] for name, row in found["faults"].items() if name not in ("none", "slow, 50 ms a request"))
    assert list(found["outages"]) == list(s3_faults.OUTAGES)
    for name, row in found["outages"].items():
        outage = s3_faults.OUTAGES[name]
        assert row["steps_recorded"] == (s3_faults.LEAVES if outage.ends is None else outage.steps)
        assert row["longest_step"] < recorder_queue.STUCK and row["seconds_to_close"] < recorder_queue.STUCK
