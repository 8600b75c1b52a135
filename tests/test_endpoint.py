"""The HTTP endpoint, who was seen to scrape it, and how long an ended run is still served."""

from __future__ import annotations

import http.client
import socket
import struct
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from harness import wait_for
from prometheus_client import CollectorRegistry, Gauge
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

from tunewatch.supervisor import endpoint as endpoint_module
from tunewatch.supervisor.endpoint import Endpoint, ListenError, PortTaken, Scrapes
from tunewatch.supervisor.linger import Linger

# What Prometheus 2.42 sends, shortened.
OPENMETRICS = "application/openmetrics-text;version=1.0.0;q=0.75,text/plain;version=0.0.4;q=0.5"


@pytest.fixture
def registry():
    registry = CollectorRegistry()
    Gauge("tunewatch_test", "A test.", ["name"], registry=registry).labels('a "quoted" \\ name').set(3)
    return registry


@pytest.fixture
def served(registry):
    endpoint = Endpoint(registry, port=0, title="run <b>1</b>")
    yield endpoint
    endpoint.close()


def get(endpoint, path="/metrics", method="GET", **headers):
    connection = http.client.HTTPConnection("127.0.0.1", endpoint.port, timeout=20)
    try:
        connection.request(method, path, headers=headers)
        response = connection.getresponse()
        return response.status, response.getheader("Content-Type"), response.read().decode()
    finally:
        connection.close()


def test_text_and_openmetrics(served):
    status, kind, body = get(served)
    assert (status, kind.partition(";")[0]) == (200, "text/plain")
    (family,) = parse_text(body)
    assert family.samples[0].labels == {"name": 'a "quoted" \\ name'}
    status, kind, body = get(served, Accept=OPENMETRICS)
    assert (status, kind.partition(";")[0]) == (200, "application/openmetrics-text")
    assert body.endswith("# EOF\n")
    (family,) = parse_openmetrics(body)
    assert family.samples[0].value == 3.0


def test_pages(served):
    assert get(served, "/healthz") == (200, "text/plain; charset=utf-8", "ok\n")
    status, kind, body = get(served, "/")
    assert (status, kind) == (200, "text/html; charset=utf-8")
    assert '<a href="/metrics">' in body
    assert "run &lt;b&gt;1" in body
    assert get(served, "/metrics?name[]=x")[0] == 200
    assert get(served, "/nothing")[0] == 404
    assert get(served, "/metrics/")[0] == 404
    assert get(served, method="POST")[0] == 501


def test_head_is_no_scrape(served):
    connection = http.client.HTTPConnection("127.0.0.1", served.port, timeout=20)
    connection.request("HEAD", "/metrics")
    response = connection.getresponse()
    assert response.status == 200
    assert int(response.getheader("Content-Length")) > 50
    assert response.read() == b""
    connection.close()
    assert get(served, "/healthz", method="HEAD")[:1] == (200,)
    assert not served.scrapes.any
    get(served)
    wait_for(lambda: served.scrapes.any)  # noted after the answer has left: the client may be first


def test_many_clients_at_once(served):
    with ThreadPoolExecutor(40) as pool:
        answers = list(pool.map(lambda _: get(served), range(200)))
    assert {answer[0] for answer in answers} == {200}
    assert len({answer[2] for answer in answers}) == 1


