"""ForewordPolicy inside vLLM's own manager of its CPU tier, beside vLLM's LRU and ARC."""

import os
import warnings
from pathlib import Path
from random import Random

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed here: make test-engines")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # vLLM's own
    from vllm.v1.kv_offload.base import LookupResult, ReqContext, make_offload_key
    from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager
    from vllm.v1.kv_offload.cpu.policies.base import ChunkStatus

from laws import check_tier
from vllm_policy import POLICIES, Replay, made_up, read_trace

# Public data that may lie beside a checkout.
SHARED = Path(__file__).parents[3] / "shared" / "traces"
TRACE = Path(os.environ.get("FOREWORD_TRACE", SHARED / "mooncake_fast25_conversation.jsonl.gz"))
CHUNK = 16  # tokens


def key(name, group=0):
    return make_offload_key(name.encode().ljust(32, b"."), group)


def keys(names, group=0):
    return [key(name, group) for name in names]


class Driver:
    """vLLM's manager with our policy, and the law after each call."""

    def __init__(self, capacity):
        self.manager = CPUOffloadingManager(capacity, "ForewordPolicy", "foreword.plugins.vllm")
        self.policy = self.manager._policy
        self.num_requests = 0

    def request(self, names, groups=1):
        self.num_requests += 1
        context = ReqContext(str(self.num_requests))
        for group in range(groups):
            for at, each in enumerate(keys(names, group)):
                context.set_offload_key_position(each, (at + 1) * CHUNK)
        self.manager.on_new_request(context)
        return context

    def store(self, context, offered, success=True):
        """Chunks that left, or None when there was no room."""
        store = self.manager.prepare_store(offered, context)
        self.check()
        if store is None:
            return None
        self.manager.complete_store(store.keys_to_store, context, success)
        self.check()
        return store.evicted_keys

    def run(self, names):
        """A whole request; what left for it."""
        context = self.request(names)
        gone = self.store(context, keys(names))
        self.manager.on_request_finished(context)
        self.check()
        return gone

    def found(self, names):
        context = ReqContext("look")
        results = [self.manager.lookup(each, context) for each in keys(names)]
        return "".join(
            name for name, result in zip(names, results, strict=True) if result is LookupResult.HIT
        )

    def check(self):
        check_tier(self.policy._tier)
        assert self.policy._tier.num_blocks == len(self.policy._chunks)
        assert all(self.policy.get(each) for each in self.policy._chunks)


def test_the_least_recent_leaf_leaves_first_and_takes_its_parents_after_it():
    driver = Driver(6)
    assert driver.run("abc") == []
    assert driver.run("xyz") == []
    driver.run("abc")
    assert driver.run("p") == keys("z")
    assert driver.run("qrs") == keys("yxc")
    assert driver.found("abcxyz") == "ab"


def test_a_request_keeps_what_it_found_while_it_stores():
    """vLLM notes uses when a request ends; its own LRU drops a here to make room for b."""
    driver = Driver(2)
    driver.run("a")
    driver.run("x")
    context = driver.request("ab")
    assert driver.store(context, keys("b")) == keys("x"), "a is older, but b comes after it"


def test_what_a_load_reads_counts_as_used():
    driver = Driver(3)
    driver.run("ab")
    driver.run("x")
    context = driver.request("ab")
    driver.manager.prepare_load(keys("ab"), context)
    driver.manager.complete_load(keys("ab"), context)
    assert driver.run("p") == keys("x"), "b was used since, though its request has not ended"


def test_pinned_chunks_and_all_above_them_stay():
    driver = Driver(4)
    driver.run("abcd")
    context = driver.request("abcd")
    driver.manager.prepare_load(keys("c"), context)
    assert driver.run("xy") is None, "only d can leave: a and b come before c, which is read"
    assert driver.found("abcd") == "abcd", "refused, and nothing changed"
    assert driver.run("x") == keys("d")
    driver.manager.complete_load(keys("c"), context)
    assert driver.run("yz") == keys("cb")


def test_a_parent_is_pinned_while_its_children_are_not():
    driver = Driver(3)
    driver.run("abc")
    driver.manager.prepare_load(keys("a"), driver.request("abc"))
    assert driver.run("xy") == keys("cb")
    assert driver.run("pqr") is None
    assert driver.found("axy") == "axy"


def test_what_was_offered_and_is_there_is_protected():
    driver = Driver(2)
    driver.run("a")
    driver.run("x")
    assert driver.run("ab") == keys("x")
    assert driver.found("ab") == "ab"


def test_the_front_of_a_prompt_longer_than_the_tier_stays():
    driver = Driver(3)
    context = driver.request("abcde")
    assert driver.store(context, keys("abc")) == []
    assert driver.store(context, keys("de")) is None
    assert driver.store(context, keys("de")) is None, "offered again without on_store_miss"
    driver.manager.on_request_finished(context)
    assert driver.policy._parents == {}, "nothing is remembered of what was never stored"
    assert driver.found("abcde") == "abc"
    assert driver.run("x") == keys("c")


def test_a_refused_chunk_that_is_stored_later_keeps_its_place():
    driver = Driver(3)
    driver.run("x")
    pinned = driver.request("x")
    driver.manager.prepare_load(keys("x"), pinned)
    context = driver.request("abc")
    assert driver.store(context, keys("ab")) == []
    assert driver.store(context, keys("c")) is None
    driver.manager.complete_load(keys("x"), pinned)
    assert driver.store(context, keys("c")) == keys("x")
    driver.manager.on_request_finished(context)
    assert driver.run("pqr") == keys("cba")


