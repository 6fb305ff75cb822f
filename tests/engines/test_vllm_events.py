"""vLLM's KV events and ours: its classes read what we send, we read what it sends, and follow a
running engine to the block."""

import asyncio
import json
import time
import warnings
from random import Random

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed here: make test-engines")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # vLLM's own
    import msgspec
    from vllm.distributed import kv_events as vllm

from foreword.core.events import AllBlocksCleared, BlockRemoved, BlockStored
from foreword.core.wire import EventBatch, decode_batch, encode_batch, replay_endpoint
from speaker import Ear, endpoint, listening

A, B = b"\xaa" * 32, b"\xbb" * 32
OURS = EventBatch(
    1.5,
    (
        BlockStored((A, B), None, (1, 2, 300, 70000), 2, "GPU", 0),
        BlockStored((A,), B, (), 2, "CPU"),
        BlockRemoved((B,), "GPU", 1),
        AllBlocksCleared(),
    ),
    rank=3,
)
KNOWN_TO_OLD = ("block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium")
PROMPTS = 24
BLOCK_SIZE = 32


def theirs(kinds=vllm):
    more = () if kinds is not vllm else (None,)
    return [
        kinds.BlockStored([A, B], None, [1, 2, 300, 70000], 2, None, "GPU", *more),
        kinds.BlockRemoved([B], "GPU"),
        kinds.AllBlocksCleared(),
    ]


def test_vllm_reads_what_we_send():
    raw = msgspec.msgpack.encode(encode_batch(OURS))
    batch = msgspec.msgpack.decode(raw, type=vllm.KVEventBatch)
    assert (batch.ts, batch.data_parallel_rank) == (1.5, 3)
    stored, moved, removed, cleared = batch.events
    assert stored == vllm.BlockStored(
        [A, B], None, [1, 2, 300, 70000], 2, None, "GPU", None, group_idx=0
    )
    assert moved == vllm.BlockStored([A], B, [], 2, None, "CPU", None)
    assert removed == vllm.BlockRemoved([B], "GPU", group_idx=1)
    assert cleared == vllm.AllBlocksCleared()


def test_we_read_what_vllm_sends():
    full = vllm.BlockStored(
        [7, 2**64 - 1], 5, [1, 2], 1, 4, "CPU", "lora", [("lora", "salt"), None], 2, "full", 9
    )
    events = [*theirs(), full, vllm.BlockRemoved([7], "CPU", 2, "LOCAL", "tier")]
    for batch in (vllm.KVEventBatch(1.5, events), vllm.KVEventBatch(1.5, events, 3)):
        found = decode_batch(msgspec.msgpack.decode(msgspec.msgpack.encode(batch)))
        seven, parent = (number.to_bytes(8, "big") for number in (7, 5))
        assert found == EventBatch(
            1.5,
            (
                BlockStored((A, B), None, (1, 2, 300, 70000), 2),
                BlockRemoved((B,)),
                AllBlocksCleared(),
                BlockStored((seven, b"\xff" * 8), parent, (1, 2), 1, "CPU", 2),
                BlockRemoved((seven,), "CPU", 2),
            ),
            batch.data_parallel_rank,
        )


@pytest.mark.parametrize("events_as_maps", [True, False])
@pytest.mark.parametrize("batch_as_map", [True, False])
def test_structures_of_other_versions(batch_as_map, events_as_maps):
    """As vLLM and SGLang declared them before and after: the same fields, array_like or not."""

    class Kinds:
        pass

    for name, fields in (
        ("BlockStored", [*KNOWN_TO_OLD[:5], ("medium", str | None, None)]),
        ("BlockRemoved", ["block_hashes", ("medium", str | None, None)]),
        ("AllBlocksCleared", []),
    ):
        options = {"tag": True, "array_like": not events_as_maps, "omit_defaults": True}
        setattr(Kinds, name, msgspec.defstruct(name, fields, **options))
    batch = msgspec.defstruct("Batch", ["ts", "events"], array_like=not batch_as_map)
    raw = msgspec.msgpack.encode(batch(2.5, theirs(Kinds)))
    assert decode_batch(msgspec.msgpack.decode(raw)).events == (
        BlockStored((A, B), None, (1, 2, 300, 70000), 2),
        BlockRemoved((B,)),
        AllBlocksCleared(),
    )
    ours = encode_batch(OURS, batch_as_map=batch_as_map, events_as_maps=events_as_maps)
    kind = Kinds.BlockStored | Kinds.BlockRemoved | Kinds.AllBlocksCleared
    read = msgspec.convert(
        ours,
        msgspec.defstruct(
            "Read", [("ts", float), ("events", list[kind])], array_like=not batch_as_map
        ),
    )
    assert len(read.events) == 4


