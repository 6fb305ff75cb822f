"""KVCache: the one state machine. Calls come in, effects go out, results are told back.

A request is admitted with a Lease, told `filled` as its tokens get their KV, and released. What is
contiguous and ready is published, so that later requests start from it. Effects are done by the
caller, who tells what came of them: `Copy` as filled, each `Load` as loaded or lost, each `Store`
as stored.
"""

from collections.abc import Mapping, Sequence
from enum import Enum

from foreword.core.block import TOKEN_BYTES, BlockHash, BlockId, Chain
from foreword.core.events import AllBlocksCleared, BlockRemoved, BlockStored, KVEvent
from foreword.core.index import Node, RadixIndex
from foreword.core.lease import BlockState, Copy, Lease, Load, Probe
from foreword.core.lower import LowerTiers
from foreword.core.pins import Pins
from foreword.core.place import Gain, Placement
from foreword.core.plan import ALONE, Present
from foreword.core.policies import DEFAULT
from foreword.core.policy import Policy
from foreword.core.pool import BlockPool
from foreword.core.request import NO_HINTS, Hints
from foreword.core.restore import Restores
from foreword.core.tier import Tier


class Refusal(Enum):
    """Why a request was not admitted. It holds nothing and asks again."""

    NO_ROOM = "no room"
    PASSED_OVER = "its next block is being computed by another request"


