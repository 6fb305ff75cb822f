"""What docs/guide/transformers.md shows works as it is written, across processes."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tiny import make_tiny

GUIDE = Path(__file__).parents[2] / "docs" / "guide" / "transformers.md"
THREE_LINES, MEASURE = re.findall(r"```python\n(.*?)```", GUIDE.read_text(), re.DOTALL)
BEFORE = """
import sys
from transformers import AutoModelForCausalLM, AutoTokenizer
model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
inputs = AutoTokenizer.from_pretrained(sys.argv[1])("Read it once. " * 40, return_tensors="pt")
"""
AFTER = """
plain = model.generate(**inputs, max_new_tokens=100)
print(output.tolist() == plain.tolist(), inputs.input_ids.shape[1], cache.stats.num_reused_tokens)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_tiny(tmp_path_factory.mktemp("model"), max_model_len=4096)


def run(program: str, folder: Path, cache: Path) -> str:
    done = subprocess.run(
        [sys.executable, "-c", program, str(folder)],
        env={**os.environ, "FOREWORD_CACHE_DIR": str(cache), "OMP_WAIT_POLICY": "passive"},
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_three_lines_reuse_what_another_process_has_computed(folder: Path, tmp_path: Path) -> None:
    code = [line for line in THREE_LINES.splitlines() if line]
    assert len(code) == 3
    for process in range(2):
        same, num_tokens, num_reused = run(BEFORE + THREE_LINES + AFTER, folder, tmp_path).split()
        assert same == "True"
        assert int(num_reused) == (process and (int(num_tokens) - 1) // 16 * 16)


def test_the_measurement_runs(folder: Path, tmp_path: Path) -> None:
    for known in ("0", "2992"):
        _, first, second = run(MEASURE, folder, tmp_path).splitlines()
        assert first.endswith(f" s, {known} of 3016 tokens reused")
        assert second.endswith(" s, 2992 of 3016 tokens reused")
