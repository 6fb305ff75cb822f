"""Sessions of coding agents, one object each: kv-cache-tester and cc-traces.

The shape is callanjfox/kv-cache-tester's (docs/trace_replay_tester.md): `id`, `block_size`,
`hash_id_scope`, `requests` with `t` in seconds from the session's start, `in`, `out`, `hash_ids` of
the full blocks alone; entries of type `subagent` have requests of their own. `hash_runs` writes the
ids as [first, how many] pairs.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from foreword.sim.formats.fields import count, number, objects, prompt_tokens, text
from foreword.sim.formats.reading import Format, Lengths, Reader, Reading
from foreword.sim.pieces import Bad
from foreword.sim.trace import Record


class Sessions(Reader):
    """Reads one session at a time."""

    def __init__(self, reading: Reading) -> None:
        self._reading = reading
        self._block_size = reading.options.block_size or 64
        self._seen: set[str] = set()

    def read(self, item: Mapping[str, Any]) -> Iterator[Record | Lengths]:
        name = text(item, "id")
        if not name:
            raise Bad("the session has no id")
        if name in self._seen:
            raise Bad(f"there is a session {name!r} already, and its ids mean other blocks")
        scope = text(item, "hash_id_scope") or "local"
        if scope not in ("local", "global"):
            raise Bad(f"hash_id_scope is {scope!r}, not local or global")
        id_tokens = count(item, "block_size", default=self._block_size)
        if not id_tokens:
            raise Bad("its blocks have a size of 0")
        requests = objects(item, "requests")
        if not requests:
            raise Bad("the session has no requests")
        start_s = self._reading.start_s()
        tenant = name if scope == "local" else ""
        yield from self._requests(requests, name, tenant, id_tokens, start_s)
        self._seen.add(name)

    def _requests(
        self, requests: list[dict[str, Any]], name: str, tenant: str, id_tokens: int, start_s: float
    ) -> Iterator[Record]:
        for request in requests:
            t = number(request, "t")
            if t is None or t < 0:
                raise Bad("a request has no t from 0")
            if "requests" in request:
                inner = objects(request, "requests")
                first = min((number(one, "t") or 0.0 for one in inner), default=0.0)
                # Some count from the session's start, some from the agent's own.
                shift_s = t if first < t else 0.0
                agent = f"{name}/{text(request, 'agent_id')}"
                yield from self._requests(inner, agent, tenant, id_tokens, start_s + shift_s)
            else:
                yield self._request(request, name, tenant, id_tokens, start_s + t)

    def _request(
        self, request: Mapping[str, Any], name: str, tenant: str, id_tokens: int, arrival_s: float
    ) -> Record:
        num_tokens = prompt_tokens(request, "in")
        ids = self._reading.ids
        if "hash_runs" in request:
            blocks = ids.runs(request["hash_runs"], -(-num_tokens // id_tokens))
        else:
            blocks = ids.numbers(request.get("hash_ids"))
        ttft_s = number(request, "ttft")
        if ttft_s is not None and ttft_s < 0:
            raise Bad(f"ttft is {ttft_s}, not from 0")
        return Record(
            num_tokens,
            ids.prompt(blocks, num_tokens, id_tokens),
            id_tokens,
            arrival_s,
            count(request, "out", default=0),
            session=name,
            tenant=f"{tenant} {text(request, 'model')}".strip(),  # models share no KV
            ttft_s=ttft_s,
        )


FORMATS = (
    Format(
        "kv-cache-tester", lambda item: item.keys() >= {"id", "requests", "block_size"}, Sessions
    ),
)
