"""Faults of what lies on disk while a real vLLM serves from it: our tier beside vLLM's own `fs`.

    .venv/bin/python tools/vllm_faults.py --json

tests/faults_in_vllm.py, run where the engines are installed. Some ten minutes.
"""

import os
import subprocess
import sys

from engines import ROOT, NotToBeHad, environment


def main() -> int:
    try:
        folder = environment()
    except NotToBeHad as reason:
        print(f"vLLM is not tried: {reason}")
        return 0
    return subprocess.run(
        [folder / "bin" / "python", ROOT / "tests" / "faults_in_vllm.py", *sys.argv[1:]],
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
        check=False,
    ).returncode


if __name__ == "__main__":
    sys.exit(main())
