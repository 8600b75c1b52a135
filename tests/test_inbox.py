"""The notification inbox, over real HTTP."""

from __future__ import annotations

import http.client
import json
import socket
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tunewatch.inbox import MAX_BODY_BYTES, Inbox, Notification, format_notification, read_notifications


def webhook(name: str = "TunewatchRunStalled", status: str = "firing", **annotations: str) -> dict[str, Any]:
    """What Alertmanager 0.25 posts, with one alert."""
    return {
        "version": "4",
        "groupKey": '{}/{run_id=~".+"}:{run_id="r1"}',
        "truncatedAlerts": 0,
        "status": status,
        "receiver": "run-critical",
        "groupLabels": {"run_id": "r1"},
        "commonLabels": {},
        "commonAnnotations": {},
        "externalURL": "http://127.0.0.1:9093",
        "alerts": [
            {
                "status": status,
                "labels": {"alertname": name, "severity": "critical", "run_id": "r1"},
                "annotations": annotations,
                "startsAt": "2026-01-02T03:04:05Z",
                "endsAt": "0001-01-01T00:00:00Z",
                "generatorURL": "http://127.0.0.1:9090/graph",
                "fingerprint": "0123456789abcdef",
            }
        ],
    }


def post(inbox: Inbox, body: bytes, path: str = "/alerts", **headers: str) -> tuple[int, str]:
    connection = http.client.HTTPConnection("127.0.0.1", inbox.port, timeout=10)
    try:
        connection.request("POST", path, body, headers)
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    finally:
        connection.close()


def send(inbox: Inbox, name: str, path: str = "/alerts") -> None:
    assert post(inbox, json.dumps(webhook(name)).encode(), path)[0] == 200


def is_named(name: str) -> Any:
    return lambda notification: notification.alerts[0].name == name


@pytest.fixture
def inbox(tmp_path: Path) -> Iterator[Inbox]:
    with Inbox(tmp_path / "stack" / "notifications.jsonl") as inbox:
        yield inbox


def test_a_notification_is_kept_in_memory_and_in_the_file(inbox: Inbox) -> None:
    before = time.time()
    body = json.dumps(webhook(summary="No progress.")).encode()
    assert post(inbox, body)[0] == 200

    (kept,) = inbox.notifications
    assert kept.status == "firing"
    assert kept.receiver == "run-critical"
    assert kept.path == "/alerts"
    assert before <= kept.received_at <= time.time()
    (alert,) = kept.alerts
    assert alert.labels == {"alertname": "TunewatchRunStalled", "severity": "critical", "run_id": "r1"}
    assert alert.annotations == {"summary": "No progress."}
    assert (alert.starts_at, alert.ends_at) == ("2026-01-02T03:04:05Z", "0001-01-01T00:00:00Z")
    assert list(read_notifications(inbox.file)) == [kept]


def test_the_heartbeat_is_told_apart_by_its_path(inbox: Inbox) -> None:
    send(inbox, "TunewatchWatchdog", "/watchdog")
    assert [notification.path for notification in inbox.notifications] == ["/watchdog"]


def test_waiting_finds_what_is_here_and_what_comes(inbox: Inbox) -> None:
    send(inbox, "First")
    send(inbox, "Second")
    found = inbox.wait_for(is_named("Second"), timeout=0)
    assert found is not None and found.alerts[0].name == "Second"

    sender = threading.Thread(target=lambda: any(map(partial(send, inbox), ("Third", "Fourth"))))
    sender.start()
    found = inbox.wait_for(is_named("Fourth"), timeout=10)
    sender.join()
    assert found is not None and found.alerts[0].name == "Fourth"


def test_waiting_ends_with_nothing_after_the_timeout(inbox: Inbox) -> None:
    send(inbox, "Other")
    begin = time.monotonic()
    assert inbox.wait_for(is_named("Missing"), timeout=0.2) is None
    assert time.monotonic() - begin >= 0.2


