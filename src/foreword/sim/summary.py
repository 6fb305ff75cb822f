"""What is in a trace: how many requests, how long, and how much of it repeats."""

from collections.abc import Iterator
from dataclasses import dataclass, field

from foreword.sim.ids import prefixes
from foreword.sim.trace import Record, Trace

_NUM_PREFIXES_MAX = 4_000_000  # and their ids: half a gigabyte; more are left to a replay


@dataclass(slots=True)
class Repeats:
    """Full blocks of prompts, and those that a cache without limits would have had; a token counts
    where its block does. Generated tokens count on neither side."""

    block_tokens: int
    num_blocks: int = 0
    num_repeated_blocks: int = 0
    has_prefix_ids: bool = True  # each id is always that of the same prefix
    _known: set[int] = field(default_factory=set)  # prefixes, with all that they begin with
    _ids: set[int] = field(default_factory=set)  # with their tenants' numbers above bit 32
    _tenants: dict[str, int] = field(default_factory=dict)

    @property
    def num_different_blocks(self) -> int:
        return len(self._known)

    @property
    def block_share(self) -> float:
        return self.num_repeated_blocks / self.num_blocks if self.num_blocks else 0.0

    def add(self, record: Record) -> None:
        num_full = record.num_tokens // self.block_tokens
        step = self.block_tokens // record.id_tokens
        ends = prefixes(record.ids, record.tenant)[step - 1 :: step][:num_full].tolist()
        known, low, high = self._known, 0, len(ends)
        while low < high:  # what a known prefix begins with is known
            middle = (low + high) // 2
            if ends[middle] in known:
                low = middle + 1
            else:
                high = middle
        self.num_blocks += num_full
        self.num_repeated_blocks += low
        known.update(ends[low:])
        if record.id_tokens > 1 and self.has_prefix_ids:
            tenant = self._tenants.setdefault(record.tenant, len(self._tenants)) << 32
            new = {tenant | one for one in record.ids[low:num_full]}
            self.has_prefix_ids = len(new) == num_full - low and self._ids.isdisjoint(new)
            self._ids |= new


@dataclass(slots=True)
class Summary:
    """Of a whole trace. Shares are from 0 to 1."""

    num_requests: int = 0
    num_prompt_tokens: int = 0
    longest_prompt: int = 0
    num_output_tokens: int = 0
    num_sessions: int = 0  # 0: the trace names none
    num_tenants: int = 0
    span_s: float = 0.0  # from the first arrival to the last
    repeats: Repeats | None = None  # None: too many blocks to keep them all
    num_observed: int = 0  # requests that say how many of their tokens were cached
    num_observed_tokens: int = 0  # of their prompts
    num_cached_tokens: int = 0
    num_ttfts: int = 0

    @property
    def cached_share(self) -> float | None:
        """As it was observed, of the prompt tokens of the requests that say it."""
        if not self.num_observed_tokens:
            return None
        return self.num_cached_tokens / self.num_observed_tokens

    @property
    def repeated_share(self) -> float | None:
        """Of all prompt tokens, those of full blocks that came before: the most that a cache of
        prompts can have had."""
        if self.repeats is None:
            return None
        return self.repeats.num_repeated_blocks * self.repeats.block_tokens / self.num_prompt_tokens


def summary(trace: Trace, block_size: int = 16) -> Summary:
    """`block_size` counts for traces of token ids. Reads the trace once."""
    repeats: Repeats | None = Repeats(trace.id_tokens if trace.id_tokens > 1 else block_size)
    found = Summary()
    sessions, tenants = set(), set()
    for record in _counted(trace, found):
        if record.session:
            sessions.add(record.session)
        tenants.add(record.tenant)
        if repeats is not None:
            repeats.add(record)
            if repeats.num_different_blocks > _NUM_PREFIXES_MAX:
                repeats = None
    found.num_sessions, found.num_tenants, found.repeats = len(sessions), len(tenants), repeats
    return found


def _counted(trace: Trace, found: Summary) -> Iterator[Record]:
    for record in trace:
        found.num_requests += 1
        found.num_prompt_tokens += record.num_tokens
        found.longest_prompt = max(found.longest_prompt, record.num_tokens)
        found.num_output_tokens += record.num_output_tokens
        found.span_s = record.arrival_s
        found.num_ttfts += record.ttft_s is not None
        if record.num_cached_tokens is not None:
            found.num_observed += 1
            found.num_observed_tokens += record.num_tokens
            found.num_cached_tokens += record.num_cached_tokens
        yield record