def test_clients_that_never_read_never_ask_or_hang_up_disturb_nobody(served, capfd):
    silent = [socket.create_connection(("127.0.0.1", served.port)) for _ in range(20)]
    deaf = socket.create_connection(("127.0.0.1", served.port))
    deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
    for _ in range(50):
        deaf.sendall(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n")
    for request in (b"GET /met", b"GET /metrics HTTP/1.1\r\n\r\n", b"\x16\x03\x01 not http\r\n\r\n"):
        rude = socket.create_connection(("127.0.0.1", served.port))
        rude.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # close with a reset
        rude.sendall(request)
        rude.close()
    for _ in range(10):
        assert get(served)[0] == 200
    wait_for(lambda: get(served, "/healthz")[0] == 200)
    for client in (*silent, deaf):
        client.close()
    assert get(served)[0] == 200
    assert capfd.readouterr().err == "", "nothing is written into the user's training output"


def test_the_first_free_port_is_taken(registry, monkeypatch):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        first = taken.getsockname()[1]
        monkeypatch.setattr(endpoint_module, "DEFAULT_PORT", first)
        endpoint = Endpoint(registry)
        try:
            assert first < endpoint.port < first + 1000
            assert endpoint.address == f"127.0.0.1:{endpoint.port}"
            assert get(endpoint)[0] == 200
        finally:
            endpoint.close()
        monkeypatch.setattr(endpoint_module, "PORTS_TRIED", 1)
        with pytest.raises(PortTaken, match=f"no free port on 127.0.0.1 between {first} and {first}"):
            Endpoint(registry)


def test_a_named_port_is_that_or_an_error(registry):
    first = Endpoint(registry, port=0)
    try:
        with pytest.raises(PortTaken, match=rf"port {first.port} on 127\.0\.0\.1 is taken.*from 9470 on"):
            Endpoint(registry, port=first.port)
    finally:
        first.close()
    again = Endpoint(registry, port=first.port)  # free again at once
    again.close()


@pytest.mark.parametrize("host", ["192.0.2.1", "no-such-host.invalid"])
def test_an_address_that_is_not_ours(registry, host):
    with pytest.raises(ListenError, match=f"can not listen on {host}, port 9999: "):
        Endpoint(registry, host=host, port=9999)


def test_ipv6(registry):
    try:
        endpoint = Endpoint(registry, host="::1", port=0)
    except ListenError:
        pytest.skip("no IPv6 here")
    try:
        assert endpoint.address == f"[::1]:{endpoint.port}"
        with socket.create_connection(("::1", endpoint.port)) as client:
            client.sendall(b"GET /healthz HTTP/1.0\r\n\r\n")
            assert client.recv(1000).startswith(b"HTTP/1.0 200")
    finally:
        endpoint.close()


def test_closing_ends_the_thread(registry):
    before = threading.active_count()
    endpoint = Endpoint(registry, port=0)
    get(endpoint)
    endpoint.close()
    wait_for(lambda: threading.active_count() <= before, seconds=10)
    with pytest.raises(ConnectionRefusedError):
        get(endpoint)


class Clock:
    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def scrapes(clock):
    return Scrapes(clock)


def scrape(clock, scrapes, at, *who):
    clock.now = at
    for scraper in who:
        scrapes.seen(scraper)


def test_scrapers_and_their_intervals(clock, scrapes):
    assert (scrapes.any, scrapes.interval, scrapes.all_saw_the_end()) == (False, None, False)
    scrape(clock, scrapes, 1000, "a", "b")
    assert (scrapes.any, scrapes.interval) == (True, None)
    scrape(clock, scrapes, 1015, "a")
    assert scrapes.interval == 15.0
    scrape(clock, scrapes, 1030, "a")
    scrape(clock, scrapes, 1060, "a", "b")
    assert scrapes.interval == 60.0, "the longest: b comes every minute"


def test_the_end_is_seen_when_each_saw_it_twice(clock, scrapes):
    scrape(clock, scrapes, 1000, "a", "b")
    assert not scrapes.all_saw_the_end(), "before the end nobody can have seen it"
    scrapes.run_ended()
    scrape(clock, scrapes, 1001, "a", "a", "b")
    assert not scrapes.all_saw_the_end()
    assert scrapes.all_saw_the_end(times=1)
    scrape(clock, scrapes, 1002, "b")
    assert scrapes.all_saw_the_end()


def test_a_scraper_that_comes_after_the_end_counts(clock, scrapes):
    scrapes.run_ended()
    scrape(clock, scrapes, 1001, "late")
    assert scrapes.any
    assert not scrapes.all_saw_the_end()


# One run ends at 2000. Who scraped before (name: times), who after; from when on it may close.
LINGER = {
    "never scraped, completed": ("completed", {}, {}, 2000),
    "never scraped, failed": ("failed", {}, {}, 2060),
    "never scraped, cancelled": ("cancelled", {}, {}, 2060),
    "every 15 s": ("completed", {"p": [1970, 1985]}, {"p": [2000.5, 2015.5]}, 2015.5),
    "every 15 s, then gone": ("failed", {"p": [1970, 1985]}, {}, 2045),
    "every minute": ("completed", {"p": [1900, 1960]}, {"p": [2020, 2080]}, 2080),
    "every minute, then gone": ("failed", {"p": [1900, 1960]}, {}, 2180),
    "every two minutes, then gone: five minutes at most": ("failed", {"p": [1800, 1920]}, {}, 2300),
    "once, shortly before the end": ("completed", {"p": [1990]}, {"p": [2050, 2110]}, 2110),
    "once, and never again": ("completed", {"p": [1990]}, {}, 2300),
    "a curl of half an hour ago": ("completed", {"curl": [200]}, {}, 2000),
    "a curl of half an hour ago, failed": ("failed", {"curl": [200]}, {}, 2060),
    "two scrapers": (
        "failed", {"p": [1970, 1985], "q": [1910, 1970]}, {"p": [2000, 2015], "q": [2030, 2090]}, 2090,
    ),
    "two scrapers, one is gone": ("failed", {"p": [1970, 1985], "q": [1910, 1970]}, {"p": [2000, 2015]}, 2180),
    "a curl and a scraper": ("failed", {"p": [1970, 1985], "curl": [1990]}, {"p": [2000, 2015]}, 2045),
    "it comes just in time": ("failed", {}, {"p": [2050]}, 2300),
    "every half second": ("completed", {"p": [1999, 1999.5]}, {}, 2002),
}  # fmt: skip


@pytest.mark.parametrize(("state", "before", "after", "closes"), LINGER.values(), ids=LINGER)
def test_linger(clock, scrapes, state, before, after, closes):
    story = sorted((at, who) for part in (before, after) for who, times in part.items() for at in times)
    for at, who in story:
        if at < 2000:
            scrape(clock, scrapes, at, who)
    clock.now = 2000.0
    scrapes.run_ended()
    linger = Linger(state, 2000.0)
    story = [(at, who) for at, who in story if at >= 2000]
    for tick in range(700):  # half-second ticks
        now = 2000 + tick / 2
        while story and story[0][0] <= now:
            scrape(clock, scrapes, *story.pop(0))
        clock.now = now
        if linger.over(now, scrapes):
            break
    assert now == closes
