"""The live record and page alone: contents, size, access, and that nothing in them can stop a run. With an engine:
`tests/engine/test_live_page.py`; in a browser: `test_live_browser.py`."""

from __future__ import annotations

import errno
import json
import math
import os
import re
import socket
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from deepspeed.base.logging import logger
from deepspeed.comm.pending import explanation
from deepspeed.config.sections.monitor import LiveConfig, MonitorConfig
from deepspeed.observe.live import history as history_module
from deepspeed.observe.live import jobs, recorder, server
from deepspeed.observe.live.history import MetricHistory, summarize_rows
from deepspeed.observe.live.ranks import slowest_of
from deepspeed.observe.live.record import (
    COLUMNS,
    FIRST,
    HIGH,
    LAST,
    LOSS,
    LOW,
    NAME,
    NORM,
    SAMPLES,
    LiveStep,
    StepWindow,
    merged,
    read_record,
)
from deepspeed.observe.live.recorder import LiveRecorder, RecordSink
from deepspeed.observe.live.server import PageServer, token_for
from deepspeed.tools import top
from deepspeed.tools.live import Follower

MB = 1e6
DAY_S, STEPS_PER_S = 86_400, 10
SPANS = (12.345, 23.456, 20.123, 3.3333, 4.5678)


class Clock:
    def __init__(self) -> None:
        self.s = 1_700_000_000.0

    def __call__(self) -> float:
        return self.s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def warnings_of(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    told: list[str] = []
    monkeypatch.setattr(logger, "warning", lambda text, *args, **_: told.append(text))
    return told


def loss_at(number: int) -> float:
    return 3.0 + math.sin(number) / 7


def step_at(number: int, clock: Clock, *, loss: float | None = None, spans: Any = None) -> LiveStep:
    loss = loss_at(number) if loss is None else loss
    rate, norm = 3.1415926e-4 / number, 1.0 + math.cos(number) / 9
    return LiveStep(number, clock.s, 0.1, 32, 32 * number, loss, rate, norm, spans)


def record(recording: LiveRecorder, clock: Clock, numbers: Any, *, step_s: float = 2.0) -> None:
    """Record these steps, each in its own row."""
    for number in numbers:
        clock.s += step_s
        recording.put_step(step_at(number, clock)._replace(seconds=step_s))
        recording.look()


def rows_of(history: MetricHistory) -> list[Any]:
    return history.answer(-1, -1)["rows"]


def events_of(history: MetricHistory) -> list[tuple[str, int]]:
    return [(each["event"], each["step"]) for each in history.answer(-1, -1)["events"]]


# ---- the record


def test_a_row_says_what_its_steps_had_in_common(clock: Clock) -> None:
    window = StepWindow()
    for number in range(1, 8):
        clock.s += 0.1
        window.add(step_at(number, clock, spans=SPANS))
    row = window.take_row(memory_bytes=1000)
    losses = [loss_at(number) for number in range(1, 8)]
    assert (row[FIRST], row[LAST], row[SAMPLES]) == (1, 7, 7 * 32)
    assert row[COLUMNS.index("tokens")] == 32 * sum(range(1, 8)), "sequences may become longer"
    assert row[COLUMNS.index("seconds")] == pytest.approx(0.7)
    assert row[LOSS] == pytest.approx(sum(losses) / 7, rel=1e-4)
    assert (row[LOW], row[HIGH]) == (
        pytest.approx(min(losses), rel=1e-4),
        pytest.approx(max(losses), rel=1e-4),
    )
    assert row[NORM] == pytest.approx(1 + sum(math.cos(n) for n in range(1, 8)) / 63, rel=1e-4)
    assert row[-5:] == [pytest.approx(ms, rel=1e-4) for ms in SPANS]
    assert len(row) == len(COLUMNS)


def test_merged_rows_are_the_row_of_all_steps(clock: Clock) -> None:
    steps = [step_at(number, clock, spans=SPANS) for number in range(1, 12)]

    def row(some: list[LiveStep]) -> list[Any]:
        window = StepWindow()
        for step in some:
            window.add(step)
        return window.take_row(1000)

    assert merged(row(steps[:3]), row(steps[3:])) == [pytest.approx(value, rel=1e-4) for value in row(steps)]


def simulate(folder: Path, seconds: int, curves: int) -> int:
    """Bytes of the record of a run with 10 steps per second that also has these curves and 64 ranks."""
    clock = Clock()
    values = {f"Train/Experts/layer_0/expert_{i}": 0.123456 for i in range(curves)}
    ranks = [
        {"rank": i, "step": 0, "arrival_ms": 95.123, "memory": 12345678901, "seen": 0.0} for i in range(64)
    ]
    recording = LiveRecorder(
        folder, {"ranks": 64}, lambda: {"memory": 12345678901, "ranks": ranks}, now=clock
    )
    number = 0
    for _ in range(seconds):
        for _ in range(STEPS_PER_S):
            number += 1
            clock.s += 1 / STEPS_PER_S
            recording.put_step(step_at(number, clock, spans=SPANS))
        if curves:
            recording.put_curves(values)  # of several steps the newest count
        recording.look()
    recording.look(last=True)
    last = rows_of(recording.history)[-1]
    assert last[LAST] == number
    return (folder / NAME).stat().st_size


def test_an_hour_takes_less_than_its_share_of_a_day(tmp_path: Path) -> None:
    """Rows only become fewer with time (`StepWindow.width_s`), so no hour takes more than the first."""
    assert simulate(tmp_path, 1800, 300) * 48 < 50 * MB


@pytest.mark.slow
def test_a_day_of_ten_steps_per_second_takes_less_than_50_mb(tmp_path: Path) -> None:
    assert simulate(tmp_path, DAY_S, 300) < 50 * MB


def test_what_is_known_of_a_long_run_is_bounded(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history_module, "MAX_ROWS", 64)
    monkeypatch.setattr(history_module, "MAX_VALUES", 100)
    history = MetricHistory()
    for number in range(1, 1001):
        window = StepWindow()
        window.add(step_at(number, clock))
        history.extend([window.take_row(None)])
        history.extend([{"curves": {"a": 1.0, "b": 2.0}, "t": 0, "step": number}])
    answer = history.answer(-1, -1)
    assert 32 <= len(answer["rows"]) <= 64
    assert sum(len(each["curves"]) for each in answer["curves"]) <= 100
    covered = [number for row in answer["rows"] for number in range(row[FIRST], row[LAST] + 1)]
    assert covered == list(range(1, 1001))
    assert answer["epoch"] > 0


def test_repeated_steps_replace_those_before_a_resume(tmp_path: Path, clock: Clock) -> None:
    first = LiveRecorder(tmp_path, {"ranks": 2}, now=clock)
    record(first, clock, range(1, 6))
    first.put_event("saved", 5, "a/global_step5")
    record(first, clock, range(6, 9))
    first.look(last=True)
    before = (tmp_path / NAME).read_bytes()

    second = LiveRecorder(tmp_path, {"ranks": 1}, now=clock)
    clock.s += 100
    second.put_event("loaded", 5, "a/global_step5")
    record(second, clock, range(6, 12))
    rows = rows_of(second.history)
    assert [(row[FIRST], row[LAST]) for row in rows] == [(n, n) for n in range(1, 12)]
    assert [row[0] for row in rows] == sorted(row[0] for row in rows)
    expected = [("start", 0), ("saved", 5), ("end", 8), ("loaded", 5), ("resume", 5)]
    assert events_of(second.history) == expected
    assert second.history.state["saved"] == {"step": 5, "text": "a/global_step5"}
    second.look(last=True)
    assert (tmp_path / NAME).read_bytes().startswith(before)  # nothing was rewritten

    follower = Follower(tmp_path / NAME)
    follower.look()
    assert rows_of(follower.history) == rows
    assert follower.history.state["run"] == {"ranks": 1}


def test_a_run_that_starts_is_not_shown_as_the_one_before(tmp_path: Path, clock: Clock) -> None:
    earlier = LiveRecorder(tmp_path, {"name": "earlier"}, now=clock)
    record(earlier, clock, range(1, 6))
    earlier.put_event("saved", 5, "a/global_step5")
    earlier.look(last=True)
    folder = tmp_path / "jobs"
    later = LiveRecorder(tmp_path, {"name": "later"}, entry=jobs.JobEntry({}, folder), now=clock)
    later.look()
    (job,) = jobs.running_jobs(folder)
    assert job["run"] == {"name": "later"} and job["losses"] == [] and job["step"] == 0
    assert not {"loss", "lr", "step_s", "samples_s", "saved"} & set(job)
    assert "starts" in top.row_of(job, clock())
    clock.s += 60
    record(later, clock, [6])
    clock.s += 60
    later.look()
    (job,) = jobs.running_jobs(folder)
    assert job["step"] == 6 and len(job["losses"]) == 6  # it continued
    later.look(last=True)


def test_a_resume_in_one_process_is_noticed_by_its_steps(tmp_path: Path, clock: Clock) -> None:
    recording = LiveRecorder(tmp_path, {}, now=clock)
    record(recording, clock, [*range(1, 7), *range(4, 10)])
    assert [row[LAST] for row in rows_of(recording.history)] == list(range(1, 10))
    assert ("resume", 3) in events_of(recording.history)


def test_a_checkpoint_ends_a_row(tmp_path: Path, clock: Clock) -> None:
    """So that a resume from it never has to divide one."""
    recording = LiveRecorder(tmp_path, {}, now=clock)
    for number in range(1, 5):
        recording.put_step(step_at(number, clock))
    recording.put_event("saved", 4, "there")
    recording.put_step(step_at(5, clock))
    recording.look(last=True)
    assert [(row[FIRST], row[LAST]) for row in rows_of(recording.history)] == [(1, 4), (5, 5)]


def test_another_run_in_the_same_folder_sets_the_record_aside(tmp_path: Path, clock: Clock) -> None:
    for _ in range(2):
        recording = LiveRecorder(tmp_path, {}, now=clock)
        record(recording, clock, range(1, 4))
        recording.look(last=True)
    assert [row[LAST] for row in rows_of(recording.history)] == [1, 2, 3]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["history-1.jsonl", NAME]


def test_a_cut_off_line_is_passed_over(tmp_path: Path, clock: Clock) -> None:
    first = LiveRecorder(tmp_path, {}, now=clock)
    record(first, clock, range(1, 5))
    first.look(last=True)
    with open(tmp_path / NAME, "ab") as file:
        file.write(b"[1700000100.0,5,5,0.1,3")
    second = LiveRecorder(tmp_path, {}, now=clock)
    record(second, clock, range(5, 8))
    second.look(last=True)
    rows = [entry for entry in read_record(tmp_path / NAME) if isinstance(entry, list)]
    assert [row[LAST] for row in rows] == list(range(1, 8))


def test_what_is_no_record_is_kept_and_not_continued(tmp_path: Path, clock: Clock) -> None:
    (tmp_path / NAME).write_text("my notes\n")
    recording = LiveRecorder(tmp_path, {}, now=clock)
    record(recording, clock, [1])
    recording.look(last=True)
    assert (tmp_path / "history-1.jsonl").read_text() == "my notes\n"
    with pytest.raises(ValueError, match="not a run record"):
        list(read_record(tmp_path / "history-1.jsonl"))


# ---- what cannot stop a run


def test_a_full_disk_is_said_once_and_tried_again(
    tmp_path: Path, clock: Clock, warnings_of: list[str]
) -> None:
    recording = LiveRecorder(tmp_path, {}, now=clock)
    record(recording, clock, range(1, 3))
    real = recording._file._file

    class Full:
        def tell(self) -> int:
            return real.tell()

        def write(self, data: bytes) -> int:
            if len(data) > 20:
                real.write(data[:20])
            raise OSError(errno.ENOSPC, "No space left on device")

    recording._file._file = Full()
    record(recording, clock, range(3, 40))
    assert len(warnings_of) == 1 and "cannot write the record" in warnings_of[0]
    assert len(rows_of(recording.history)) == 39  # the page continues
    recording._file._file = real
    record(recording, clock, range(40, 80))
    recording.look(last=True)
    kept = [entry[LAST] for entry in read_record(tmp_path / NAME) if isinstance(entry, list)]
    assert kept[:2] == [1, 2] and kept[-1] == 79 and kept == sorted(kept)


def test_a_folder_that_cannot_be_made(tmp_path: Path, clock: Clock, warnings_of: list[str]) -> None:
    (tmp_path / "file").write_text("")
    recording = LiveRecorder(tmp_path / "file", {}, now=clock)
    record(recording, clock, range(1, 5))
    assert len(warnings_of) == 1 and "cannot write the record" in warnings_of[0]
    assert len(rows_of(recording.history)) == 4


def test_two_jobs_do_not_write_to_one_record(
    tmp_path: Path, clock: Clock, warnings_of: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recorder, "PATIENCE_S", 3.0)
    first, second = LiveRecorder(tmp_path, {}, now=clock), LiveRecorder(tmp_path, {}, now=clock)
    record(first, clock, range(1, 3))
    record(second, clock, range(1, 6))
    assert len(warnings_of) == 1 and "monitor.live.folder" in warnings_of[0]
    assert [row[LAST] for row in rows_of(second.history)] == [1, 2, 3, 4, 5]
    first.look(last=True)
    assert [e[LAST] for e in read_record(tmp_path / NAME) if isinstance(e, list)] == [1, 2]


def test_any_error_of_the_thread_is_said_once(tmp_path: Path, clock: Clock, warnings_of: list[str]) -> None:
    def measure() -> dict[str, Any]:
        raise RuntimeError("no such device")

    recording = LiveRecorder(tmp_path, {}, measure, now=clock)
    record(recording, clock, range(1, 5))
    assert len(warnings_of) == 1 and "no such device" in warnings_of[0]


# ---- events and curves


def test_hangs_and_losses_that_are_no_numbers_are_events(tmp_path: Path, clock: Clock) -> None:
    recording = LiveRecorder(tmp_path, {}, now=clock)
    record(recording, clock, range(1, 3))
    explanation.text = "rank 0 waits for rank 1"
    try:
        recording.look()
        assert recording.history.state["hang"] == "rank 0 waits for rank 1"
    finally:
        explanation.text = ""
    recording.look()
    for number in (3, 4):
        clock.s += 2
        recording.put_step(step_at(number, clock, loss=math.nan))
    recording.look()
    assert events_of(recording.history) == [("start", 0), ("hang", 2), ("on", 2), ("loss", 3)]
    assert recording.history.state["hang"] == ""
    json.dumps(recording.history.answer(-1, -1), allow_nan=False)


def test_events_of_others_are_curves(tmp_path: Path, clock: Clock) -> None:
    recording = LiveRecorder(tmp_path, {}, now=clock)
    sink = RecordSink(recording, frozenset({"Train/Samples/lr"}))
    sink.write_events([("Eval/accuracy", torch.tensor(0.5), 10), ("Train/Samples/lr", 0.1, 10)])
    record(recording, clock, [1])
    curves = recording.history.answer(-1, -1)["curves"]
    assert [each["curves"] for each in curves] == [{"Eval/accuracy": 0.5}]


def test_a_visitor_gets_what_is_new(tmp_path: Path, clock: Clock) -> None:
    recording = LiveRecorder(tmp_path, {}, now=clock)
    record(recording, clock, range(1, 4))
    everything = recording.history.answer(-1, -1)
    record(recording, clock, range(4, 6))
    new = recording.history.answer(everything["epoch"], everything["number"])
    assert everything["all"] and not new["all"]
    assert [row[LAST] for row in new["rows"]] == [4, 5] and not new["events"]
    assert recording.history.answer(new["epoch"], new["number"])["rows"] == []
    record(recording, clock, range(3, 5))  # a resume: earlier rows have changed
    assert recording.history.answer(new["epoch"], new["number"])["all"]


def test_speeds_and_the_share_of_the_peak(clock: Clock) -> None:
    window = StepWindow()
    rows = []
    for number in range(1, 11):
        window.add(step_at(number, clock)._replace(seconds=0.5, samples=8, tokens=800))
        rows.append(window.take_row(7))
    run = {"flops_per_token": 6e6, "peak_flops": 1e11, "ranks": 2}
    standing = summarize_rows(rows, run)
    assert standing["step_s"] == 0.5 and standing["samples_s"] == 16 and standing["tokens_s"] == 1600
    assert standing["mfu"] == pytest.approx(1600 * 6e6 / 2e11)
    assert standing["memory"] == 7
    assert summarize_rows([], run) == {}


def test_the_slowest_rank_is_the_one_that_the_others_wait_for() -> None:
    def rows(*arrivals: float | None) -> list[dict[str, Any]]:
        return [{"rank": rank, "arrival_ms": ms} for rank, ms in enumerate(arrivals)]

    assert slowest_of(rows(10.0, 30.0, 11.0)) == 1
    assert slowest_of(rows(10.0, 10.1)) is None
    assert slowest_of(rows(10.0)) is None
    assert slowest_of(rows(None, 5.0, 9.0)) == 2


# ---- the server


@pytest.fixture
def history() -> MetricHistory:
    made = MetricHistory()
    made.set_state(step=3)
    return made


@pytest.fixture
def serve(history: MetricHistory) -> Iterator[Any]:
    made: list[PageServer] = []

    def start(host: str = "127.0.0.1", port: int = 0, token: str | None = None) -> PageServer:
        made.append(PageServer(history, host, port, token))
        return made[-1]

    yield start
    for each in made:
        each.close()


def get(url: str, **headers: str) -> tuple[int, Any, str]:
    try:
        with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=10) as answer:
            return answer.status, answer.headers, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.headers, error.read().decode()