def test_many_senders_at_once_lose_nothing(inbox: Inbox) -> None:
    senders = [threading.Thread(target=send, args=(inbox, f"A{number}")) for number in range(40)]
    for sender in senders:
        sender.start()
    for sender in senders:
        sender.join()
    expected = {f"A{number}" for number in range(40)}
    assert {notification.alerts[0].name for notification in inbox.notifications} == expected
    assert {notification.alerts[0].name for notification in read_notifications(inbox.file)} == expected


def without(key: str) -> dict[str, Any]:
    document = webhook()
    del document[key]
    return document


def with_alert(**changes: Any) -> dict[str, Any]:
    document = webhook()
    document["alerts"][0].update(changes)
    return document


@pytest.mark.parametrize(
    ("body", "word"),
    [
        (b"", "not JSON"),
        (b"{", "not JSON"),
        (b"\xff\xfe\x00", "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b"[]", "not list"),
        (b"null", "not NoneType"),
        (json.dumps(without("alerts")).encode(), "'alerts' is missing"),
        (json.dumps(without("receiver")).encode(), "'receiver' is missing"),
        (json.dumps({**webhook(), "alerts": {}}).encode(), "'alerts' is dict"),
        (json.dumps({**webhook(), "alerts": ["x"]}).encode(), "not str"),
        (json.dumps({**webhook(), "status": 5}).encode(), "'status' is int"),
        (json.dumps(with_alert(labels={"a": 1})).encode(), "'labels' maps names to texts"),
        (json.dumps(with_alert(annotations=None)).encode(), "'annotations' is NoneType"),
    ],
)
def test_a_malformed_body_is_refused_and_hurts_nobody(inbox: Inbox, body: bytes, word: str) -> None:
    status, text = post(inbox, body)
    assert (status, word in text) == (400, True), text
    assert inbox.notifications == ()

    send(inbox, "After")
    assert len(inbox.notifications) == 1


def test_an_unknown_path_is_not_found(inbox: Inbox) -> None:
    assert post(inbox, json.dumps(webhook()).encode(), "/other")[0] == 404
    assert inbox.notifications == ()


def raw(inbox: Inbox, request: bytes) -> bytes:
    with socket.create_connection(("127.0.0.1", inbox.port), timeout=10) as connection:
        connection.sendall(request)
        return connection.recv(4096)


@pytest.mark.parametrize(
    ("length", "status"),
    [
        (str(MAX_BODY_BYTES + 1), 413),
        ("9" * 5000, 413),
        ("-1", 411),
        ("+5", 411),
        ("1_0", 411),
        ("\u00b2", 411),
    ],
)
def test_a_length_is_bounded_before_anything_is_read(inbox: Inbox, length: str, status: int) -> None:
    answer = raw(inbox, f"POST /alerts HTTP/1.1\r\nContent-Length: {length}\r\n\r\n".encode("latin-1"))
    assert answer.startswith(b"HTTP/1.0 %d" % status)


def test_a_body_without_a_length_is_refused(inbox: Inbox) -> None:
    assert raw(inbox, b"POST /alerts HTTP/1.1\r\n\r\n").startswith(b"HTTP/1.0 411")


def test_a_sender_that_hangs_or_hangs_up_blocks_nobody(
    inbox: Inbox, capsys: pytest.CaptureFixture[str]
) -> None:
    head = b"POST /alerts HTTP/1.1\r\nContent-Length: 500\r\n\r\n{"
    with socket.create_connection(("127.0.0.1", inbox.port)) as hanging:
        hanging.sendall(head)
        raw_end = socket.create_connection(("127.0.0.1", inbox.port))
        raw_end.sendall(head)
        raw_end.close()
        send(inbox, "Next")
        assert inbox.wait_for(is_named("Next"), timeout=0) is not None
    inbox.close()
    assert capsys.readouterr().err == ""


def test_the_file_is_rotated_and_read_in_order(tmp_path: Path) -> None:
    file = tmp_path / "notifications.jsonl"
    with Inbox(file, max_file_bytes=1500) as inbox:  # a line has about 280 bytes
        for number in range(12):
            send(inbox, f"A{number}")
    sizes = [path.stat().st_size for path in (file, tmp_path / "notifications.jsonl.1")]
    assert all(0 < size <= 1500 for size in sizes)
    names = [notification.alerts[0].name for notification in read_notifications(file)]
    assert names == [f"A{number}" for number in range(12)][-len(names) :]
    assert len(names) > 5, "both parts are read"


def test_a_line_cut_short_is_left_out(inbox: Inbox) -> None:
    send(inbox, "Whole")
    with inbox.file.open("ab") as file:
        file.write(b'{"status": "firing", "al')
    assert [notification.alerts[0].name for notification in read_notifications(inbox.file)] == ["Whole"]


def test_no_file_holds_no_notifications(tmp_path: Path) -> None:
    assert list(read_notifications(tmp_path / "none.jsonl")) == []


def test_a_file_that_can_not_be_written_loses_no_notification(tmp_path: Path) -> None:
    shown: list[Notification] = []
    file = tmp_path / "notifications.jsonl"
    with Inbox(file, on_notification=shown.append) as inbox:
        file.mkdir()  # as good as a full disk: opening it fails, for root too
        send(inbox, "Shown")
        assert isinstance(inbox.file_error, OSError)
        assert list(inbox.notifications) == shown
        assert shown[0].alerts[0].name == "Shown"


def test_it_listens_on_loopback_only_and_stops(tmp_path: Path) -> None:
    inbox = Inbox(tmp_path / "n.jsonl")
    assert inbox.url == f"http://127.0.0.1:{inbox.port}"
    inbox.close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", inbox.port), timeout=5)


def test_a_named_port_that_is_taken_is_an_error(inbox: Inbox, tmp_path: Path) -> None:
    with pytest.raises(OSError, match="in use"):
        Inbox(tmp_path / "second.jsonl", port=inbox.port)


@pytest.fixture
def in_tokyo(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """This machine stands nine hours east of Greenwich."""
    with monkeypatch.context() as patch:
        patch.setenv("TZ", "Asia/Tokyo")
        time.tzset()
        yield
    time.tzset()


def test_a_notification_reads_as_a_person_would_receive_it(inbox: Inbox, in_tokyo: None) -> None:
    document = webhook(
        summary="Training makes no progress.",
        description="Run demo (r1) stands\nat step 12.\x1b[2J",
        runbook_url="https://example.org/TunewatchRunStalled.md",
        dashboard_url="http://127.0.0.1:3000/d/tunewatch-run?var-run_id=r1",
    )
    post(inbox, json.dumps(document).encode())
    assert format_notification(inbox.notifications[0]).splitlines() == [
        "[FIRING] critical  TunewatchRunStalled",
        "  Training makes no progress.",
        "  Run demo (r1) stands",
        "  at step 12.?[2J",
        "  since Fri 02 Jan 12:04:05 JST",
        "  runbook https://example.org/TunewatchRunStalled.md"
        "  dashboard http://127.0.0.1:3000/d/tunewatch-run?var-run_id=r1",
    ]


def test_what_is_over_says_how_long_it_was_and_no_longer_what_to_do(inbox: Inbox) -> None:
    document = webhook(status="resolved", summary="Training makes no progress.", description="Look at it.")
    document["alerts"][0]["endsAt"] = "2026-01-02T04:16:05.123456789Z"
    post(inbox, json.dumps(document).encode())
    assert format_notification(inbox.notifications[0]).splitlines() == [
        "[RESOLVED] critical  TunewatchRunStalled",
        "  Training makes no progress.",
        "  it lasted 1:12:00",
    ]


@pytest.mark.parametrize("begin", ["", "yesterday", "2026-01-02T03:04:05", "9999-99-99T00:00:00Z"])
def test_a_time_that_is_none_is_left_out(inbox: Inbox, begin: str) -> None:
    for status in ("resolved", "firing"):
        document = webhook(status=status, summary="Training makes no progress.")
        document["alerts"][0]["startsAt"] = begin
        post(inbox, json.dumps(document).encode())
    over, fires = (format_notification(notification).splitlines() for notification in inbox.notifications)
    assert over == ["[RESOLVED] critical  TunewatchRunStalled", "  Training makes no progress."]
    assert fires[:2] == ["[FIRING] critical  TunewatchRunStalled", "  Training makes no progress."]
