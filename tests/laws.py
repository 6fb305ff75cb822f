"""Laws that hold between calls, across the core's objects: none of them can be seen from inside
one object. `Slots` stands in for device memory and holds, for each token slot, the true prefix."""

from collections import Counter

from foreword.core.block import TOKEN_BYTES
from foreword.core.events import AllBlocksCleared, BlockRemoved, BlockStored
from foreword.core.lease import BlockState
from foreword.core.policies.runs import RunOrder
from foreword.core.tier import Kept


class Slots:
    """What each slot of each block holds: the chain root and all tokens up to it, or None."""

    def __init__(self, num_blocks, block_size):
        self.block_size = block_size
        self.held = [[None] * block_size for _ in range(num_blocks)]

    def copy(self, copy):
        for i in range(copy.num_tokens):
            assert self.held[copy.source][i] is not None, "copied what nobody wrote"
            self.held[copy.target][i] = self.held[copy.source][i]

    def compute(self, lease, start, num_tokens):
        """Write the KV of tokens from place `start` on, after reading all that come before, as
        attention does."""
        self.check(lease, start)
        for at in range(start, start + num_tokens):
            block, offset = divmod(at, self.block_size)
            truth = (lease.chain.root, *lease.chain.token_ids[: at + 1])
            self.held[lease.block_ids[block]][offset] = truth

    def block(self, block_id):
        """What a whole block holds, to be written elsewhere."""
        assert None not in self.held[block_id], "stored a block that is not full"
        return list(self.held[block_id])

    def check(self, lease, stop):
        for at in range(stop):
            block, offset = divmod(at, self.block_size)
            truth = (lease.chain.root, *lease.chain.token_ids[: at + 1])
            assert self.held[lease.block_ids[block]][offset] == truth, "wrong KV"


def nodes(cache):
    """All nodes of the index but the roots."""
    found = []
    pending = list(cache.index._roots.values())
    while pending:
        node = pending.pop()
        found += node.sorted_children
        pending += node.sorted_children
    return found


def check_pool(cache, leases):
    pool = cache.pool
    pins = [0] * pool.num_blocks
    for lease in leases:
        for block_id in lease.block_ids:
            pins[block_id] += 1
        if lease.copy is not None:
            pins[lease.copy.source] += 1
    for block_ids in cache.pins.held.values():
        for block_id in block_ids:
            pins[block_id] += 1
    assert len({one for held in cache.pins.held.values() for one in held}) <= cache.pins.most
    assert pins == pool.pins, "a pin without a lease, or a lease without its pin"
    idle = [i for i, count in enumerate(pins) if count == 0 and pool.cached[i]]
    blank = [i for i, count in enumerate(pins) if count == 0 and not pool.cached[i]]
    assert pool.num_idle == len(idle)
    assert sorted(pool._blank) == blank
    assert pool.num_free == len(idle) + len(blank)
    assert pool.num_blank == len(blank)
    assert pool.num_leased == sum(count > 0 for count in pins)


def check_index(cache):
    index, pool = cache.index, cache.pool
    width = cache.block_size * TOKEN_BYTES
    all_nodes = nodes(cache)
    in_tree = [block_id for node in all_nodes for block_id in node.block_ids]
    assert sorted(in_tree) == [i for i in range(pool.num_blocks) if pool.cached[i]]
    candidates = {id(node) for node in index.leaves.candidates}
    leaves = {id(node) for node in all_nodes if not node.sorted_keys}
    assert candidates <= leaves, "a candidate that is no leaf"
    for root, tenant in index.leaves.tenants.items():
        own = [node for node in all_nodes if node.root == root]
        assert tenant.num_blocks == sum(len(node.block_ids) for node in own)
        assert tenant.offers.keys() == index.leaves.candidates & set(own)
    now_s = index.order.now_s
    for node in all_nodes:
        above = node.parent
        if above.parent is not None and node.term.end_s > now_s:
            assert above.term.end_s >= node.term.end_s, "a block is kept longer than one before it"
    check_runs(index.order, {node: len(node.hashes) for node in all_nodes})
    for root_hash, root in index._roots.items():
        assert root.hashes == [root_hash]
        assert root.sorted_keys, "an empty root is forgotten"
        check_children(root, width)
    for node in all_nodes:
        check_children(node, width)
        if node.hashes:
            assert len(node.hashes) == len(node.block_ids) == len(node.key) // width
            assert len(node.key) % width == 0
        else:
            assert len(node.block_ids) == 1
            assert 0 < len(node.key) < width
            assert not node.sorted_keys, "a partial block is a leaf"
        pinned = [pool.pins[i] > 0 for i in node.block_ids]
        assert pinned == sorted(pinned, reverse=True), "a block outlives none of its children"
        if node.parent.block_ids and pinned[0]:
            assert pool.pins[node.parent.block_ids[-1]] > 0, "a pinned block's parent is pinned"
        if id(node) in leaves and not pinned[-1]:
            assert id(node) in candidates, "an idle leaf that nothing can evict"