def test_the_page_and_its_data(serve: Any) -> None:
    address = serve().address
    status, headers, text = get(address + "/")
    assert status == 200 and "<script>" in text and headers["Content-Type"].startswith("text/html")
    assert "default-src 'none'" in headers["Content-Security-Policy"]
    status, _, body = get(address + "/data?epoch=-1&since=-1")
    assert status == 200 and json.loads(body)["state"] == {"step": 3}
    assert get(address + "/data?epoch=x&since=%ff")[0] == 200
    assert get(address + "/../../etc/passwd")[0] == 404


def test_the_page_loads_nothing_from_elsewhere() -> None:
    text = Path(server.__file__).with_name("page.html").read_text(encoding="utf-8")
    assert re.findall(r"https?:|//[a-z0-9-]+\.[a-z]|@import|url\(", text.replace("'//'", "")) == []
    assert re.findall(r"(?:src|href)=\"(?!data:)", text) == []
    assert "innerHTML" not in text  # names of curves and errors are text


def test_a_page_without_visitors_sleeps(serve: Any) -> None:
    made = serve()
    with mock.patch.object(made._server, "handle_request", wraps=made._server.handle_request) as woken:
        assert get(made.address + "/data")[0] == 200
        assert get(made.address + "/data")[0] == 200
        time.sleep(0.3)
        made.close()
    assert woken.call_count == 2 and not made._thread.is_alive()


