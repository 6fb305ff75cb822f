"""What a request says of how its KV is to be kept, in the words of several APIs, as core Hints.

`prompt_cache_key`, `prompt_cache_retention`, `prompt_cache_options` and `prompt_cache_breakpoint`
are OpenAI's, `cache_control` is Anthropic's, `kv_transfer_params.max_offload_tokens` vLLM's and
`cache.no-store` LiteLLM's. `stable_prefix_tokens` is our own. None changes an answer.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from foreword.core.errors import RequestError
from foreword.core.request import Hints
from foreword.server.errors import ApiError
from foreword.server.fields import Fields, shown

MAX_KEY_CHARACTERS = 1024
INT64_MAX = (1 << 63) - 1
TTLS_S = {"5m": 300.0, "30m": 1800.0, "1h": 3600.0, "12h": 43200.0}
RETENTIONS_S = {"in_memory": 300.0, "24h": 86400.0}
MODES = ("implicit", "explicit")
FIELDS = (
    *("prompt_cache_key", "prompt_cache_retention", "prompt_cache_options", "cache_control"),
    *("kv_transfer_params", "stable_prefix_tokens", "cache"),
)
MARKS = ("cache_control", "prompt_cache_breakpoint")  # of a message or a part: it is stable so far

# Token ids of a chat's messages, as its template renders them.
Render = Callable[[Sequence[Mapping[str, Any]]], list[int]]


def parse_hints(fields: Fields, prompt: Sequence[int], render: Render | None = None) -> Hints:
    """The hints of a body, whose messages are checked already, for one of its prompts. `render`
    says where in the prompt a mark in its messages is. Raises ApiError."""
    ttls = [_ttl(fields, "cache_control"), *_retention(fields)]
    options = Fields(fields.object("prompt_cache_options"), "prompt_cache_options")
    options.only(("mode", "ttl"), {})
    explicit = _one_of(options, "mode", MODES, "implicit") == "explicit"
    ttls.append(_seconds(options))
    stable = fields.integer("stable_prefix_tokens", None, 0, INT64_MAX)
    marks = list(_marks(fields)) if render else []
    if stable is None and "cache_control" in fields:
        stable = len(prompt)
    if stable is None and marks and render:
        stable = _num_before(marks[-1], fields.get("messages"), prompt, render)
    moves = Fields(fields.object("kv_transfer_params"), "kv_transfer_params")
    moves.only(("max_offload_tokens",), {})
    cache = Fields(fields.object("cache"), "cache")
    cache.only(("no-store",), {})
    return Hints(
        fields.text("prompt_cache_key", "", MAX_KEY_CHARACTERS),
        _longest(*ttls, *(ttl_s for _number, _part, ttl_s in marks)),
        stable,
        moves.integer("max_offload_tokens", None, 0, INT64_MAX),
        # At OpenAI too an explicit mode without any mark caches nothing.
        not (cache.boolean("no-store") or (explicit and not marks and stable is None)),
    )


def check_mark(fields: Fields) -> float | None:
    """The time to live that a message's or a part's marks ask for. Raises ApiError."""
    name = fields.param("prompt_cache_breakpoint")
    mark = Fields(fields.object("prompt_cache_breakpoint"), name)
    mark.only(("mode", "ttl"), {})
    _one_of(mark, "mode", ("explicit",), "explicit")
    return _longest(_seconds(mark), _ttl(fields, "cache_control"))


def _ttl(fields: Fields, name: str) -> float | None:
    if name not in fields:
        return None
    control = Fields(fields.object(name), fields.param(name))
    control.only(("type", "ttl"), {})
    control.required("type")
    _one_of(control, "type", ("ephemeral",), "")
    return _seconds(control) or TTLS_S["5m"]


def _longest(*ttls_s: float | None) -> float | None:
    return max((ttl_s for ttl_s in ttls_s if ttl_s is not None), default=None)


def _retention(fields: Fields) -> Iterator[float]:
    if "prompt_cache_retention" in fields:
        yield RETENTIONS_S[_one_of(fields, "prompt_cache_retention", tuple(RETENTIONS_S), "")]


def _seconds(fields: Fields) -> float | None:
    return TTLS_S[_one_of(fields, "ttl", tuple(TTLS_S), "")] if "ttl" in fields else None


def _one_of(fields: Fields, name: str, known: Sequence[str], default: str) -> str:
    value = fields.get(name) if name in fields else default
    if name in fields and value not in known:
        param, allowed = fields.param(name), ", ".join(known)
        raise ApiError(f"'{param}' is {shown(value)}; it may be {allowed}.", param)
    return str(value)


def _marks(fields: Fields) -> Iterator[tuple[int, int | None, float | None]]:
    """Of each mark in checked messages: message, part (None: the whole message), seconds."""
    for number, message in enumerate(fields.get("messages")):
        content = message.get("content")
        parts = content if isinstance(content, list) else []
        marked: list[tuple[int | None, Fields]] = [(at, Fields(p)) for at, p in enumerate(parts)]
        marked.append((None, Fields(message)))
        for at, owner in marked:
            if any(name in owner for name in MARKS):
                yield number, at, check_mark(owner)


def _num_before(
    mark: tuple[int, int | None, float | None],
    messages: Sequence[Mapping[str, Any]],
    prompt: Sequence[int],
    render: Render,
) -> int | None:
    """How many of the prompt's tokens come before a mark: those that a chat which ends there has
    too. None where the template takes no chat that does."""
    number, part, _ttl_s = mark
    last = dict(messages[number])
    if part is not None:
        last["content"] = last["content"][: part + 1]
    try:
        ids = render([*messages[:number], last])
    except RequestError:
        return None
    pairs = zip(ids, prompt, strict=False)
    return next((at for at, (a, b) in enumerate(pairs) if a != b), min(len(ids), len(prompt)))
