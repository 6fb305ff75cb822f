"""Reading a trace takes the memory of its longest record, however long it is."""

import gzip
import io
import json
import tracemalloc

import pytest

from foreword.sim.importer import read_trace
from traces import ROW

_NUM_IDS = 2_000


def mooncake(number):
    ids = list(range(number * _NUM_IDS, (number + 1) * _NUM_IDS))
    return {**ROW, "timestamp": number, "input_length": 512 * _NUM_IDS, "hash_ids": ids}


def session(number):
    runs = [[number * _NUM_IDS, _NUM_IDS]]
    request = {"t": number, "in": 64 * _NUM_IDS, "out": 1, "hash_runs": runs, "type": "n"}
    return {"id": f"s{number}", "block_size": 64, "requests": [request] * 3}


def chat(number):
    said = f"{number} {'word ' * 2_000}"
    return {"id": str(number), "conversations": [{"from": "human", "value": said}] * 3}


def peak_bytes(raw):
    stream = io.BytesIO(raw)
    tracemalloc.start()
    with read_trace(stream) as trace:
        num_records = len(trace)
        peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return num_records, peak


@pytest.mark.parametrize(
    ("record", "before", "between", "after", "packed"),
    [
        (mooncake, "", "\n", "", False),
        (mooncake, "", "\n", "", True),
        (session, "", "\n", "", False),
        (chat, "[", ",\n", "]", False),
    ],
)
def test_four_times_as_long_a_trace_takes_no_more(record, before, between, after, packed):
    peaks = []
    for num_records in (150, 600):
        text = between.join(json.dumps(record(number)) for number in range(num_records))
        raw = f"{before}{text}{after}".encode()
        read, peak = peak_bytes(gzip.compress(raw, 1) if packed else raw)
        assert read % num_records == 0
        peaks.append(peak)
    # A record takes less than 400 bytes. How much a packed stream gives at once varies by a MiB.
    assert peaks[1] - peaks[0] < 2 << 20
    assert peaks[1] < 8 << 20