def test_a_token_is_wanted_and_never_logged(serve: Any, capfd: Any) -> None:
    token = "a-secret-0123456789"
    address = serve(token=token).address
    assert get(address + "/")[0] == 200  # the page has no data
    assert get(address + "/data")[0] == 401
    assert get(address + "/data", Authorization="Bearer wrong")[0] == 401
    assert get(address + "/data", Authorization=f"Bearer {token[:-1]}")[0] == 401
    assert get(address + f"/data?token={token}")[0] == 401  # not in addresses
    with mock.patch.object(server.hmac, "compare_digest", wraps=server.hmac.compare_digest) as compared:
        assert get(address + "/data", Authorization=f"Bearer {token}")[0] == 200
    assert compared.call_count == 1
    output = "".join(capfd.readouterr())
    assert token not in output and "/data" not in output


def test_without_a_token_only_pages_of_this_machine_may_ask(serve: Any) -> None:
    made = serve()
    assert get(made.address + "/data", Host="evil.example:80")[0] == 403
    assert get(made.address + "/data", Host="[")[0] == 403
    assert get(made.address + "/data", Host=f"localhost:{made.port}")[0] == 200


def test_which_servers_have_a_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(server.TOKEN_VARIABLE, raising=False)
    assert token_for("127.0.0.1", tmp_path) is None and token_for("localhost", tmp_path) is None
    assert token_for("::1", tmp_path) is None
    token = token_for("0.0.0.0", tmp_path / "run")
    assert token and len(token) >= 32
    assert (tmp_path / "run" / "token").stat().st_mode & 0o777 == 0o600
    assert token_for("0.0.0.0", tmp_path / "run") == token  # kept across a resume
    monkeypatch.setenv(server.TOKEN_VARIABLE, "mine")
    assert token_for("0.0.0.0", tmp_path) == token_for("127.0.0.1", tmp_path) == "mine"
    monkeypatch.setenv(server.TOKEN_VARIABLE, "Schlüssel")
    with pytest.raises(ValueError, match=f"{server.TOKEN_VARIABLE}: the token contains"):
        token_for("127.0.0.1", tmp_path)


