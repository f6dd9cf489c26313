"""Clients that ask too long, too slowly, too often or not at all, on real sockets; and those who do not."""

import itertools
import json
import socket
import time

import pytest

pytest.importorskip("fastapi", reason="the extra 'serve' is not installed")

from protosteer.serve import connections
from protosteer.serve.limits import Limits
from serve_toys import PATIENCE, served, service, until

pytestmark = pytest.mark.slow

HEALTH = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n"
QUICK = Limits(head_seconds=0.8, idle_seconds=0.6, answer_seconds=0.5, connections=6, connections_per_address=2)


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    with served(service(tmp_path_factory.mktemp("usual"), teach=False)) as (port, _):
        yield "127.0.0.1", port


@pytest.fixture(scope="module")
def quick(tmp_path_factory):
    with served(service(tmp_path_factory.mktemp("quick"), teach=False, limits=QUICK)) as (port, server):
        yield ("127.0.0.1", port), server


def connect(address) -> socket.socket:
    return socket.create_connection(address, timeout=PATIENCE)


def answer(client: socket.socket) -> tuple[int, dict]:
    """Status and body of the next answer; (0, {}) if the service hangs up without one."""
    received = b""
    while b"\r\n\r\n" not in received:
        piece = client.recv(65536)
        if not piece:
            return 0, {}
        received += piece
    head, _, body = received.partition(b"\r\n\r\n")
    length = int(
        next(v for k, v in (x.split(b": ") for x in head.split(b"\r\n")[1:]) if k.lower() == b"content-length")
    )
    while len(body) < length:
        body += client.recv(65536)
    return int(head.split()[1]), json.loads(body)


def gone(client: socket.socket) -> bool:
    """Whether the service hangs up."""
    try:
        return client.recv(1) == b""
    except ConnectionResetError:
        return True


def healthy(address) -> bool:
    with connect(address) as client:
        client.sendall(HEALTH)
        return answer(client) == (200, {"status": "ok"})


# Bytes


def pour(client: socket.socket, piece: bytes, most: int) -> int:
    """Sends on and on; how much went before the service hung up."""
    sent = 0
    try:
        while sent < most:
            sent += client.send(piece)
    except OSError:
        pass
    return sent


@pytest.mark.parametrize(
    ("start", "piece"),
    [
        (b"GET /healthz HTTP/1.1\r\nX: ", b"a" * 65536),
        (b"GET /healthz HTTP/1.1\r\n", b"a: b\r\n" * 10_000),
        (b"GET /", b"a" * 65536),
        (b"POST /predict HTTP/1.1\r\nHost: localhost\r\nContent-Type: multipart/form-data; boundary=b\r\n"
         b"Transfer-Encoding: chunked\r\n\r\n0\r\nX: ", b"a" * 65536),
    ],
    ids=["one header", "many headers", "address", "trailer"],
)  # fmt: skip
def test_headers_without_end_are_cut_off_and_cost_little(address, start, piece):
    began = time.process_time()
    with connect(address) as client:
        client.sendall(start + piece[:65536])
        status, body = answer(client)
        pour(client, piece, 40 * 2**20)
        assert gone(client)
    assert status in (414, 431) and "longer than" in body["detail"]
    assert time.process_time() - began < 3  # of both sides; all of it parsed would take far longer
    assert healthy(address)


def test_one_header_or_address_that_is_too_long_is_refused_even_if_it_ends(address):
    for start, status in ((b"GET /healthz HTTP/1.1\r\nX: %s\r\n\r\n", 431), (b"GET /%s HTTP/1.1\r\n\r\n", 414)):
        with connect(address) as client:
            client.sendall(start % (b"a" * 9000))
            got, body = answer(client)
            assert got == status and "8,192 bytes" in body["detail"] and gone(client)


def test_headers_within_the_limits_are_taken(address):
    lines = b"".join(b"X-%d: %s\r\n" % (i, b"a" * 7000) for i in range(4))
    with connect(address) as client:
        for _ in range(3):
            client.sendall(HEALTH[:-2] + lines + b"\r\n")
            assert answer(client)[0] == 200


@pytest.mark.parametrize(
    "junk", [b"junk\r\n\r\n", b"\x16\x03\x01\x02\x00", b"GET / HTTP/9.9\r\n\r\n", b"CONNECT a:1 HTTP/1.1\r\n\r\n"]
)
def test_what_is_not_http_is_answered_in_json(address, junk):
    with connect(address) as client:
        client.sendall(junk)
        status, body = answer(client)
        assert status == 400 and body == {"detail": "the request is not valid HTTP/1.1; send one that is"}
        assert gone(client)


def test_a_body_that_is_not_http_is_answered_once(address):
    with connect(address) as client:
        client.sendall(b"POST /predict HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n"
                       b"Content-Type: multipart/form-data; boundary=b\r\n\r\nxyz\r\n")  # fmt: skip
        assert answer(client)[0] == 400 and gone(client)


@pytest.mark.parametrize(
    ("lines", "status"), [(b"1.1\r\n", 400), (b"1.1\r\nHost: localhost\r\nHost: localhost\r\n", 400), (b"1.0\r\n", 200)]
)
def test_a_request_names_one_host(address, lines, status):
    with connect(address) as client:
        client.sendall(b"GET /healthz HTTP/" + lines + b"\r\n")
        got, body = answer(client)
        assert got == status and (got == 200 or body["detail"].endswith("headers 'Host'; send one"))


# Time


def test_half_a_request_is_told_that_it_takes_too_long(quick):
    address, _ = quick
    with connect(address) as client:
        client.sendall(HEALTH[:-2])
        status, body = answer(client)
        assert status == 408 and body["detail"].startswith("the headers took longer than 0.8 s") and gone(client)


