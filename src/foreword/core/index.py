"""RadixIndex: which prefixes the device holds, to the token.

A tree per chain root. A node is a run of consecutive full blocks, or one partial block (tokens but
no hash, always a leaf). Chained hashes make a walk cheap: where the last hash of a run agrees, the
whole run does. Below a node the children's first blocks are sorted by tokens and none is a prefix
of another, so the longest common run of the next few tokens is with a neighbour of their place.

Eviction is leaf first whatever the policy: only ends of leaves leave. A node is offered when it
becomes a leaf.
"""

from bisect import bisect_left
from collections.abc import Sequence

from foreword.core.block import TOKEN_BYTES, BlockHash, BlockId, Chain
from foreword.core.leaves import NO_TERM, Leaves
from foreword.core.policy import LRU, Order


class Node:
    """`hashes` is empty for a partial block; `key` holds the tokens of all its blocks."""

    __slots__ = (
        "added",
        "block_ids",
        "children",
        "hashes",
        "key",
        "last_used",
        "parent",
        "root",
        "sorted_children",
        "sorted_keys",
        "term",
    )

    def __init__(
        self,
        parent: "Node | None",
        hashes: list[BlockHash],
        block_ids: list[BlockId],
        key: bytes,
    ) -> None:
        self.parent = parent
        self.hashes = hashes
        self.block_ids = block_ids
        self.key = key
        self.root: BlockHash = parent.root if parent is not None else hashes[0]
        self.added = self.last_used = 0
        self.term = NO_TERM
        self.children: dict[BlockHash, Node] = {}  # full blocks only
        self.sorted_keys: list[bytes] = []  # first block's tokens of each child, partial ones too
        self.sorted_children: list[Node] = []