def test_a_used_port_gives_the_next_one(serve: Any) -> None:
    first = serve()
    second = serve(port=first.port)
    assert second.port != first.port and get(second.address + "/data")[0] == 200


def test_an_address_of_another_machine_is_refused(history: MetricHistory) -> None:
    with pytest.raises(ValueError, match=r"monitor.live.host='203\.0\.113\.1'"):
        PageServer(history, "203.0.113.1", 0, "token")


def test_a_browser_that_goes_away_disturbs_nothing(serve: Any, capfd: Any) -> None:
    made = serve()
    for request in (
        b"",
        b"GET /data HTTP/1.1\r\n",
        b"GET /data HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"\xff\x00\r\n\r\n",
    ):
        with socket.create_connection(("127.0.0.1", made.port)) as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")  # a reset
            connection.sendall(request)
    assert get(made.address + "/data")[0] == 200
    assert "".join(capfd.readouterr()) == ""


# ---- the config


@pytest.mark.parametrize(
    ("written", "enabled", "port"),
    [
        (True, True, 8470),
        (False, False, 8470),
        ({"port": 0}, True, 0),
        ({"enabled": False, "port": 1}, False, 1),
    ],
)
def test_live_is_a_switch_or_an_object(written: Any, enabled: bool, port: int) -> None:
    live = MonitorConfig(live=written).live
    assert isinstance(live, LiveConfig) and (live.enabled, live.port) == (enabled, port)