@pytest.mark.parametrize("first", [b"", HEALTH], ids=["first request", "second request"])
def test_a_drip_of_bytes_does_not_prolong_the_time(quick, first):
    address, _ = quick
    with connect(address) as client:
        client.sendall(first)
        assert not first or answer(client)[0] == 200
        pour_slowly(client, HEALTH[:20] + b"\r\nX: ")


def pour_slowly(client: socket.socket, start: bytes = b"") -> None:
    """Send a byte every 50 ms until the service hangs up: each would extend a deadline that counts bytes."""
    client.setblocking(False)
    data = itertools.chain(start, itertools.repeat(ord("a")))

    def hung_up() -> bool:
        time.sleep(0.05)
        try:
            client.send(bytes([next(data)]))
            return client.recv(65536) == b""
        except BlockingIOError:
            return False
        except OSError:
            return True

    until(hung_up)


def test_a_body_that_nobody_waits_for_does_not_keep_the_connection(quick):
    """The answer is given before the body has come; a drip of it must not count as a living client."""
    address, _ = quick
    with connect(address) as client:
        client.sendall(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100000\r\n\r\n")
        assert answer(client)[0] == 200
        pour_slowly(client)


@pytest.mark.parametrize("first", [b"", HEALTH], ids=["asked nothing", "asked once"])
def test_idle_connections_end(quick, first):
    address, _ = quick
    with connect(address) as client:
        client.sendall(first)
        assert not first or answer(client)[0] == 200
        assert gone(client)


def test_a_client_that_reads_no_answer_is_dropped(quick):
    address, server = quick
    with connect(address) as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.settimeout(0.2)
        ask = b"GET /openapi.json HTTP/1.1\r\nHost: localhost\r\n\r\n"
        pour(client, ask * 20, 10**9)  # until nothing more is taken
        until(lambda: not server.server_state.connections)


def test_a_client_that_reads_nothing_gains_no_time_by_asking_more(quick):
    address, server = quick
    with connect(address) as client:
        client.sendall(HEALTH)
        assert answer(client)[0] == 200
        (connection,) = server.server_state.connections
        connection.loop.call_soon_threadsafe(connection.pause_writing)  # as if nothing were read
        until(lambda: connection.flow.write_paused)
        client.sendall(HEALTH)
        until(lambda: not server.server_state.connections)


def test_a_client_that_asks_again_and_again_stays_connected(quick):
    address, _ = quick
    with connect(address) as client:
        for _ in range(9):  # longer than a connection may be idle
            client.sendall(HEALTH)
            assert answer(client)[0] == 200
            time.sleep(0.2)


def test_requests_sent_at_once_are_answered_in_turn(quick):
    address, _ = quick
    with connect(address) as client:
        client.sendall(HEALTH * 5)
        for _ in range(5):
            assert read_one(client) == 200


def read_one(client: socket.socket) -> int:
    """One answer, byte by byte, so that nothing of the next is taken."""
    head = b""
    while not head.endswith(b"\r\n\r\n"):
        head += client.recv(1)
    length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
    assert len(client.recv(length, socket.MSG_WAITALL)) == length
    return int(head.split()[1])


# Number


def test_idle_connections_shut_nobody_out(quick):
    address, server = quick
    idle = [connect(address) for _ in range(30)]
    until(lambda: len(server.server_state.connections) <= QUICK.connections)
    assert healthy(address)
    for client in idle:
        client.close()


def test_when_everybody_is_served_one_more_is_told_to_come_back(quick):
    address, server = quick
    upload = (b"POST /predict HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000\r\n"
              b"Content-Type: multipart/form-data; boundary=b\r\n\r\n")  # fmt: skip
    until(lambda: not server.server_state.connections)
    busy = [connect(address) for _ in range(QUICK.connections)]
    for client in busy:
        client.sendall(upload)
    until(lambda: sum(not c.is_idle for c in list(server.server_state.connections)) == QUICK.connections)
    with connect(address) as client:
        status, body = answer(client)
        assert status == 503 and body["detail"] == "too many connections are open; try again later"
    for client in busy:
        client.close()
    until(lambda: not server.server_state.connections)
    assert healthy(address)


def test_one_address_has_fewer_places_unless_it_is_this_machine(quick, monkeypatch):
    address, server = quick
    until(lambda: not server.server_state.connections)
    opened = [connect(address) for _ in range(3)]
    until(lambda: len(server.server_state.connections) == 3)
    for client in opened:
        client.close()
    until(lambda: not server.server_state.connections)
    monkeypatch.setattr(connections, "_origin", lambda address: "198.51.100.7")
    first, second, third = (connect(address) for _ in range(3))
    assert gone(first)  # the one that has waited longest
    third.sendall(HEALTH)
    assert answer(third)[0] == 200


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("198.51.100.7", "198.51.100.7", True),
        ("198.51.100.7", "198.51.100.8", False),
        ("2001:db8::1", "2001:db8::ffff:2", True),
        ("2001:db8::1", "2001:db8:0:1::1", False),
    ],
)
def test_whose_connections_count_together(one, other, same):
    assert (connections._origin(one) == connections._origin(other)) is same
    assert connections._origin("127.0.0.1") is connections._origin("::1") is None


def test_places_leave_files_for_the_rest(monkeypatch):
    monkeypatch.setattr(connections, "max_open_files", lambda: 100)
    assert connections._slots(Limits()) == 50
    assert connections._slots(Limits(connections=20)) == 20