class RadixIndex:
    """Blocks by prefix. Knows nothing of pins: its caller decides what may be cut."""

    def __init__(self, block_size: int, order: Order[Node] | None = None) -> None:
        self._width = block_size * TOKEN_BYTES
        self._roots: dict[BlockHash, Node] = {}
        self.order = LRU.order(0) if order is None else order
        self.leaves: Leaves[Node] = Leaves(self.order)
        self._clock = 0

    def root(self, root_hash: BlockHash) -> Node:
        """Where chains of this root start. Kept only once it has children."""
        root = self._roots.get(root_hash)
        return root if root is not None else Node(None, [root_hash], [], b"")

    def walk(
        self, node: Node, hashes: Sequence[BlockHash], start: int, stop: int
    ) -> tuple[Node, list[BlockId]]:
        """Follow hashes[start:stop] down from the end of `node`.

        Returns the node where it ends, split so that it ends exactly there, and the blocks passed.
        """
        block_ids: list[BlockId] = []
        while start < stop:
            child = node.children.get(hashes[start])
            if child is None:
                break
            matched = _common_run(child.hashes, hashes, start, stop)
            if matched < len(child.hashes):
                child = self._split(child, matched)
            block_ids += child.block_ids
            start += matched
            node = child
        return node, block_ids

    def num_known(self, root_hash: BlockHash, hashes: Sequence[BlockHash], stop: int) -> int:
        """How many of hashes[:stop] a walk from the root would pass. Changes nothing."""
        node, start = self.root(root_hash), 0
        while start < stop and (child := node.children.get(hashes[start])) is not None:
            matched = _common_run(child.hashes, hashes, start, stop)
            start += matched
            if matched < len(child.hashes):
                break
            node = child
        return start

    def path(self, node: Node) -> tuple[Chain, list[BlockId]]:
        """All full blocks from the root to the end of `node`, and their slots."""
        above = [node]
        while (parent := above[-1].parent) is not None:
            above.append(parent)
        root, *nodes = reversed(above)
        hashes = [block_hash for one in nodes for block_hash in one.hashes]
        key = b"".join(one.key for one in nodes)
        chain = Chain.of_blocks(root.hashes[0], key, hashes)
        return chain, [block_id for one in nodes for block_id in one.block_ids]

    def closest(self, node: Node, key: bytes) -> tuple[Node, int] | None:
        """The child of `node` whose first block shares most leading tokens with `key`, and how
        many: at least 1. None where no child shares any."""
        place = bisect_left(node.sorted_keys, key)
        best: tuple[Node, int] | None = None
        for i in range(max(place - 1, 0), min(place + 1, len(node.sorted_keys))):
            shared = _common_tokens(node.sorted_keys[i], key)
            if shared > (best[1] if best else 0):
                best = node.sorted_children[i], shared
        return best

    def add(
        self, node: Node, hashes: list[BlockHash], block_ids: list[BlockId], key: bytes
    ) -> tuple[Node, list[BlockId]]:
        """Hang a run of full blocks below `node`, which must not have its first block yet.

        Returns the new node, and partial blocks that it makes redundant, already taken out.
        """
        assert hashes[0] not in node.children
        return self._hang(node, Node(node, hashes, block_ids, key))

    def add_partial(
        self, node: Node, block_id: BlockId, key: bytes
    ) -> tuple[Node, list[BlockId]] | None:
        """Hang one partial block below `node`. None where a child already covers its tokens."""
        assert 0 < len(key) < self._width
        if self.covering(node, key) is not None:
            return None
        return self._hang(node, Node(node, [], [block_id], key))

    def covering(self, node: Node, key: bytes) -> Node | None:
        """The child whose first block starts with all tokens of `key`."""
        place = bisect_left(node.sorted_keys, key)
        if place < len(node.sorted_keys) and node.sorted_keys[place].startswith(key):
            return node.sorted_children[place]
        return None

    def touch(self, node: Node, ttl_s: float = 0.0) -> None:
        """`node` and all above were used now, and are to be kept for so long from now on. Offers
        `node` for eviction if it is a leaf."""
        self._clock += 1
        path: list[Node] = []
        above = node
        while above.parent is not None:
            above.last_used = self._clock
            above.term = above.term.renewed(ttl_s, self.order.now_s)
            path.append(above)
            above = above.parent
        if self.order.by_path:
            self.order.used([(one, one.hashes) for one in reversed(path)], self._split)
        self.offer(node)

    def offer(self, leaf: Node) -> None:
        """Make a leaf a candidate for eviction, at the rank that it has now."""
        if _is_leaf(leaf):
            uses = leaf.added, leaf.last_used
            self.leaves.offer(leaf, leaf.root, leaf.term, uses, leaf.hashes)

    def pop_leaf(self, root: BlockHash | None = None, num_more: int = 0) -> Node:
        """The leaf that leaves first where chains of `root` want so many blocks more. It is no
        candidate again until offered."""
        leaf = self.leaves.pop_own(root, num_more) or self.leaves.pop()
        assert leaf is not None, "an idle leaf that nothing can evict"
        return leaf

    def cut(self, leaf: Node, num_blocks: int) -> tuple[list[BlockHash], list[BlockId]]:
        """Remove the last blocks of a leaf. What is a leaf afterwards is offered."""
        assert _is_leaf(leaf)
        self.leaves.withdraw(leaf)
        self.leaves.count(leaf.root, -num_blocks)
        keep = len(leaf.block_ids) - num_blocks
        hashes, block_ids = leaf.hashes[keep:], leaf.block_ids[keep:]
        self.order.removed(leaf, hashes, whole=not keep)
        del leaf.hashes[keep:], leaf.block_ids[keep:]
        if keep:
            leaf.key = leaf.key[: keep * self._width]
            self.offer(leaf)
            return hashes, block_ids
        parent = leaf.parent
        assert parent is not None
        if hashes:
            del parent.children[hashes[0]]
        self._unhang(parent, bisect_left(parent.sorted_keys, leaf.key[: self._width]))
        if parent.parent is not None:
            parent.term = max(parent.term, leaf.term)
            self.offer(parent)
        elif not parent.sorted_keys:
            del self._roots[parent.hashes[0]]
        return hashes, block_ids

    def _split(self, node: Node, num_blocks: int) -> Node:
        """Put the first blocks of `node` into a new node above it; `node` keeps its end, so
        whoever remembers it as the end of a chain is still right."""
        parent, at = node.parent, num_blocks * self._width
        assert parent is not None
        head = Node(parent, node.hashes[:num_blocks], node.block_ids[:num_blocks], node.key[:at])
        head.added, head.last_used = node.added, node.last_used
        head.term = node.term
        place = bisect_left(parent.sorted_keys, head.key[: self._width])
        parent.sorted_children[place] = parent.children[head.hashes[0]] = head
        node.parent, node.key = head, node.key[at:]
        del node.hashes[:num_blocks], node.block_ids[:num_blocks]
        head.children[node.hashes[0]] = node
        head.sorted_keys.append(node.key[: self._width])
        head.sorted_children.append(node)
        self.order.split(head, node)
        return head

    def _hang(self, parent: Node, child: Node) -> tuple[Node, list[BlockId]]:
        first = child.key[: self._width]
        place = bisect_left(parent.sorted_keys, first)
        redundant: list[BlockId] = []
        if place and first.startswith(parent.sorted_keys[place - 1]):
            place -= 1
            partial = self._unhang(parent, place)
            self.order.removed(partial, (), whole=True)
            redundant = partial.block_ids
            self.leaves.count(parent.root, -1)
        parent.sorted_keys.insert(place, first)
        parent.sorted_children.insert(place, child)
        if child.hashes:
            parent.children[child.hashes[0]] = child
        if parent.parent is None:
            self._roots[parent.hashes[0]] = parent
        self.leaves.withdraw(parent)
        self.leaves.count(parent.root, len(child.block_ids))
        self._clock += 1
        child.added = self._clock
        return child, redundant

    def _unhang(self, parent: Node, place: int) -> Node:
        child = parent.sorted_children.pop(place)
        del parent.sorted_keys[place]
        child.parent = None
        self.leaves.withdraw(child)
        return child


def _is_leaf(node: Node) -> bool:
    return node.parent is not None and not node.sorted_keys


def _common_run(run: list[BlockHash], hashes: Sequence[BlockHash], start: int, stop: int) -> int:
    """How many leading hashes of `run` are hashes[start:stop]. Chained: agreement is a prefix."""
    size = min(len(run), stop - start)
    if run[size - 1] == hashes[start + size - 1]:
        return size
    return bisect_left(range(size), True, key=lambda i: run[i] != hashes[start + i])


def _common_tokens(left: bytes, right: bytes) -> int:
    size = min(len(left), len(right))
    for at in range(0, size, TOKEN_BYTES):
        if left[at : at + TOKEN_BYTES] != right[at : at + TOKEN_BYTES]:
            return at // TOKEN_BYTES
    return size // TOKEN_BYTES
