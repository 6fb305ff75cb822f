"""GGUF files, such as the default model's inside a PyPI package: converted once into a folder.

Reading GGUF takes 20 seconds and a gigabyte; a converted folder loads in about a second.
"""

import json
import os
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tqdm import tqdm  # type: ignore[import-untyped]
from transformers import AutoModelForCausalLM, AutoTokenizer

from foreword.store.files import cache_folder, digest_of

_FORMAT = 1  # of the converted folder; a change converts again
_ABANDONED_S = 3600.0


def converted(source: Path) -> Path:
    """The model folder made from a GGUF file, converting it now if that was never done.

    Two processes may convert at once: each works in its own folder, and the first rename wins.
    """
    models = cache_folder() / "models"
    final = models / f"{source.stem}-{digest_of(source)[:16]}-{_FORMAT}"
    for part in models.glob(".part-*"):
        if time.time() - part.stat().st_mtime > _ABANDONED_S:
            shutil.rmtree(part, ignore_errors=True)
    if final.is_dir():
        return final
    models.mkdir(parents=True, exist_ok=True)
    part = Path(tempfile.mkdtemp(prefix=".part-", dir=models))
    try:
        _convert(source, part)
        part.rename(final)
    except OSError:
        if not final.is_dir():
            raise
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return final


def _convert(source: Path, folder: Path) -> None:
    where: dict[str, Any] = {
        "pretrained_model_name_or_path": str(source.parent),
        "gguf_file": source.name,
    }
    with tqdm(total=3, desc=f"converting {source.name} (once)", unit="step") as progress:
        tokenizer = AutoTokenizer.from_pretrained(**where)
        tokenizer.save_pretrained(folder)
        progress.update()
        module = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32)
        progress.update()
        tied = "lm_head.weight" if module.config.tie_word_embeddings else ""
        weights = {
            name: weight.to(torch.bfloat16).contiguous().clone()
            for name, weight in module.state_dict().items()
            if name != tied
        }
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
        # The library refuses to save a model that came from GGUF, so its config is written here.
        config = module.config.to_dict()
        config.pop("quantization_config", None)
        config |= {
            "architectures": [type(module).__name__],
            "dtype": "bfloat16",
            "_name_or_path": source.stem,
        }
        (folder / "config.json").write_text(json.dumps(config, default=str, indent=1))
        for path in (*folder.iterdir(), folder):  # after a power cut, the folder must be whole
            descriptor = os.open(path, os.O_RDONLY)
            os.fsync(descriptor)
            os.close(descriptor)
        progress.update()
