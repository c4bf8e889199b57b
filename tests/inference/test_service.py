"""Many clients of one generator, without a model and without HTTP."""

from __future__ import annotations

import threading
import time
from functools import partial
from typing import Any

import pytest
import torch

from deepspeed.inference.scheduling.requests import NotFiniteError, SamplingParams
from deepspeed.inference.serving.service import (
    BusyError,
    ClosedError,
    Commands,
    Service,
    Services,
    Update,
    broadcast,
)
from deepspeed.inference.serving.text import TextStream
from tests.inference.standin import REPLY, Bytes, Parrot, stream
from tests.parallel.tensor.threads import ThreadGroup, run_ranks

EXPECTED = list(REPLY.encode())


def params(new: int = 8, **more: Any) -> SamplingParams:
    return SamplingParams(max_new_tokens=new, **more)


def tokens(updates: list[Update]) -> list[int]:
    return [update.token for update in updates if update.token is not None]


def test_clients_on_many_threads_get_their_own_tokens() -> None:
    engine = Parrot()
    service = Service(engine).start()
    found: dict[int, list[Update]] = {}

    def client(number: int) -> None:
        found[number] = list(stream(service, [number + 1] * (1 + number % 7), params(1 + number % 11)))

    threads = [threading.Thread(target=client, args=(number,)) for number in range(40)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    for number in range(40):
        assert tokens(found[number]) == EXPECTED[: 1 + number % 11]
        assert found[number][-1].reason == "length"
    service.close()
    assert engine.scheduler.blocks.pool.num_free == 256 and service.state()["requests"] == 0
    text = Services({"m": service}).metrics()
    assert 'deepspeed_requests_total{model_name="m",reason="length"} 40' in text
    assert 'deepspeed_time_to_first_token_seconds_count{model_name="m"} 40' in text
    assert 'deepspeed_free_blocks{model_name="m"} 256' in text


def test_a_closed_stream_frees_its_blocks() -> None:
    engine = Parrot(delay=0.002)
    service = Service(engine).start()
    updates = stream(service, [1, 2, 3], params(900))
    assert next(updates).token == EXPECTED[0]
    updates.close()
    wait_for(lambda: engine.scheduler.blocks.pool.num_free == 256)
    assert not engine.has_work
    service.close()


def test_more_requests_than_it_takes_are_refused() -> None:
    service = Service(Parrot(delay=0.002), max_requests=2).start()
    updates: list[Update] = []
    tickets = [service.submit([1], params(900), updates.append) for _ in range(2)]
    with pytest.raises(BusyError, match="2 requests"):
        service.submit([1], params(), updates.append)
    with pytest.raises(ValueError, match="exceed the maximum sequence length of 1024"):
        service.submit([1], params(2000), updates.append)
    service.cancel(tickets[0])
    wait_for(lambda: any(update.reason == "cancelled" for update in updates))
    service.submit([1], params(2), updates.append)
    service.close(drain=False)
    assert sum(update.reason is not None for update in updates) == 3


def test_closing_serves_what_is_there_and_takes_no_more() -> None:
    service = Service(Parrot(delay=0.001)).start()
    updates: list[Update] = []
    service.submit([1], params(30), updates.append)
    closing = threading.Thread(target=service.close)
    closing.start()
    wait_for(lambda: not service.healthy)
    with pytest.raises(ClosedError, match="shutting down"):
        service.submit([1], params(), updates.append)
    closing.join(30)
    assert tokens(updates) == (EXPECTED * 2)[:30] and updates[-1].reason == "length"


def test_closing_does_not_wait_forever() -> None:
    service = Service(Parrot(delay=0.01)).start()
    updates: list[Update] = []
    service.submit([1], params(1000), updates.append)
    service.close(timeout=0.1)
    assert updates[-1].reason == "cancelled"


def test_a_failure_is_told_to_everyone() -> None:
    service = Service(Parrot(delay=0.005, fails_at=4)).start()
    streams = [stream(service, [1], params(50)) for _ in range(3)]
    for updates in streams:
        with pytest.raises(ClosedError, match="RuntimeError: the device is gone"):
            list(updates)
    assert not service.healthy
    with pytest.raises(ClosedError, match="has failed"):
        service.submit([1], params(), print)
    service.close()


def test_an_answer_may_end_without_another_token() -> None:
    """The sampler says so: its grammar is whole, or the logits are not finite, which no other client notices."""
    engine = Parrot(cuts={97: "stop", 98: "failed"})
    service = Service(engine).start()
    told: dict[int, list[Update]] = {first: [] for first in (97, 98, 1)}
    for first, updates in told.items():
        service.submit([first], params(), updates.append)
    service.close()
    whole, failed, other = told.values()
    assert [each.reason for each in whole] == [None, None, None, "stop"] and tokens(whole) == EXPECTED[:3]
    assert [each.reason for each in failed] == [None, None, None, "failed"]
    assert isinstance(failed[-1].error, NotFiniteError)
    assert tokens(other) == EXPECTED[:8] and other[-1].reason == "length"
    assert engine.scheduler.blocks.pool.num_free == 256 and service.state()["requests"] == 0


def test_a_listener_that_raises_harms_nobody() -> None:
    def broken(update: Update) -> None:
        raise ValueError("no")

    service = Service(Parrot()).start()
    service.submit([1], params(), broken)
    assert tokens(list(stream(service, [1], params()))) == EXPECTED[:8]
    service.close()


def test_other_ranks_do_the_same() -> None:
    """Cancelled requests as well."""

    def rank(group: ThreadGroup) -> tuple[list[int], int]:
        engine = Parrot()
        service = Service(engine, announce=partial(broadcast, group, torch.device("cpu")))
        found: list[Update] = []
        if group.rank == 0:
            service.start()
            cancelled = stream(service, [5], params(900))
            next(cancelled)
            cancelled.close()
            found = list(stream(service, [1, 2], params(5, temperature=0.5, stop_token_ids=(7,))))
            service.close()
        else:
            service.follow()
        return tokens(found), engine.scheduler.counts.forwards

    (first, forwards), (_, same) = run_ranks(2, rank)
    assert first == EXPECTED[:5] and forwards == same


def test_commands_arrive_as_they_were() -> None:
    commands = Commands([(3, [1, 2], params(4, stop_token_ids=(1, 9), seed=5))], [1, 2], True)
    assert Commands.from_bytes(commands.to_bytes()) == commands


def said(text: str, *stops: str) -> tuple[list[str], bool]:
    stream = TextStream(Bytes().decode, stops)
    parts = [stream.add(token) for token in text.encode()]
    return [*parts, stream.finish()], stream.stopped


def test_text_comes_in_whole_characters() -> None:
    parts, _ = said("aü🙂b")
    assert "".join(parts) == "aü🙂b" and all("\ufffd" not in part for part in parts)
    assert parts[0] == "a"


def test_what_never_becomes_a_character_is_told_at_the_end() -> None:
    stream = TextStream(Bytes().decode)
    assert [stream.add(0xF0), stream.finish()] == ["", "\ufffd"]


def test_nonsense_is_told_after_some_time() -> None:
    """A model that makes bytes that are no characters: the text does not wait for its end."""
    stream = TextStream(Bytes().decode)
    parts = [stream.add(0x80) for _ in range(200)]
    assert sum(map(len, parts)) >= 150 and max(map(len, parts)) < 40


def test_a_stop_that_begins_in_one_token_and_ends_in_others() -> None:
    """Tokens of several characters, cut within the stop, within characters, and with text after it."""
    pieces = {1: "one ü", 2: "<|", 3: "en", 4: "d|", 5: "> more", 6: "<|en"}

    def decode(tokens: list[int]) -> str:
        return "".join(pieces[each] for each in tokens)

    stream = TextStream(decode, ["<|end|>"])
    assert [stream.add(each) for each in (1, 6, 2, 3)] == ["one ü", "", "<|en", ""]
    assert [stream.add(each) for each in (4, 5)] == ["", ""] and stream.stopped and stream.finish() == ""


def test_a_stop_is_not_part_of_the_text() -> None:
    parts, stopped = said("one two END three", "END", "never")
    assert "".join(parts) == "one two " and stopped
    parts, stopped = said("one EN two E", "END")
    assert "".join(parts) == "one EN two E" and not stopped
    assert "".join(said("abcabd", "abd", "")[0]) == "abc"


def wait_for(holds: Any, seconds: float = 10.0) -> None:
    until = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < until, "it did not happen"
        time.sleep(0.002)
