"""Chats kept as text: ShareGPT's conversations, and LMCache's traces of agents.

ShareGPT: a JSON array of `{"id", "conversations": [{"from": "human", "value"}, {"from": "gpt",
"value"}, ...]}`; WildChat's and others' rows have `conversation` or `conversations` with `role` and
`content`. Every turn of a user is a request, whose prompt is all that was said until then. LMCache
(lmcache-agent-trace): `timestamp` in µs, `input` and `output` as text, `session_id`.
"""

from collections.abc import Iterator, Mapping
from typing import Any, Final

from foreword.sim.formats.chat import content_segments
from foreword.sim.formats.fields import first_of, moment, objects, text
from foreword.sim.formats.reading import Format, Lengths, Reader, Reading, Said
from foreword.sim.pieces import Bad
from foreword.sim.trace import Record

TURN_S: Final = 60.0  # between two turns of a chat that has no times: someone reads and writes
_ROLES = {"human": "user", "gpt": "assistant", "chatgpt": "assistant", "bing": "assistant"}


class ShareGPT(Reader):
    """Reads one conversation at a time."""

    def __init__(self, reading: Reading) -> None:
        self._reading = reading

    def read(self, item: Mapping[str, Any]) -> Iterator[Record | Lengths]:
        turns = [_turn(turn) for turn in objects(item, "conversations", "conversation")]
        session = text(item, "id", "conversation_id", "conversation_hash")
        tenant = text(item, "model")
        num_users = sum(role == "user" for role, _ in turns)
        if not num_users:
            self._reading.notes["{n} conversations have no turn of a user"] += 1
            return
        known_s = moment(item, "timestamp")
        start_s = self._reading.start_s() if known_s is None else known_s
        self._reading.notes[f"{{n}} turns follow the turn before by {TURN_S:g} s: no times"] += (
            num_users - 1
        )
        said_so_far: list[str] = []
        for index, (role, segments) in enumerate(turns):
            said_so_far += [f"<|{role}|>\n", *segments]
            if role == "user":
                follows = turns[index + 1 : index + 2]
                answer = follows[0][1] if follows and follows[0][0] == "assistant" else []
                said = Said(start_s, session, tenant)
                yield self._reading.text_record([*said_so_far, "<|assistant|>\n"], answer, said)
                start_s += TURN_S


def _turn(turn: Mapping[str, Any]) -> tuple[str, list[str]]:
    role = text(turn, "from", "role")
    if not role:
        raise Bad("a turn does not say whom it is from")
    return _ROLES.get(role, role), content_segments(first_of(turn, "value", "content"))


class Agents(Reader):
    """Reads one call of a model at a time."""

    def __init__(self, reading: Reading) -> None:
        self._reading = reading

    def read(self, item: Mapping[str, Any]) -> Iterator[Record | Lengths]:
        prompt, answer = item.get("input"), item.get("output")
        if not isinstance(prompt, str) or not isinstance(answer, str):
            raise Bad("input and output are not both text")
        arrival_s = moment(item, "timestamp")
        if arrival_s is None:
            raise Bad("there is no timestamp")
        num_output_tokens = len(self._reading.tokens.ids([answer]))
        said = Said(arrival_s, text(item, "session_id"), num_output_tokens=num_output_tokens)
        # The prompts are flat text: where in the next one the answer stands again is not marked.
        yield self._reading.text_record([prompt], [], said)


FORMATS = (
    Format(
        "sharegpt",
        lambda item: isinstance(first_of(item, "conversations", "conversation"), list),
        ShareGPT,
    ),
    Format(
        "lmcache-agents",
        lambda item: item.keys() >= {"input", "output", "session_id"} and "model" not in item,
        Agents,
    ),
)
