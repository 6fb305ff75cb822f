"""The guide to traces: its examples are read as what it says, its commands do what it says."""

import io
import re
from pathlib import Path

import pytest

from foreword.cli.main import main
from foreword.sim.formats import FORMATS
from foreword.sim.importer import NoPrefixes, ReadOptions, read_lengths, read_trace
from traces import stream

GUIDE = (Path(__file__).parents[2] / "docs" / "guide" / "traces.md").read_text()
BLOCKS = re.findall(r"^```([^\n]*)\n(.*?)^```$", GUIDE, re.MULTILINE | re.DOTALL)
# A format's examples name it behind their syntax.
EXAMPLES = [(head.split()[1], text) for head, text in BLOCKS if " " in head]
TRAFFIC = EXAMPLES[0][1]


@pytest.mark.parametrize(("name", "text"), EXAMPLES, ids=lambda value: value[:20])
def test_example_is_of_its_format(name, text):
    if name in ("azure", "burstgpt"):
        with pytest.raises(NoPrefixes):
            read_trace(io.BytesIO(text.encode()))
        assert len(read_lengths(io.BytesIO(text.encode()))) == 1
        return
    with read_trace(io.BytesIO(text.encode())) as trace:
        assert trace.format_name == name
        assert len(trace) >= 1
    with read_trace(io.BytesIO(text.encode()), ReadOptions(name)) as trace:
        assert len(trace) >= 1


def test_every_format_has_an_example_and_a_row():
    names = {one.name for one in FORMATS}
    assert {name for name, _ in EXAMPLES} == names
    table = set(re.findall(r"`([\w-]+)`", "".join(re.findall(r"^\| (`.*?) \|", GUIDE, re.M))))
    assert table == names | {"--format"}


def test_commands(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("traffic.jsonl").write_text(TRAFFIC)
    shown, failed, command = (text for head, text in BLOCKS if not head)
    assert main(["trace", "show", "traffic.jsonl"]) == 0
    assert capsys.readouterr().out == shown
    assert main(command.split()[1:]) == 0
    assert Path("anonymous.jsonl.gz").exists()
    Path("traffic.jsonl").write_text(TRAFFIC.replace("[0, 1, 3, 4]", "[0, 1]"))
    assert main(["trace", "show", "traffic.jsonl"]) == 1
    assert capsys.readouterr().err == failed


def test_python(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("traffic.jsonl").write_bytes(stream(*TRAFFIC.splitlines()).getvalue())
    exec(dict(BLOCKS)["python"], {})
    assert capsys.readouterr().out.splitlines() == [
        "0.0 1100 [0, 1]",
        "3.0 1800 [0, 2]",
        "9.0 600 [3]",
    ]
