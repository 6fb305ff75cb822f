"""How a command fails: one line and an exit code, where a traceback would tell a user nothing."""

from typing import Final

from foreword.engine.source import ModelNotFound, ModelRefused

EXIT_CODES: Final = {
    "failed": 1,
    "usage": 2,  # arguments
    "model": 3,  # not found, or of a kind that cannot be served
    "address": 4,  # the port is taken, or the host is not this machine's
    "settings": 5,  # what the model or the machine cannot do: device, context, memory
    "install": 6,  # a package is missing
    "interrupted": 130,
}
ENGINE = (
    *("accelerate", "huggingface_hub", "torch", "transformers", "tokenizers", "safetensors"),
    *("gguf", "jinja2", "numpy", "tqdm"),
)
# Package: the extra that brings it.
PACKAGES = {
    **dict.fromkeys(ENGINE, "engine"),
    **dict.fromkeys(("zmq", "msgspec"), "events"),
    "matplotlib": "plot",
    "zstandard": "zst",
}


class Failure(Exception):
    """Ends a command with `message` on stderr."""

    def __init__(self, message: str, kind: str) -> None:
        super().__init__(message)
        self.exit_code = EXIT_CODES[kind]

    @classmethod
    def of(cls, error: Exception) -> "Failure | None":
        """What to say of an exception; None for one that nobody expects."""
        if isinstance(error, Failure):
            return error
        if isinstance(error, ModuleNotFoundError) and error.name in PACKAGES:
            extra = PACKAGES[error.name]
            return cls(f"{error.name} is not installed: pip install 'foreword[{extra}]'", "install")
        if isinstance(error, ModelNotFound | ModelRefused):
            return cls(str(error), "model")
        return None
