"""`foreword events`: what engines publish of their caches, a line for each event, until Ctrl-C."""

import argparse
import asyncio
import json
from collections.abc import Iterator
from typing import Any

from foreword.cli.failure import Failure
from foreword.core.events import AllBlocksCleared, BlockStored, KVEvent
from foreword.router.subscriber import News, Source, Subscription


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "url",
        nargs="+",
        metavar="ENDPOINT[,REPLAY]",
        help="where a worker publishes, such as tcp://127.0.0.1:5557, and where it is asked for "
        "old batches (the next port)",
    )
    parser.add_argument("--json", action="store_true", help="a JSON object in each line")


def run(args: argparse.Namespace) -> int:
    """Raises Failure for what is no endpoint."""
    try:
        sources = [Source.parse(text) for text in args.url]
    except ValueError as error:
        raise Failure(str(error), "usage") from error
    asyncio.run(_follow_all(sources, args.json))
    return 0


async def _follow_all(sources: list[Source], as_json: bool) -> None:
    async with asyncio.TaskGroup() as group:
        for source in sources:
            group.create_task(_follow(source, as_json))


async def _follow(source: Source, as_json: bool) -> None:
    async for news in Subscription(source).news():
        for fact in facts(news):
            print(json.dumps(fact) if as_json else line(fact), flush=True)


def facts(news: News) -> Iterator[dict[str, Any]]:
    """One for each event, and for what befell the stream."""
    head = {"worker": news.worker, "topic": news.topic.decode(errors="replace"), "batch": news.seq}
    if news.note is not None:
        yield {**head, "event": "Note", "note": news.note}
        return
    head |= {"time_s": news.time_s, "rank": news.rank, "replayed": news.replayed}
    for event in news.events:
        yield {**head, "event": type(event).__name__, **_fields(event)}
    if news.num_unknown:
        yield {**head, "event": "Unknown", "num_events": news.num_unknown}


def _fields(event: KVEvent) -> dict[str, Any]:
    if isinstance(event, AllBlocksCleared):
        return {}
    fields: dict[str, Any] = {"medium": event.medium, "group": event.group}
    fields["block_hashes"] = [block_hash.hex() for block_hash in event.block_hashes]
    if isinstance(event, BlockStored):
        parent = event.parent_block_hash
        fields["parent_block_hash"] = None if parent is None else parent.hex()
        fields["token_ids"] = list(event.token_ids)
        fields["block_size"] = event.block_size
    return fields


def line(fact: dict[str, Any]) -> str:
    """A fact for a person to read; hashes by their first digits."""
    topic = f" {fact['topic']}" if fact["topic"] else ""
    rank = f" rank {fact['rank']}" if fact.get("rank") is not None else ""
    old = " (replayed)" if fact.get("replayed") else ""
    return f"{fact['worker']}{topic}{rank} #{fact['batch']} {_said(fact)}{old}"


def _said(fact: dict[str, Any]) -> str:
    event = fact["event"]
    if event == "Note":
        return str(fact["note"])
    if event == "Unknown":
        return f"{fact['num_events']} events of kinds that are not known"
    if event == AllBlocksCleared.__name__:
        return "cleared everything"
    hashes = [text[:12] for text in fact["block_hashes"]]
    group = f" group {fact['group']}" if fact["group"] is not None else ""
    blocks = f"{len(hashes)} on {fact['medium']}{group}: {' '.join(hashes[:1] + hashes[1:][-1:])}"
    if event != BlockStored.__name__:
        return f"removed {blocks}"
    parent = fact["parent_block_hash"]
    after = f", after {parent[:12]}" if parent else ""
    return f"stored {blocks}{after}, {len(fact['token_ids'])} tokens"