@pytest.mark.parametrize("written", [{"prot": 1}, {"port": 70000}, "yes", {"peak_tflops": 0}, {"token": "x"}])
def test_mistakes_in_the_section(written: Any) -> None:
    with pytest.raises(ValueError):
        MonitorConfig(live=written)


# ---- the jobs of this machine


def job_state(**more: Any) -> dict[str, Any]:
    return {
        "run": {"name": "train.py", "ranks": 2, "total_steps": 100},
        "step": 40,
        "loss": 2.5,
        "losses": [5.0, 4.0, 3.0, 2.5],
        "tokens_s": 1234.0,
        "samples_s": 2.0,
        "step_s": 0.5,
        "memory": 2**30,
        "plan": {"line": 2**31},
        "slowest": 1,
        "now": 1000.0,
        "ranks": [{"rank": 0, "step": 40, "arrival_ms": 12.5, "memory": 2**30, "seen": 999.0}],
        "saved": {"step": 30, "text": "out/global_step30"},
        **more,
    }


def test_jobs_are_found_until_they_end(tmp_path: Path) -> None:
    folder = tmp_path / "runs"
    entry = jobs.JobEntry({"address": "http://127.0.0.1:1"}, folder)
    entry.write(job_state())
    assert folder.stat().st_mode & 0o777 == 0o700
    found = jobs.running_jobs(folder)
    assert [job["pid"] for job in found] == [os.getpid()] and found[0]["step"] == 40
    # The number of another process.
    assert jobs.running_jobs(folder, lambda pid: found[0]["started"] + 500) == []
    entry.write(job_state())
    assert jobs.running_jobs(folder, lambda pid: None) == []  # it has ended
    assert not list(folder.glob("*.json"))
    entry.write(job_state())
    entry.remove()
    assert jobs.running_jobs(folder) == [] and jobs.running_jobs(tmp_path / "none") == []