def test_a_failed_store_hides_what_comes_after_until_it_is_stored_again():
    driver = Driver(9)
    context = driver.request("abc")
    driver.store(context, keys("a"))
    store = driver.manager.prepare_store(keys("b"), context)
    driver.store(context, keys("c"))
    driver.manager.complete_store(store.keys_to_store, context, success=False)
    driver.check()
    driver.manager.on_request_finished(context)
    assert driver.found("abc") == "ac"
    driver.run("abc")
    assert driver.found("abc") == "abc"
    assert driver.run("defghij") == keys("c")


def test_a_chunk_whose_parent_was_never_here():
    driver = Driver(3)
    context = driver.request("abc")
    driver.store(context, keys("c"))
    driver.manager.on_request_finished(context)
    driver.run("ab")
    assert driver.found("abc") == "abc"
    assert driver.run("xyz") == keys("cba")


def test_groups_are_chains_of_their_own():
    driver = Driver(6)
    context = driver.request("abc", groups=2)
    driver.store(context, keys("abc") + keys("abc", group=1))
    driver.manager.on_request_finished(context)
    assert driver.run("wxyz") == [key("c"), key("b"), key("a"), key("c", 1)]


def test_a_tail_cut_short_is_no_parent():
    """Where vLLM stores a part of a chunk, its end is no multiple of a chunk's tokens."""
    driver = Driver(4)
    context = driver.request("abc")
    context.set_offload_key_position(key("t"), 2 * CHUNK + 5)
    driver.store(context, keys("abct"))
    driver.manager.on_request_finished(context)
    entries = driver.policy._tier._entries
    assert [entries[each].parent for each in keys("abct")] == [b"\0\0\0\0", *keys("abb")]


def test_a_key_inserted_twice_has_the_last_chunk():
    driver = Driver(2)
    context = driver.request("a")
    chunks = [ChunkStatus(0), ChunkStatus(1)]
    driver.policy.insert(key("a"), chunks[0])
    driver.policy.insert(key("a"), chunks[1], context)  # as vLLM 0.33 calls it
    driver.check()
    assert driver.policy.get(key("a")) is chunks[1]
    driver.policy.remove(key("never here"))


def test_touch_reaches_the_last_of_each_group():
    driver = Driver(4)
    driver.run("ab")
    driver.run("xy")
    driver.manager.touch(keys("abc"), driver.request("abc"))
    assert driver.run("p") == keys("y")


def test_reset_forgets_all():
    driver = Driver(3)
    context = driver.request("abc")
    driver.manager.prepare_store(keys("abc"), context)
    driver.manager.reset_cache()
    driver.check()
    assert driver.found("abc") == ""
    assert driver.run("xyz") == []


@pytest.mark.parametrize("seed", range(20))
def test_any_order_of_calls_keeps_the_laws(seed):
    """Requests at a time, loads that pin, stores that fail; a parent is never gone before a chunk
    that was stored after it, unless the store of the parent itself failed."""
    random = Random(seed)
    driver = Driver(random.randint(3, 12))
    manager, policy = driver.manager, driver.policy
    loads, stores, contexts = [], [], []
    for _ in range(150):
        names = [random.choice("ab") for _ in range(random.randint(1, 7))]
        chain = ["".join(names[: at + 1]) for at in range(len(names))]
        context = driver.request(chain)
        contexts.append(context)
        ready = 0
        while ready < len(chain) and manager.lookup(key(chain[ready]), context).name == "HIT":
            ready += 1
        if ready and random.random() < 0.7:
            manager.prepare_load(keys(chain[:ready]), context)
            loads.append((keys(chain[:ready]), context))
        before = dict(policy._chunks)
        store = manager.prepare_store(keys(chain[ready:]), context)
        if store is None:
            assert policy._chunks == before
        else:
            stores.append((store.keys_to_store, context))
            entries = policy._tier._entries
            gone = set(store.evicted_keys)
            assert not gone & {entries[each].parent for each in policy._chunks}
            assert all(before[each].ref_cnt == 0 for each in gone)
        for pending, complete in ((loads, manager.complete_load), (stores, complete_store(driver))):
            while pending and random.random() < 0.6:
                complete(*pending.pop(random.randrange(len(pending))))
                driver.check()
        while contexts and random.random() < 0.6:
            manager.on_request_finished(contexts.pop(0))
        driver.check()
    for each in contexts:
        manager.on_request_finished(each)
    assert policy._parents == {}


def complete_store(driver):
    random = Random(driver.num_requests)

    def complete(stored, context):
        driver.manager.complete_store(stored, context, success=random.random() < 0.8)

    return complete


@pytest.mark.parametrize("num_running", [1, 8])
def test_made_up_prompts_leave_no_orphan(num_running):
    prompts = made_up(1, 300, 60)
    outcomes = {policy: Replay(policy, 900, prompts, num_running).run() for policy in POLICIES}
    assert outcomes["ForewordPolicy"].orphans_max == 0
    assert outcomes["ForewordPolicy"].num_found > 0
    assert max(outcomes["arc"].orphans_max, outcomes["lru"].orphans_max) > 0, (
        "else it shows nothing"
    )


@pytest.mark.skipif(
    not TRACE.exists(), reason="no trace: FOREWORD_TRACE may name one, see tools/vllm_policy.py"
)
@pytest.mark.parametrize("capacity", [1000, 10000])
def test_a_real_trace_leaves_no_orphan_and_finds_no_less_than_lru(capacity):
    prompts = read_trace(TRACE)
    lru = Replay("lru", capacity, prompts).run()
    ours = Replay("ForewordPolicy", capacity, prompts).run()
    assert ours.orphans_max == 0
    assert ours.num_refused == lru.num_refused
    assert ours.num_found >= lru.num_found
