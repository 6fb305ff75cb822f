"""foreword trace: what is in a trace, and the same trace without what it says."""

import gzip
import io
import json
import shlex
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers

from foreword.cli.main import main
from foreword.core.cache import KVCache, Refusal
from foreword.sim.anonymise import anonymous_lines
from foreword.sim.importer import read_trace
from foreword.sim.prompt import prompt_chain
from foreword.sim.summary import summary
from foreword.sim.trace import Record, Trace
from traces import ROW, SESSION, VLLM, read, shared, stream

CHAT = {"messages": [{"role": "user", "content": "A secret that nobody may read"}], "model": "m"}


def served(trace, num_blocks, block_size=16):
    """Tokens that a small cache of full blocks reuses, request by request."""
    size = block_size if trace.id_tokens == 1 else 1
    cache = KVCache(num_blocks + 1, size)
    reused = []
    for record in trace:
        chain = prompt_chain(record, size)
        admitted = cache.admit(chain)
        if isinstance(admitted, Refusal):
            reused.append(0)
            continue
        lease = admitted[0]
        full = lease.num_computed_tokens // size
        reused.append(full * size * trace.id_tokens)
        if lease.copy is not None:
            cache.filled(lease, lease.copy.num_tokens)
        rest = len(chain) - (trace.id_tokens > 1) - lease.num_computed_tokens
        cache.filled(lease, max(0, rest))
        cache.release(lease)
    return reused