def test_a_folder_that_others_write_to_is_not_used(tmp_path: Path) -> None:
    folder = tmp_path / "runs"
    folder.mkdir()
    folder.chmod(0o777)
    jobs.JobEntry({}, folder).write(job_state())  # only `ds top` misses it
    assert list(folder.iterdir()) == []


def test_the_table_of_jobs() -> None:
    job = {"pid": 17, "started": 0.0, "folder": "live", "address": "http://127.0.0.1:8470", **job_state()}
    lines = list(top.plain([job], True, 1001.0))
    cells = lines[1].split()
    for expected in ("train.py", "17", "40/100", "2.5", "1234", "500", "1.00/2.00", "running", "0:00:30"):
        assert expected in cells, expected
    assert "slowest 1" in lines[1] and "█" in lines[1]
    assert any("last checkpoint at step 30" in line for line in lines)
    assert any("rank 0: step 40, 12.5 ms" in line and "seen 1 s ago" in line for line in lines)
    assert "silent" in "".join(top.plain([job], False, 1100.0))
    hanging = list(top.plain([{**job, "hang": "rank 0 waits"}], False, 1001.0))
    assert "hangs" in hanging[1] and "  rank 0 waits" in hanging
    assert list(top.plain([{"pid": 1, "started": 0.0}], True, 0.0))  # one that has said nothing yet


