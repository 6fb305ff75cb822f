"""What came of exact mode's self-test, remembered: a start that has nothing new to test is quick.

It is remembered under a digest of all that the bits can depend on, so another processor, library,
model or line of this code is tested anew.
"""

import json
import os
import platform
from collections.abc import Callable
from contextlib import suppress
from dataclasses import astuple
from hashlib import sha256
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
import transformers
from torch import nn

from foreword.engine.attention import AttentionRules
from foreword.engine.exact import Exactness, ExactRules, Forward, Tiling, linear_shapes, measure
from foreword.engine.model import LoadedModel
from foreword.store.files import cache_folder, write_whole

_KERNELS = ("ONEDNN_", "DNNL_", "MKL_", "ATEN_")
_found: "WeakKeyDictionary[nn.Module, dict[int, Exactness]]" = WeakKeyDictionary()


def find_rules(model: LoadedModel, step: Callable[[ExactRules], Forward]) -> Exactness:
    """As `measure`, or as it was remembered."""
    known = _found.setdefault(model.module, {})
    num_threads = torch.get_num_threads()
    if num_threads not in known:
        memo = cache_folder() / "exactness" / f"{circumstances(model)}.json"
        exactness = _remembered(memo, model)
        if exactness is None:
            exactness = measure(model, step)
            with suppress(OSError):  # a folder that cannot be written costs another test, no more
                write_whole(memo, json.dumps(_as_json(exactness)))
        known[num_threads] = exactness
    return known[num_threads]


def circumstances(model: LoadedModel) -> str:
    """A digest of all that bits can depend on: the model with its weights and dtype, the processor
    or device, the number of threads, the libraries, and this code."""
    code = [path.read_text() for path in sorted(Path(__file__).parent.glob("*.py"))]
    device = model.module.device
    parts = [
        model.identity(1).root_hash("").hex(),
        machine(device),
        str(torch.get_num_threads()),
        torch.__version__,
        torch.__config__.show(),
        transformers.__version__,
        kernel_settings(),
        *sorted(linear_shapes(model.module)),
        *code,
    ]
    return sha256(json.dumps(parts).encode()).hexdigest()


def machine(device: torch.device) -> str:
    """What tells the processor or device that computes from others."""
    return _processor() if device.type == "cpu" else torch.cuda.get_device_name(device)


def kernel_settings() -> str:
    """The environment variables by which the kernel libraries choose other code."""
    found = {name: value for name, value in os.environ.items() if name.startswith(_KERNELS)}
    return json.dumps(found, sort_keys=True)


def _processor() -> str:
    """What tells this processor from others, microcode too, as far as the system says."""
    try:
        first = Path("/proc/cpuinfo").read_text().split("\n\n")[0]
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    varying = ("mhz", "bogomips", "processor", "apicid", "core id")
    lines = [line for line in first.splitlines() if not any(v in line.lower() for v in varying)]
    return "\n".join([*lines, str(torch.backends.cpu.get_cpu_capability())])


def _as_json(exactness: Exactness) -> dict[str, Any]:
    rules = exactness.rules
    return {
        "exact": exactness.exact,
        "reason": exactness.reason,
        "tilings": {
            shape: [tiling.counts, tiling.weights_in_rows]
            for shape, tiling in rules.tilings.items()
        }
        if rules
        else None,
        "attention": astuple(rules.attention) if rules else None,
    }


def _remembered(memo: Path, model: LoadedModel) -> Exactness | None:
    try:
        found = json.loads(memo.read_text())
        if not found["exact"]:
            return Exactness(False, str(found["reason"]))
        tilings = {
            str(shape): Tiling(counts, int(weights_in_rows))
            for shape, (counts, weights_in_rows) in found["tilings"].items()
        }
        if tilings.keys() != linear_shapes(model.module).keys():
            return None
        widths, fold = found["attention"]
        rules = ExactRules(tilings, AttentionRules(tuple(widths), bool(fold)))
        return Exactness(True, f"{found['reason']} (remembered)", rules)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None  # never tested, or a power cut left part of it