def brute(records, block_size):
    """Full blocks and those known before, of whole prefixes kept as tuples."""
    known, num_blocks, num_repeated = set(), 0, 0
    for record in records:
        step = block_size // record.id_tokens
        ids = [record.tenant, *record.ids]
        ends = range(1, record.num_tokens // block_size + 1)
        prefixes = [tuple(ids[: 1 + end * step]) for end in ends]
        num_blocks += len(prefixes)
        num_repeated += sum(prefix in known for prefix in prefixes)
        known.update(prefixes)
    return num_blocks, num_repeated, len(known)


PROMPTS = st.lists(
    st.tuples(st.lists(st.integers(0, 3), min_size=1, max_size=9), st.sampled_from(["", "a"])),
    min_size=1,
    max_size=12,
)


@given(PROMPTS, st.sampled_from([1, 4]))
def test_repeats_are_those_of_whole_prefixes(prompts, id_tokens):
    with Trace(id_tokens) as trace:
        for ids, tenant in prompts:
            num_tokens = len(ids) * id_tokens - (id_tokens > 1) * (ids[-1] % 2)
            trace.add(Record(num_tokens, ids, id_tokens, tenant=tenant))
        found = summary(trace, 2).repeats
        expected = brute(trace, 4 if id_tokens == 4 else 2)
        lines = list(anonymous_lines(trace, 2))
        one_parent = len({r.tenant for r in trace}) == 1 and expected[2] == len(
            {one for record in trace for one in record.ids[: record.num_tokens // id_tokens]}
        )
    assert (found.num_blocks, found.num_repeated_blocks, found.num_different_blocks) == expected
    if id_tokens == 4 and one_parent:
        assert found.has_prefix_ids
    with read_trace(io.BytesIO("\n".join(lines).encode())) as again:
        same = summary(again).repeats
        assert (same.num_blocks, same.num_repeated_blocks) == expected[:2]
        assert same.has_prefix_ids, "they are numbered by their prefixes"


def test_ids_of_contents_are_told():
    rows = [ROW, {**ROW, "hash_ids": [46, 47, 9]}, {**ROW, "hash_ids": [7, 47, 48]}]
    for kept, has_prefix_ids in ((2, True), (3, False)):
        with read(*rows[:kept]) as trace:
            assert summary(trace).repeats.has_prefix_ids is has_prefix_ids


@pytest.mark.parametrize("num_blocks", [5_637, 60_000])
def test_a_public_trace_gives_the_same_hits_without_its_names(num_blocks):
    with read_trace(shared("mooncake_fast25_conversation.jsonl.gz")) as trace:
        lines = "\n".join(anonymous_lines(trace)).encode()
        before, lengths = served(trace, num_blocks), [record.num_tokens for record in trace]
    with read_trace(io.BytesIO(lines)) as again:
        assert [record.num_tokens for record in again] == lengths
        assert served(again, num_blocks) == before
    assert sum(before) > 0


def test_sessions_and_text_give_the_same_hits_without_their_names():
    chats = [
        {**CHAT, "messages": [{"role": "user", "content": text}], "user": f"ann{i % 2}"}
        for i, text in enumerate(["x" * 200, "x" * 200 + "y" * 90, "y" * 300, "x" * 200 + "z"])
    ]
    agents = [SESSION, {**SESSION, "id": "s2"}]
    for lines, secrets in ((chats, ["ann", "xx"]), (agents, ["s1", "agent_001"])):
        with read(*lines) as trace:
            written = "\n".join(anonymous_lines(trace))
            before, requests = served(trace, 40), list(trace)
        assert not any(secret in written for secret in secrets)
        with read_trace(io.BytesIO(written.encode())) as again:
            assert served(again, 40) == before
            assert [record.arrival_s for record in again] == pytest.approx(
                [record.arrival_s for record in requests], abs=1e-6
            )
            assert len({one.session for one in again}) == len({one.session for one in requests})
            assert len({one.tenant for one in again}) == len({one.tenant for one in requests})
    assert sum(before) > 0


def run(*words, capsys):
    code = main(["trace", *map(str, words)])
    said = capsys.readouterr()
    return code, said.out, said.err


def written(path, *lines):
    path.write_bytes(stream(*lines).getvalue())
    return path


def test_show(tmp_path, capsys):
    path = written(tmp_path / "t.jsonl", ROW, {**ROW, "cached_tokens": 600, "timestamp": 30_000})
    code, out, _ = run("show", path, "--json", capsys=capsys)
    assert code == 0
    assert json.loads(out) == {
        "format": "mooncake",
        "requests": 2,
        "sessions": 0,
        "tenants": 1,
        "span_s": pytest.approx(2.518),
        "prompt_tokens": 2400,
        "longest_prompt": 1200,
        "output_tokens": 104,
        "tokens_per_id": 512,
        "ids_name": "prefixes",
        "block_tokens": 512,
        "different_blocks": 2,
        "repeated_blocks": 0.5,
        "repeated_tokens": pytest.approx(1024 / 2400),
        "observed_requests": 1,
        "observed_cached_tokens": 0.5,
        "notes": [],
    }
    code, out, _ = run("show", path, "--coarsen", 1024, capsys=capsys)
    assert "tokens_per_id           1,024" in out
    assert "observed_cached_tokens  0.5" in out


def test_show_counts_no_more_than_it_can_keep(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("foreword.sim.summary._NUM_PREFIXES_MAX", 1)
    code, out, _ = run("show", written(tmp_path / "t.jsonl", ROW), capsys=capsys)
    assert code == 0
    assert "repeated_tokens         not known" in out
    assert "ids_name                blocks" in out


def test_show_of_lengths_says_why_there_is_no_hit_rate(tmp_path, capsys, monkeypatch):
    lines = ["TIMESTAMP,ContextTokens,GeneratedTokens", "2023-11-16 18:15:46,374,44"]
    path = written(tmp_path / "t.csv", *lines)
    code, out, _ = run("show", path, capsys=capsys)
    assert code == 0
    assert "prompt_tokens           374" in out
    assert "no hit rate" in out
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(stream(*lines)))
    code, _, err = run("show", "-", capsys=capsys)
    assert code == 1
    assert "standard input, line 2: this trace has lengths" in err
    code, _, err = run("anonymise", path, "-o", tmp_path / "o.jsonl", capsys=capsys)
    assert code == 1
    assert not (tmp_path / "o.jsonl").exists()


def test_what_is_wrong_is_one_line(tmp_path, capsys):
    path = written(tmp_path / "t.jsonl", ROW, "{")
    code, out, err = run("show", path, capsys=capsys)
    assert (code, out) == (1, "")
    assert err.startswith(f"foreword trace show: {path}, line 2: no JSON")
    code, out, _ = run("show", path, "--bad-lines", "skip", capsys=capsys)
    assert code == 0
    assert "note: 1 lines skipped" in out
    code, _, err = run("show", tmp_path / "none", capsys=capsys)
    assert code == 1
    assert "none cannot be read: No such file or directory" in err
    for words in (
        ("--coarsen", "0"),
        ("--spread", "-1"),
        ("--spread", "x"),
        ("--tokenizer", tmp_path / "none"),
        ("--tokenizer", path),
        ("--format", "parquet"),
    ):
        code, _, err = run("show", path, *words, capsys=capsys)
        assert code in (2, 5)
        assert words[0] in err


def test_tokenizer(tmp_path, capsys):
    words = {word: i for i, word in enumerate(["[x]", "A", "secret", "that", "nobody", "may"])}
    made = Tokenizer(models.WordLevel(words, unk_token="[x]"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made.enable_truncation(2)
    made.save(str(tmp_path / "tokenizer.json"))
    path = written(tmp_path / "t.jsonl", CHAT)
    for where in (tmp_path, tmp_path / "tokenizer.json"):
        code, out, _ = run("show", path, "--tokenizer", where, "--json", capsys=capsys)
        assert code == 0
        assert json.loads(out)["prompt_tokens"] == 8, "a mark, six words, a mark"


def test_anonymise(tmp_path, capsys):
    path = written(tmp_path / "t.log", *VLLM)
    code, out, err = run("anonymise", path, "-o", "-", "--block-size", 2, capsys=capsys)
    assert code == 0
    assert [json.loads(line) for line in out.splitlines()] == [
        {
            "timestamp": 0,
            "input_length": 3,
            "output_length": 0,
            "hash_ids": [0, 1],
            "block_size": 2,
        },
        {
            "timestamp": pytest.approx(0.001),
            "input_length": 4,
            "output_length": 2,
            "hash_ids": [2, 3],
            "block_size": 2,
            "tenant": "0",
        },
    ]
    target = tmp_path / "o.jsonl.gz"
    code, out, err = run("anonymise", written(path, CHAT), "-o", target, capsys=capsys)
    assert (code, out) == (0, "")
    assert "note: 4 bytes of text count as a token" in err
    assert "secret" not in gzip.decompress(target.read_bytes()).decode()
    code, _, err = run("anonymise", path, "-o", tmp_path / "no" / "o", capsys=capsys)
    assert code == 1
    assert "cannot be written" in err
    assert sorted(one.name for one in tmp_path.iterdir()) == ["o.jsonl.gz", "t.log"]


@pytest.mark.parametrize("words", [("show", "--json"), ("anonymise", "-o", "-")])
def test_who_reads_may_stop(words, tmp_path):
    path = written(tmp_path / "t.jsonl", *[ROW] * 2_000)
    command = [sys.executable, "-m", "foreword.cli.main", "trace", *words, str(path)]
    script = " ".join(map(shlex.quote, command)) + " | head -c 1"
    done = subprocess.run(["sh", "-c", script], capture_output=True, timeout=120, check=False)
    assert (len(done.stdout), done.stderr) == (1, b"")


def test_zst_that_is_not_installed_says_so(tmp_path, capsys, monkeypatch):
    path = tmp_path / "t.jsonl.zst"
    path.write_bytes(b"\x28\xb5\x2f\xfd and more")
    monkeypatch.setitem(sys.modules, "zstandard", None)
    code, _, err = run("show", path, capsys=capsys)
    assert code == 6
    assert "zstandard is not installed: pip install 'foreword[zst]'" in err


def test_what_is_no_file_is_written_to_and_not_replaced(tmp_path, capsys):
    trace, real, link = (tmp_path / name for name in ("t.jsonl", "real.jsonl", "link.jsonl"))
    trace.write_text('{"timestamp": 0, "input_length": 4, "output_length": 1, "hash_ids": [7]}\n')
    real.touch()
    link.symlink_to(real)
    assert main(["trace", "anonymise", str(trace), "-o", str(link)]) == 0
    assert link.is_symlink()
    assert '"hash_ids"' in real.read_text()
    assert main(["trace", "anonymise", str(trace), "-o", str(tmp_path)]) == 2
    assert "is a folder" in capsys.readouterr().err