def test_rich_shows_the_same() -> None:
    console = pytest.importorskip("rich.console", reason="rich is not installed")
    job = {"pid": 17, "started": 0.0, "folder": "live", "address": None, **job_state(now=1e12)}
    with open(os.devnull, "w") as nowhere:
        made = console.Console(width=200, record=True, file=nowhere)
        made.print(top._pretty([job], False))
    text = made.export_text()
    for cell in top.row_of(job, 0.0):
        assert cell in text


def test_top_once_without_a_terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setenv(jobs.VARIABLE, str(tmp_path))
    monkeypatch.setattr(sys, "stdin", None)
    assert top.main(["--once"]) == 0
    assert "No run" in capsys.readouterr().out
    tmp_path.chmod(0o700)
    jobs.JobEntry({"address": None}).write(job_state())
    for arguments in ([], ["--ranks"]):  # no terminal: once, too
        assert top.main(arguments) == 0
        assert "train.py" in capsys.readouterr().out
    with (
        mock.patch.dict(sys.modules, {"rich.console": None}),
        mock.patch.object(top, "_is_terminal", return_value=True),
    ):
        assert top.main(["--once"]) == 0
    assert "train.py" in capsys.readouterr().out


@pytest.mark.parametrize("with_rich", [True, False])
def test_ctrl_c_ends_top_cleanly(
    with_rich: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    if with_rich:
        pytest.importorskip("rich.live", reason="rich is not installed")
    monkeypatch.setenv(jobs.VARIABLE, str(tmp_path))
    shown = mock.Mock(side_effect=[None, KeyboardInterrupt])
    with (
        mock.patch.dict(sys.modules, {} if with_rich else {"rich.console": None}),
        mock.patch.object(top, "_is_terminal", return_value=True),
        mock.patch.object(top.time, "sleep", shown),
    ):
        assert top.main([]) == 0
    assert shown.call_count == 2 and "Traceback" not in "".join(capsys.readouterr())


def test_sparklines() -> None:
    assert top.sparkline([1.0, 2.0]) == "▁█"
    assert top.sparkline([None, 1.0, math.nan]) == ""
    assert top.sparkline([3.0] * 5) == "▁" * 5
    assert len(top.sparkline([float(i) for i in range(60)])) == top.CURVE