def check_children(node, width):
    assert node.sorted_keys == sorted(node.sorted_keys)
    assert node.sorted_keys == [child.key[:width] for child in node.sorted_children]
    for left, right in zip(node.sorted_keys, node.sorted_keys[1:], strict=False):
        assert not right.startswith(left), "a block that another covers"
    full = {child.hashes[0]: child for child in node.sorted_children if child.hashes}
    assert node.children == full
    assert all(child.parent is node for child in node.sorted_children)


def check_leases(leases, block_size, loads=()):
    leaders = [lease.leads for lease in leases if lease.leads is not None]
    assert len(leaders) == len(set(leaders))
    for lease in leases:
        full = lease.num_computed_tokens // block_size
        loading = {full} if lease.copy is not None else set()
        for load, start, stop in loads:
            if load.lease is lease:
                loading |= set(range(start, stop))
        assert min(loading, default=full) >= full
        states = list(lease.states)
        assert states[:full] == [BlockState.READY] * full
        assert {at for at, state in enumerate(states) if state == BlockState.LOADING} == loading
        if not lease.restored:
            assert BlockState.READY not in states[full:]
        assert full == len(states) or states[full] != BlockState.READY, "passed over what is ready"
        if lease.hints.cacheable:
            assert lease.num_published in (0, full)
        else:
            assert lease.leads is None, "others wait for what will not come"


def check_tier(tier):
    """Parents outlive their children, and nothing is kept that nothing can evict."""
    entries = tier._entries
    kept = {h for h, entry in entries.items() if entry.kept is not Kept.ABSENT}
    assert tier.num_blocks == len(kept)
    children = Counter(entry.parent for entry in entries.values() if entry.parent is not None)
    candidates = tier.leaves.candidates
    for root, tenant in tier.leaves.tenants.items():
        assert tenant.num_blocks == sum(entries[h].root == root for h in kept) <= tenant.quota
        assert tenant.offers.keys() == {h for h in candidates if entries[h].root == root}
    check_runs(tier.order, dict.fromkeys(kept, 1))
    for block_hash, entry in entries.items():
        assert entry.num_children == children[block_hash]
        assert entry.num_children or entry.kept is not Kept.ABSENT, "an entry of nothing"
        if not entry.num_children:
            assert block_hash in candidates, "a leaf that nothing can evict"
    assert all(not children[h] and h in kept for h in candidates), "a candidate that is no leaf"


def check_runs(order, spans):
    """What an order knows of runs is of blocks that are there, all of them, and no others."""
    if not isinstance(order, RunOrder):
        return
    assert order._runs.keys() <= spans.keys()
    num_blocks = Counter()
    for key, run in order._runs.items():
        num_blocks[run] += spans[key]
    assert all(run.num_blocks == num for run, num in num_blocks.items())
    kinds = Counter()
    for run, num in num_blocks.items():
        kinds[run.kind] += num
    assert order.num_blocks == [kinds[kind] for kind in range(len(order.queues))]
    assert sum(order.num_ghosts) == sum(ghost.num_blocks for ghost in order._ghosts.values())
    assert all(first == ghost.tails[-1] for first, ghost in order._ghosts.items())


class Listener:
    """Follows KV events, as a router would; `hashes` must equal what the index holds."""

    def __init__(self):
        self.parents = {}

    def hear(self, events):
        for event in events:
            if isinstance(event, BlockStored):
                assert len(event.token_ids) == len(event.block_hashes) * event.block_size
                parent = event.parent_block_hash
                assert parent is None or parent in self.parents, "a child before its parent"
                for block_hash in event.block_hashes:
                    assert block_hash not in self.parents, "stored twice"
                    self.parents[block_hash] = parent
                    parent = block_hash
            elif isinstance(event, BlockRemoved):
                for block_hash in event.block_hashes:
                    del self.parents[block_hash]
                    assert block_hash not in self.parents.values(), "removed before its child"
            else:
                assert isinstance(event, AllBlocksCleared)
                self.parents.clear()

    def check(self, cache):
        assert set(self.parents) == {h for node in nodes(cache) for h in node.hashes}