class KVCache:
    """Device blocks of one model, by prefix, and what the tiers below have of them, the fastest
    first. With `reuse` off it only hands out memory."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        reuse: bool = True,
        record_events: bool = False,
        tiers: Sequence[Tier] = (),
        policy: Policy = DEFAULT,
        placement: type[Placement] = Gain,
    ) -> None:
        self.block_size = block_size
        self.policy = policy
        self.pool = BlockPool(num_blocks)
        self.pins = Pins(self.pool, most=num_blocks // 4)
        self.index = RadixIndex(block_size, policy.order(num_blocks))
        self.reuse = reuse
        below = tuple(tiers) if reuse else ()
        self.restores = Restores(below)
        self.lower = LowerTiers(below, placement(below, num_blocks))
        self.num_evicted_blocks = 0  # since start
        self.now_s = 0.0
        self.record_events = record_events
        self._events: list[KVEvent] = []
        self._leaders: dict[BlockHash, Lease] = {}

    def num_known(self, chain: Chain) -> int:
        """How many full blocks of `chain` could be reused now, from the device and the tiers.
        Changes nothing."""
        stop = self._num_reusable(chain)
        start = self.index.num_known(chain.root, chain.hashes, stop)
        runs = self.restores.runs(chain, start, stop, {})
        return runs[-1][2] if runs else start

    def leader(self, chain: Chain) -> Lease | None:
        """Who computes the first block of `chain` that the device lacks, if somebody does."""
        at = self.index.num_known(chain.root, chain.hashes, self._num_reusable(chain))
        return self._leaders.get(chain.hashes[at]) if at < len(chain.hashes) else None

    def probe(self, chain: Chain) -> list[Probe]:
        """What to ask the shared tiers before `chain` is admitted: where nothing nearer has all."""
        asked = [at for at, tier in enumerate(self.lower.tiers) if tier.shared and tier.reads]
        start = self.num_known(chain) if asked else 0
        if start == self._num_reusable(chain):
            return []
        return [Probe(number, chain, start) for number in asked]

    def admit(
        self,
        chain: Chain,
        *,
        match: bool = True,
        elsewhere: Mapping[int, int] | None = None,
        present: Present = ALONE,
        hints: Hints = NO_HINTS,
    ) -> tuple[Lease, list[Copy | Load]] | Refusal:
        """Lease blocks for every token of `chain`, reusing the longest known prefix as far as that
        pays; without `match` nothing, for who must see every token computed. `elsewhere` is what
        Probes found: by tier, how many leading blocks of the chain it has of anybody's.

        At least the last token is left to compute: its logits are what the caller wants. The
        effects must be performed and reported, a Copy before any later token is filled.
        """
        assert len(chain) > 0
        node, matched = self._match(chain) if match else (self.index.root(chain.root), [])
        start = len(matched)
        if match and start < len(chain.hashes) and self._awaited(node, chain.hashes[start]):
            return Refusal.PASSED_OVER
        self.pool.pin(matched)
        num_fresh = self._num_blocks(len(chain)) - start
        if num_fresh > self.pool.num_free:
            self.pool.unpin(matched)
            return Refusal.NO_ROOM
        stop = self._num_reusable(chain) if match else start
        runs = self.restores.runs(chain, start, stop, elsewhere or {})
        plan = self.restores.plan(chain, start, runs, present)
        source = self._closest(node, chain, start) if match and not plan.loads else None
        if source is not None:
            self.pool.pin((source[0],))
        fresh = self._take(num_fresh, chain.root)
        if fresh is None and source is not None:
            # The copy's source is pinned only for the copy: do without it rather than wait.
            self.pool.unpin((source[0],))
            source = None
            fresh = self._take(num_fresh, chain.root)
        assert fresh is not None
        states = bytearray(bytes([BlockState.READY]) * start + bytes(len(fresh)))  # others: BLANK
        end = node if start else None
        num_reused = start * self.block_size
        lease = Lease(chain, matched + fresh, states, num_reused, num_reused, start, end)
        lease.elsewhere, lease.hints, lease.matched = elsewhere or {}, hints, match
        lease.plan, lease.admitted_s = plan, self.now_s
        self.lower.admitted(lease, start, runs)
        self._lead(lease)
        effects: list[Copy | Load] = [*self.restores.load(lease, stop)]
        if source is not None:
            lease.copy = Copy(source[0], fresh[0], source[1])
            lease.num_reused_tokens += source[1]
            states[start] = BlockState.LOADING
            effects.append(lease.copy)
        return lease, effects

    def extend(self, lease: Lease, num_tokens: int) -> bool:
        """Grow the lease to cover `num_tokens` tokens. False, and nothing changed: no room."""
        missing = self._num_blocks(num_tokens) - len(lease.block_ids)
        if missing <= 0:
            return True
        fresh = self._take(missing, lease.chain.root)
        if fresh is None:
            return False
        lease.block_ids += fresh
        lease.states += bytes(missing)
        return True

    def filled(self, lease: Lease, num_tokens: int) -> None:
        """The next `num_tokens` tokens of the lease now hold valid KV, copied or computed."""
        assert not lease.released
        if lease.copy is not None:
            assert num_tokens == lease.copy.num_tokens, "the copy comes before any computing"
            self.pool.unpin((lease.copy.source,))
            lease.states[lease.num_published] = BlockState.BLANK
            lease.copy = None
        lease.num_computed_tokens += num_tokens
        assert lease.num_computed_tokens <= min(
            len(lease.chain), len(lease.block_ids) * self.block_size
        )
        self._advance(lease)

    def computable(self, lease: Lease) -> list[tuple[int, int]]:
        """Stretches of tokens, first and end, that can be computed next, in one go: all that is
        lacking before the next block that is awaited from a tier. What is late may be taken back
        for that."""
        if self.now_s >= lease.late_at_s:
            self.restores.reconsider(lease)
        size, states, found = self.block_size, lease.states, []
        at, stop = lease.num_computed_tokens, len(lease.chain)
        loading = states.find(BlockState.LOADING, at // size)
        if loading >= 0:
            stop = loading * size
        while at < stop:
            ready = states.find(BlockState.READY, at // size)
            end = min(ready * size, stop) if ready >= 0 else stop
            if end > at:
                found.append((at, end))
            blank = states.find(BlockState.BLANK, end // size)
            at = blank * size if ready >= 0 and blank >= 0 else stop
        lease.wait(-1 if found else loading, self.now_s)
        return found

    def loaded(self, load: Load, start: int, stop: int) -> None:
        """Blocks `start` to `stop` of a load are in the lease's slots, whole and verified."""
        lease = load.lease
        assert all(map(load.awaits, range(start, stop)))
        lease.states[start:stop] = bytes([BlockState.READY]) * (stop - start)
        num_tokens = (stop - start) * self.block_size
        lease.num_reused_tokens += num_tokens
        lease.restored[load.tier] = lease.restored.get(load.tier, 0) + num_tokens
        self._advance(lease)

    def lost(self, load: Load, start: int, stop: int, *, gone: bool) -> None:
        """Blocks `start` to `stop` of a load do not come: late, or `gone` from the tier, missing or
        damaged. They will be computed; what is gone is stored again then."""
        lease = load.lease
        if gone:
            self.lower.forget(load, start, stop)
        if not (load.probe or lease.released):
            part = lease.states[start:stop]
            lease.states[start:stop] = part.replace(
                bytes([BlockState.LOADING]), bytes([BlockState.BLANK])
            )

    def publish_end(self, lease: Lease) -> Node | None:
        """Let others copy from the lease's unfinished last block, as far as it is computed.

        Done at release anyway; done earlier for samples that share a prompt. Returns the deepest
        node that covers what the lease computed, None where there is none.
        """
        first = lease.num_published * self.block_size
        shares = self.reuse and lease.hints.cacheable
        if not shares or lease.num_computed_tokens == first:
            return lease.end
        key = bytes(lease.chain.key[first * TOKEN_BYTES : lease.num_computed_tokens * TOKEN_BYTES])
        block_id = lease.block_ids[lease.num_published]
        parent = self._end(lease)
        added = self.index.add_partial(parent, block_id, key)
        if added is None:
            return self.index.covering(parent, key)
        node, redundant = added
        self.pool.drop(redundant)
        self.pool.keep((block_id,))
        return node

    def release(self, lease: Lease) -> None:
        """End the lease, at any time. What was published stays, idle, until evicted."""
        assert not lease.released, "released twice"
        lease.released = True
        self._follow(lease)
        if lease.copy is not None:
            self.pool.unpin((lease.copy.source,))
        leaf = self.publish_end(lease)
        self.pool.unpin(lease.block_ids)
        if leaf is not None:
            self.index.touch(leaf, lease.hints.ttl_s or 0.0)
        self.lower.ended(lease)

    def clear(self) -> bool:
        """Forget everything cached, in our part of the tiers too, and pins. False, and nothing
        changed, while any block is leased."""
        if sum(self.pool.pins) > sum(map(len, self.pins.held.values())):
            return False
        self.pool = BlockPool(self.pool.num_blocks)
        self.pins = Pins(self.pool, self.pins.most)
        now_s, leaves = self.index.order.now_s, self.index.leaves
        self.index = RadixIndex(self.block_size, self.policy.order(self.pool.num_blocks))
        self.index.order.now_s = now_s
        self.index.leaves = leaves.emptied(self.index.order)
        self.lower.clear()
        self.tick(self.now_s)
        if self.record_events:
            self._events.append(AllBlocksCleared())
        return True

    def pin(self, chain: Chain) -> int:
        """Let the full blocks of `chain` that are in the device stay there until unpinned, however
        long nobody uses them; returns how many. Raises PinsFull."""
        return self.pins.pin(self.index, chain)

    def unpin(self, chain: Chain) -> bool:
        """End the pin of `chain`, or of as much of it as there was. False: there was none."""
        return self.pins.unpin(chain)

    def limit(self, root: BlockHash, quotas: Sequence[int]) -> None:
        """Chains of a root, so one tenant's, may have so many blocks in the device and in each
        tier. Before any of them is known. A running request has the room that it needs; what it
        leaves beyond the quota leaves first."""
        self.index.leaves.limit(root, quotas[0])
        for tier, quota in zip(self.lower.tiers, quotas[1:], strict=True):
            tier.leaves.limit(root, quota)

    def tick(self, now_s: float) -> None:
        """What time it is, by any clock that does not run backwards: some policies go by it."""
        self.now_s = self.restores.now_s = self.index.order.now_s = now_s
        self.lower.tick(now_s)

    def take_events(self) -> list[KVEvent]:
        """Events since the last call, oldest first; always empty unless recording."""
        events, self._events = self._events, []
        return events

    def _num_blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def _match(self, chain: Chain) -> tuple[Node, list[BlockId]]:
        root = self.index.root(chain.root)
        return self.index.walk(root, chain.hashes, 0, self._num_reusable(chain))

    def _num_reusable(self, chain: Chain) -> int:
        """How many blocks may be known already: the last token is computed."""
        return (len(chain) - 1) // self.block_size

    def _closest(self, node: Node, chain: Chain, start: int) -> tuple[BlockId, int] | None:
        """The slot whose first tokens continue `chain` after block `start`, and how many do."""
        first = start * self.block_size
        last = min(first + self.block_size, len(chain) - 1)
        found = self.index.closest(node, bytes(chain.key[first * TOKEN_BYTES : last * TOKEN_BYTES]))
        return None if found is None else (found[0].block_ids[0], found[1])

    def _take(self, num_blocks: int, root: BlockHash) -> list[BlockId] | None:
        """Pin that many slots for a chain of `root`, evicting idle blocks where needed. None: not
        even then."""
        if num_blocks > self.pool.num_free:
            return None
        missing = num_blocks - self.pool.num_blank
        removed: list[BlockHash] = []
        pinned: list[Node] = []
        while missing > 0:
            leaf = self.index.pop_leaf(root, num_blocks)
            alike = missing if self.index.order.by_run else 1
            idle = self.pool.num_idle_at_end(leaf.block_ids, alike)
            if idle == 0:
                pinned.append(leaf)
                continue
            self.lower.evicted(self.index, leaf, idle)
            hashes, block_ids = self.index.cut(leaf, idle)
            self.pool.drop(block_ids)
            removed += reversed(hashes)
            missing -= idle
            self.num_evicted_blocks += idle
        for leaf in pinned:
            self.index.offer(leaf)
        if removed and self.record_events:
            self._events.append(BlockRemoved(tuple(removed)))
        return self.pool.take(num_blocks)

    def _publish(self, lease: Lease, full: int) -> None:
        """Make blocks up to `full` findable. Where another request published the same blocks
        first, the lease changes over to those, so that each block is held once."""
        start, hashes = lease.num_published, lease.chain.hashes
        node, known = self.index.walk(self._end(lease), hashes, start, full)
        if known:
            self.pool.pin(known)
            self.pool.unpin(lease.block_ids[start : start + len(known)])
            lease.block_ids[start : start + len(known)] = known
            start += len(known)
        if start < full:
            block_ids = lease.block_ids[start:full]
            width = self.block_size * TOKEN_BYTES
            key = bytes(lease.chain.key[start * width : full * width])
            node, redundant = self.index.add(node, hashes[start:full], block_ids, key)
            self.pool.drop(redundant)
            self.pool.keep(block_ids)
            self._stored(lease.chain, start, full)
        lease.num_published, lease.end = full, node
        self._follow(lease)
        self._lead(lease)
        self.lower.keep(lease)

    def _advance(self, lease: Lease) -> None:
        """Pass what a load has filled, and publish what is contiguous and ready."""
        size = self.block_size
        full = lease.num_computed_tokens // size
        states = lease.states
        while full < len(states) and states[full] == BlockState.READY:
            full += 1
            lease.num_computed_tokens = full * size
        states[lease.num_published : full] = bytes([BlockState.READY]) * (
            full - lease.num_published
        )
        if self.reuse and lease.hints.cacheable and full > lease.num_published:
            self._publish(lease, full)

    def _end(self, lease: Lease) -> Node:
        return lease.end if lease.end is not None else self.index.root(lease.chain.root)

    def _lead(self, lease: Lease) -> None:
        """Others whose next block is this lease's next wait for it, unless someone leads there."""
        hashes = lease.chain.hashes
        if self.reuse and lease.hints.cacheable and lease.num_published < len(hashes):
            leads = hashes[lease.num_published]
            if self._leaders.setdefault(leads, lease) is lease:
                lease.leads = leads

    def _awaited(self, node: Node, block_hash: BlockHash) -> bool:
        """Whether a block below `node` is being computed and not known yet. A prompt that ends with
        a known block leaves its last token to compute, so such a block may have a leader too."""
        return block_hash in self._leaders and block_hash not in node.children

    def _follow(self, lease: Lease) -> None:
        if lease.leads is not None:
            del self._leaders[lease.leads]
            lease.leads = None

    def _stored(self, chain: Chain, start: int, stop: int) -> None:
        if not self.record_events:
            return
        size = self.block_size
        parent = chain.hashes[start - 1] if start else None
        tokens = tuple(chain.token_ids[start * size : stop * size])
        self._events.append(BlockStored(tuple(chain.hashes[start:stop]), parent, tokens, size))