def test_vllm_s_publisher_fills_a_gap():
    """Its own answers, of thousands of batches: what its sockets lose is asked for again."""
    at = endpoint()
    bound = at.replace("127.0.0.1", "*")
    publisher = vllm.ZmqEventPublisher(0, bound, replay_endpoint(at))
    count = 5000

    async def work():
        for seq in range(count):
            removed = vllm.BlockRemoved([seq], "GPU")
            publisher.publish(vllm.KVEventBatch(time.time(), [removed]))
        while publisher._event_queue.qsize():
            await asyncio.sleep(0.05)
        async with listening(at) as ear:
            assert await ear.numbers(count) == list(range(count))

    try:
        asyncio.run(work())
    finally:
        publisher.shutdown()


class Prefixes:
    """What the events say can be reused: the tokens up to the end of each block."""

    def __init__(self):
        self.tokens = {}  # by hash
        self.num_removed = 0

    def hear(self, events):
        for event in events:
            if isinstance(event, BlockStored):
                tokens = self.tokens[event.parent_block_hash] if event.parent_block_hash else ()
                for at, block_hash in enumerate(event.block_hashes):
                    first = at * event.block_size
                    tokens += event.token_ids[first : first + event.block_size]
                    self.tokens[block_hash] = tokens
            elif isinstance(event, BlockRemoved):
                self.num_removed += len(event.block_hashes)
                for block_hash in event.block_hashes:
                    del self.tokens[block_hash]
            else:
                self.tokens.clear()

    def longest(self, prompt):
        """How many tokens of a prompt are known; its last one is computed anyway."""
        known = set(self.tokens.values())
        num_blocks = 0
        while (num_blocks + 1) * BLOCK_SIZE < len(prompt) and (
            tuple(prompt[: (num_blocks + 1) * BLOCK_SIZE]) in known
        ):
            num_blocks += 1
        return num_blocks * BLOCK_SIZE


@pytest.mark.parametrize("as_integers", ["1", "0"])
def test_what_a_running_vllm_reuses_is_what_its_events_say(start_vllm, tiny_model, as_integers):
    """Of 24 prompts in a cache of 768 tokens: what the events say is reused, before each is sent,
    is what vLLM then says that it reused."""
    at = endpoint()
    config = {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": at.replace("127.0.0.1", "*"),
        "replay_endpoint": replay_endpoint(at),
    }
    server = start_vllm(
        tiny_model,
        *("--max-model-len", "512", "--num-gpu-blocks-override", "24"),
        *("--kv-events-config", json.dumps(config)),
        VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES=as_integers,
        VLLM_SERVER_DEV_MODE="1",
    )
    random, prefixes = Random(0), Prefixes()

    async def settle(ear: Ear) -> None:
        """Until nothing more comes: the events of a request may follow its answer."""
        while True:
            try:
                news = await asyncio.wait_for(ear.queue.get(), 0.5)
            except TimeoutError:
                return
            assert news.note is None, news
            assert not news.num_unknown
            prefixes.hear(news.events)

    async def work():
        prompts, predicted, reused = [[]], [], []
        async with listening(at) as ear:
            for _ in range(PROMPTS):
                base = random.choice(prompts[-6:])
                prompt = base[: random.randrange(len(base) + 1)]
                prompt = [*prompt, *(random.randrange(10, 500) for _ in range(100))][:400]
                prompts.append(prompt)
                predicted.append(prefixes.longest(prompt))
                answer = await asyncio.to_thread(server.complete, prompt, 4)
                reused.append(answer["usage"]["prompt_tokens_details"]["cached_tokens"])
                await settle(ear)
            assert predicted == reused
            assert sum(reused) > 500
            assert prefixes.num_removed > 20
            # vLLM says so with the events of its next step.
            await asyncio.to_thread(server.ask, "/reset_prefix_cache", {})
            await asyncio.to_thread(server.complete, prompts[-1], 4)
            await settle(ear)
            left = dict(prefixes.tokens)
            assert len(left) == (len(prompts[-1]) + 3) // BLOCK_SIZE
        async with listening(at) as ear:  # who comes late hears all of it again
            prefixes.tokens = {}
            await settle(ear)
            assert prefixes.tokens == left

    asyncio.run(work())
