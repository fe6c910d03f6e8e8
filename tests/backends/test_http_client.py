"""The client of backends over real sockets, on both event loops: what is read, what serves again, what is closed."""

import asyncio
import gzip
import ssl
import subprocess
import zlib
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp.http_exceptions import BadHttpMessage, ContentLengthError, TransferEncodingError
from yarl import URL

from backends.http_client import HttpPool, Origin, header_lines, post_head
from backends.http_connection import Connection, NotHttp, Response, Unanswered
from policies.core.clock import Clock, FakeClock, SystemClock
from tests.support.raw_upstream import LOOPS, Peer, RawUpstream, raw_upstream, run_on
from tests.support.redis_server import free_port

HELLO = b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nhello"
BIG = 4 << 20
Serve = Callable[[Peer], Any]


@pytest.fixture(params=list(LOOPS))
def loop(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def answers(*bodies: bytes, bytewise: bool = False, then: str = "wait") -> Serve:
    """On every connection: one request, one answer, and the next. After the last one wait, close or reset."""

    async def serve(peer: Peer) -> None:
        for body in bodies:
            await peer.request()
            await peer.send(body, bytewise=bytewise)
        if then == "wait":
            await peer.gone()
        elif then == "reset":
            peer.reset()

    return serve


@asynccontextmanager
async def pool_to(
    port: int, *, clock: Clock | None = None, connect_s: float = 2.0, keepalive_s: float = 4.0, tls: Any = None
) -> AsyncIterator[HttpPool]:
    pool = HttpPool(
        Origin("127.0.0.1", port, tls), clock or SystemClock(), connect_s=connect_s, keepalive_s=keepalive_s
    )
    try:
        yield pool
    finally:
        await pool.aclose()
        assert not pool._open
        assert not pool._idle


async def post(pool: HttpPool, body: bytes = b"question") -> Response:
    return await pool.send(f"POST /v1/x HTTP/1.1\r\nhost: h\r\ncontent-length: {len(body)}\r\n\r\n".encode(), body)


async def read(response: Response) -> bytes:
    pieces = []
    while not response.content.at_eof():
        pieces.append(await response.content.readany())
    return b"".join(pieces)


async def ask(pool: HttpPool) -> bytes:
    return await read(await post(pool))


# ----------------------------------------------------------------------------------------------------------- the request


def test_a_request_is_what_it_says(loop: str) -> None:
    seen = []

    async def serve(peer: Peer) -> None:
        seen.append(await peer.request())
        await peer.send(HELLO)
        await peer.gone()

    async def main() -> None:
        async with raw_upstream(serve) as up, pool_to(up.port) as pool:
            url = URL(f"http://127.0.0.1:{up.port}/v1/chat")
            head = post_head(url, {"accept": "application/json"}) + header_lines(
                {"x-request-id": "r", "content-length": "3"}
            )
            response = await pool.send(f"{head}\r\n".encode(), b"abc")
            assert (response.status, await read(response)) == (200, b"hello")
            lines = [
                "POST /v1/chat HTTP/1.1",
                f"host: 127.0.0.1:{up.port}",
                "accept: application/json",
                "x-request-id: r",
            ]
            assert seen == [([*lines, "content-length: 3"], b"abc")]

    run_on(loop, main())


@pytest.mark.parametrize("value", ["a\r\nx: y", "a\ny: z", "a\rb", "a\0b"])
def test_a_header_cannot_begin_another(value: str) -> None:
    with pytest.raises(ValueError, match="line break"):
        header_lines({"x-request-id": value})
    with pytest.raises(ValueError, match="line break"):
        header_lines({value: "x"})
    with pytest.raises(ValueError, match="line break"):
        post_head(URL("http://h/"), {"authorization": f"Bearer {value}"})


@pytest.mark.parametrize(
    ("url", "line", "host"),
    [
        ("http://h/v1", "POST /v1 HTTP/1.1", "h"),
        ("http://h:80/a b", "POST /a%20b HTTP/1.1", "h"),
        ("http://h:8000/v2/models/a%2Fb/infer", "POST /v2/models/a%2Fb/infer HTTP/1.1", "h:8000"),
        ("https://api.example.com.:443/", "POST / HTTP/1.1", "api.example.com"),
        ("http://[::1]:8000/", "POST / HTTP/1.1", "[::1]:8000"),
        ("http://bücher.example/", "POST / HTTP/1.1", "xn--bcher-kva.example"),
    ],
)
def test_the_head_of_an_address(url: str, line: str, host: str) -> None:
    assert post_head(URL(url), {}) == f"{line}\r\nhost: {host}\r\n"


@pytest.mark.parametrize("url", ["ftp://h/", "/v1", "http://"])
def test_what_is_no_origin(url: str) -> None:
    with pytest.raises(ValueError):
        Origin.of(URL(url))


def test_an_origin_of_https_trusts_the_machines_authorities() -> None:
    origin = Origin.of(URL("https://api.example.com/v1"))
    assert (origin.host, origin.port) == ("api.example.com", 443)
    assert origin.tls is not None
    assert origin.tls.verify_mode is ssl.CERT_REQUIRED
    assert origin.tls.check_hostname


def test_a_large_body_arrives_whole(loop: str) -> None:
    body = bytes(range(256)) * (BIG // 256)
    seen = []

    async def serve(peer: Peer) -> None:
        for _ in range(2):
            await asyncio.sleep(0.02)  # so that the client's socket is full first
            seen.append((await peer.request())[1] == body)
            await peer.send(HELLO)
        await peer.gone()

    async def main() -> None:
        async with raw_upstream(serve) as up, pool_to(up.port) as pool:
            for _ in range(2):
                assert await read(await post(pool, body)) == b"hello"
            assert (seen, up.made) == ([True, True], 1)

    run_on(loop, main())


def test_an_answer_before_the_whole_request_is_out_ends_the_connection(loop: str) -> None:
    async def serve(peer: Peer) -> None:
        if peer.number == 1:
            await peer.reader.readuntil(b"\r\n\r\n")
            await peer.send(b"HTTP/1.1 413 Too Large\r\ncontent-length: 0\r\n\r\n")
            await asyncio.sleep(0.05)
            await peer.gone()
        else:
            await answers(HELLO)(peer)

    async def main() -> None:
        async with raw_upstream(serve) as up, pool_to(up.port) as pool:
            response = await post(pool, b"x" * (16 << 20))
            assert response.status == 413
            assert not pool._idle
            assert await ask(pool) == b"hello"
            assert up.made == 2

    run_on(loop, main())


# ---------------------------------------------------------------------------------------------------- answers and reuse

GZIPPED = gzip.compress(b"hello")
DEFLATED = zlib.compress(b"hello")
ANSWERS = {
    # name: (bytes, body, does its connection serve again)
    "length": (HELLO, b"hello", True),
    "chunked": (
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\nhe\r\n3;x=y\r\nllo\r\n0\r\n\r\n",
        b"hello",
        True,
    ),
    "trailers": (
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\nx: y\r\n\r\n",
        b"hello",
        True,
    ),
    "empty": (b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n", b"", True),
    "empty chunked": (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n", b"", True),
    "204": (b"HTTP/1.1 204 No Content\r\n\r\n", b"", True),
    "304": (b"HTTP/1.1 304 Not Modified\r\ncontent-length: 5\r\n\r\n", b"", True),
    "gzip": (
        b"HTTP/1.1 200 OK\r\ncontent-encoding: gzip\r\ncontent-length: %d\r\n\r\n%b" % (len(GZIPPED), GZIPPED),
        b"hello",
        True,
    ),
    "deflate": (
        b"HTTP/1.1 200 OK\r\ncontent-encoding: deflate\r\ncontent-length: %d\r\n\r\n%b" % (len(DEFLATED), DEFLATED),
        b"hello",
        True,
    ),
    "interim": (b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nlink: x\r\n\r\n" + HELLO, b"hello", True),
    "http/1.0 that stays": (
        b"HTTP/1.0 200 OK\r\nconnection: keep-alive\r\ncontent-length: 5\r\n\r\nhello",
        b"hello",
        True,
    ),
    "http/1.0": (b"HTTP/1.0 200 OK\r\ncontent-length: 5\r\n\r\nhello", b"hello", False),
    "close": (b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: 5\r\n\r\nhello", b"hello", False),
    "bare line ends": (b"HTTP/1.1 200 OK\ncontent-length: 5\n\nhello", b"hello", True),
    "switching": (b"HTTP/1.1 101 Switching\r\nupgrade: x\r\nconnection: upgrade\r\n\r\n", b"", False),
}


@pytest.mark.parametrize("bytewise", [False, True])
@pytest.mark.parametrize("name", ANSWERS)
def test_answers(loop: str, name: str, bytewise: bool) -> None:
    data, body, again = ANSWERS[name]

    async def main() -> None:
        async with raw_upstream(answers(data, data, bytewise=bytewise)) as up, pool_to(up.port) as pool:
            for _ in range(2):
                response = await post(pool)
                assert await read(response) == body
                assert response.connection is None
                response.close()  # after the end of the body it is nobody's
            assert up.made == (1 if again else 2)
            if not again:
                await up.empty()

    run_on(loop, main())


@pytest.mark.parametrize("bytewise", [False, True])
@pytest.mark.parametrize("head", [b"HTTP/1.1 200 OK\r\n\r\n", b"HTTP/1.0 200 OK\r\ncontent-type: x\r\n\r\n"])
def test_a_body_until_the_connection_ends(loop: str, head: bytes, bytewise: bool) -> None:
    async def main() -> None:
        async with (
            raw_upstream(answers(head + b"hello", bytewise=bytewise, then="close")) as up,
            pool_to(up.port) as pool,
        ):
            for number in (1, 2):
                assert await ask(pool) == b"hello"
                assert up.made == number

    run_on(loop, main())


def test_what_an_answer_says_of_its_content(loop: str) -> None:
    async def main() -> None:
        typed = HELLO.replace(b"content", b"Content-Type: Text/HTML ; charset=x\r\ncontent", 1)
        async with raw_upstream(answers(typed, HELLO)) as up, pool_to(up.port) as pool:
            first, second = await post(pool), await post(pool)
            assert (first.content_type, first.headers["CONTENT-TYPE"]) == ("text/html", "Text/HTML ; charset=x")
            assert second.content_type == ""

    run_on(loop, main())


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("surplus", [HELLO, b"\r\n", b"junk"])
def test_bytes_after_an_answer_end_its_connection(loop: str, surplus: bytes, apart: bool) -> None:
    async def serve(peer: Peer) -> None:
        await peer.request()
        await peer.send(HELLO + (b"" if apart else surplus))
        if apart:
            await asyncio.sleep(0.01)
            await peer.send(surplus)
        await peer.gone()

    async def main() -> None:
        async with raw_upstream(serve) as up, pool_to(up.port) as pool:
            if surplus == b"junk" and not apart:
                with pytest.raises(NotHttp):
                    await ask(pool)
            else:
                assert await ask(pool) == b"hello"
            if surplus != b"\r\n" or apart:  # an empty line right after a body is tolerated by HTTP
                await up.empty()
                assert not [connection for connection in pool._idle if connection.usable]

    run_on(loop, main())


def test_connections_are_taken_last_used_first(loop: str) -> None:
    async def main() -> None:
        async with raw_upstream(answers(HELLO, HELLO, HELLO)) as up, pool_to(up.port) as pool:
            await asyncio.gather(ask(pool), ask(pool), ask(pool))
            assert (up.made, len(pool._idle)) == (3, 3)
            last = pool._idle[-1]
            response = await post(pool)
            assert len(pool._idle) == 3
            assert pool._idle[-1] is last
            assert (await read(response), up.made) == (b"hello", 3)

    run_on(loop, main())


def test_a_connection_idle_for_too_long_is_not_taken(loop: str) -> None:
    async def main() -> None:
        clock = FakeClock()
        async with raw_upstream(answers(HELLO, HELLO)) as up, pool_to(up.port, clock=clock) as pool:
            await asyncio.gather(ask(pool), ask(pool))
            clock.advance(3.9)
            assert (await ask(pool), up.made) == (b"hello", 2)
            clock.advance(3.9)
            # One has rested for 3.9 seconds, the other for 7.8.
            pool._sweep()
            assert len(pool._idle) == 1
            clock.advance(0.2)
            assert (await ask(pool), up.made) == (b"hello", 3)

    run_on(loop, main())


def test_a_connection_idle_for_too_long_is_closed(loop: str) -> None:
    async def main() -> None:
        async with raw_upstream(answers(HELLO, HELLO)) as up, pool_to(up.port, keepalive_s=0.05) as pool:
            await asyncio.gather(ask(pool), ask(pool))
            assert pool._timer is not None
            await up.empty()
            assert (pool._timer, len(pool._idle), len(pool._open)) == (None, 0, 0)

    run_on(loop, main())


# --------------------------------------------------------------------------------------------- connections that go away


@pytest.mark.parametrize("how", ["close", "reset"])
def test_an_idle_connection_that_its_server_ends(loop: str, how: str) -> None:
    async def main() -> None:
        async with raw_upstream(answers(HELLO, then=how)) as up, pool_to(up.port) as pool:
            for number in (1, 2, 3):
                assert (await ask(pool), up.made) == (b"hello", number)
                await up.empty()

    run_on(loop, main())


@pytest.mark.parametrize("how", ["close", "reset"])
def test_a_request_to_a_stale_connection_goes_out_once_more(loop: str, how: str) -> None:
    requests = []

    async def serve(peer: Peer) -> None:
        for turn in (1, 2):
            await peer.request()
            requests.append(peer.number)
            if turn == 2:
                break
            await peer.send(HELLO)
        if how == "reset":
            peer.reset()

    async def main() -> None:
        async with raw_upstream(serve) as up, pool_to(up.port) as pool:
            await asyncio.gather(ask(pool), ask(pool))
            # However many are stale, one is tried and then a new one.
            assert (await ask(pool), up.made) == (b"hello", 3)
            assert len(requests) == 4

    run_on(loop, main())


@pytest.mark.parametrize("how", ["close", "reset"])
@pytest.mark.parametrize("head", [b"", b"HTTP/1.1 200", b"HTTP/1.1 100 Continue\r\n\r\n"])
@pytest.mark.parametrize("reused", [False, True])
def test_a_request_is_not_sent_again_when_it_may_have_been_answered(
    loop: str, head: bytes, how: str, reused: bool
) -> None:
    if reused and not head:
        pytest.skip("that is the one case which is sent again")
    requests = []

    async def serve(peer: Peer) -> None:
        if reused:
            await peer.request()
            await peer.send(HELLO)
        await peer.request()
        requests.append(peer.number)
        await peer.send(head)
        await asyncio.sleep(0.02)  # a reset may overtake what is on its way
        if how == "reset":
            peer.reset()

    async def main() -> None:
        async with raw_upstream(serve) as up, pool_to(up.port) as pool:
            if reused:
                await ask(pool)
            with pytest.raises(Unanswered) as caught:
                await ask(pool)
            assert caught.value.heard == bool(head)
            assert (requests, up.made) == ([1], 1)

    run_on(loop, main())


def test_the_second_try_is_the_last(loop: str) -> None:
    async def main() -> None:
        served = 0

        async def serve(peer: Peer) -> None:
            nonlocal served
            await peer.request()
            if peer.number == 1:
                await peer.send(HELLO)
                await peer.request()
            served += 1

        async with raw_upstream(serve) as up, pool_to(up.port) as pool:
            await ask(pool)
            with pytest.raises(Unanswered):
                await ask(pool)
            assert (served, up.made) == (2, 2)

    run_on(loop, main())


CUTS = {
    "length": b"HTTP/1.1 200 OK\r\ncontent-length: 6\r\n\r\nhello",
    "chunk": b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n8\r\nhello",
    "between chunks": b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n5\r\nhello\r\n",
    "no last chunk's end": b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n",
    "gzip": b"HTTP/1.1 200 OK\r\ncontent-encoding: gzip\r\ncontent-length: 99\r\n\r\n" + GZIPPED[:12],
}


@pytest.mark.parametrize("bytewise", [False, True])
@pytest.mark.parametrize("how", ["close", "reset"])
@pytest.mark.parametrize("name", CUTS)
def test_a_body_that_is_cut(loop: str, name: str, how: str, bytewise: bool) -> None:
    async def main() -> None:
        async with raw_upstream(answers(CUTS[name], bytewise=bytewise, then=how)) as up, pool_to(up.port) as pool:
            try:
                response = await post(pool)
            except Unanswered:
                assert how == "reset"  # it may overtake the answer
                return
            with pytest.raises(aiohttp.ClientPayloadError) as caught:
                await read(response)
            assert isinstance(caught.value.__cause__, ContentLengthError | TransferEncodingError)
            response.close()
            assert not pool._idle

    run_on(loop, main())


GARBLED = {
    "chunk size": (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n", b"5\r\nhello\r\nZZ\r\n"),
    "chunk end": (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n", b"5\r\nhelloX\r\n0\r\n\r\n"),
    "gzip": (b"HTTP/1.1 200 OK\r\ncontent-encoding: gzip\r\ncontent-length: 20\r\n\r\n", b"this is no gzip data"),
}


@pytest.mark.parametrize("name", GARBLED)
def test_a_body_that_is_garbled(loop: str, name: str) -> None:
    head, body = GARBLED[name]

    async def serve(peer: Peer) -> None:
        await peer.request()
        await peer.send(head)
        await asyncio.sleep(0.02)
        await peer.send(body)
        await peer.gone()

    async def main() -> None:
        async with raw_upstream(serve) as up, pool_to(up.port) as pool:
            response = await post(pool)
            with pytest.raises(aiohttp.ClientPayloadError) as caught:
                await read(response)
            # Garbled is not cut: the transport tells them apart by the cause.
            assert isinstance(caught.value.__cause__, BadHttpMessage)
            assert not isinstance(caught.value.__cause__, ContentLengthError | TransferEncodingError)
            response.close()
            await up.empty()

    run_on(loop, main())


@pytest.mark.parametrize(
    "data",
    [
        b"SSH-2.0-OpenSSH_9\r\n",
        b"HTTP/3.7 200 OK\r\n\r\n",
        b"HTTP/1.1 abc OK\r\n\r\n",
        b"\x15\x03\x01\x00\x02\x02\x16",
        b"HTTP/1.1 200 OK\r\ncontent-length: x\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\ntransfer-encoding: chunked\r\n\r\n5\r\nhello\r\nboom",
        b"HTTP/1.1 200 OK\r\nx: " + b"y" * 9000 + b"\r\n\r\n",
        b"HTTP/1.1 200 " + b"y" * 9000 + b"\r\n\r\n",
        b"HTTP/1.1 200 OK\r\n" + b"x: y\r\n" * 200 + b"\r\n",
        b"HTTP/1.1 200 OK\r\nx: a\0b\r\n\r\n",
    ],
)
def test_what_is_no_answer(loop: str, data: bytes) -> None:
    async def main() -> None:
        async with raw_upstream(answers(data)) as up, pool_to(up.port) as pool:
            with pytest.raises(NotHttp) as caught:
                await ask(pool)
            assert caught.value.__cause__ is not None
            await up.empty()

    run_on(loop, main())


@pytest.mark.parametrize("then", ["wait", "close"])
def test_a_server_that_answers_before_it_is_asked(loop: str, then: str) -> None:
    async def serve(peer: Peer) -> None:
        await peer.send(b"HTTP/1.1 503 Full\r\ncontent-length: 0\r\n\r\n")
        if then == "wait":
            await peer.gone()
        else:
            await peer.request()

    async def main() -> None:
        async with raw_upstream(serve) as up, pool_to(up.port) as pool:
            for _ in range(5):
                assert (await post(pool)).status == 503
                for connection in tuple(pool._idle):
                    connection.drop()

    run_on(loop, main())


class Alone:
    """Keeps nothing."""

    def free(self, connection: Connection) -> None: ...

    def lost(self, connection: Connection) -> None: ...


@pytest.mark.parametrize("surplus", [b"", b"x" * (1 << 16)])
def test_an_early_answer_waits_for_its_question(loop: str, surplus: bytes) -> None:
    async def serve(peer: Peer) -> None:
        await peer.send(HELLO + surplus)
        await peer.gone()

    async def main() -> None:
        async with raw_upstream(serve) as up:
            running = asyncio.get_running_loop()
            _, connection = await running.create_connection(lambda: Connection(running, Alone()), "127.0.0.1", up.port)
            while connection._early == b"" and connection.usable:
                await asyncio.sleep(0.001)
            if surplus:
                # More than an answer in reserve is held back by nobody.
                await up.empty()
                with pytest.raises(Unanswered):
                    await connection.exchange(b"POST / HTTP/1.1\r\n\r\n", b"")
            else:
                assert await read(await connection.exchange(b"POST / HTTP/1.1\r\n\r\n", b"")) == b"hello"
                connection.drop()
            await up.empty()

    run_on(loop, main())


# -------------------------------------------------------------------------------------------------- leaving, and limits


def test_what_is_unsent_does_not_keep_a_connection(loop: str) -> None:
    async def main() -> None:
        done = asyncio.Event()

        async def serve(peer: Peer) -> None:
            await peer.reader.readuntil(b"\r\n\r\n")
            await done.wait()  # and read no more

        async with raw_upstream(serve) as up, pool_to(up.port) as pool:
            task = asyncio.ensure_future(post(pool, b"x" * (32 << 20)))
            while not up.open:
                await asyncio.sleep(0.001)
            await asyncio.sleep(0.02)
            (connection,) = pool._open
            assert connection.transport is not None
            assert connection.transport.get_write_buffer_size() > 0
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            async with asyncio.timeout(0.5):
                while pool._open:
                    await asyncio.sleep(0.001)
            done.set()

    run_on(loop, main())


def test_a_dead_connection_is_passed_over(loop: str) -> None:
    async def main() -> None:
        async with raw_upstream(answers(HELLO, HELLO)) as up, pool_to(up.port) as pool:
            await asyncio.gather(ask(pool), ask(pool))
            pool._idle[-1].drop()
            assert (await ask(pool), up.made) == (b"hello", 2)

    run_on(loop, main())


@pytest.mark.parametrize("sent", [b"", b"HTTP/1.1 20", b"HTTP/1.1 100 Continue\r\n\r\n"])
def test_a_call_that_is_cancelled_closes_its_connection(loop: str, sent: bytes) -> None:
    async def serve(peer: Peer) -> None:
        await peer.request()
        await peer.send(sent)
        await peer.gone()

    async def main() -> None:
        async with raw_upstream(serve) as up, pool_to(up.port) as pool:
            task = asyncio.ensure_future(ask(pool))
            await asyncio.sleep(0.02)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await up.empty()
            assert not pool._idle

    run_on(loop, main())


class Meddling(HttpPool):
    """Cancels a call in the moment in which its answer is complete and the call has not run yet."""

    __slots__ = ("victim",)
    victim: "asyncio.Task[bytes] | None"

    def free(self, connection: Connection) -> None:
        super().free(connection)
        if self.victim is not None:
            self.victim.cancel()


def test_a_call_cancelled_after_its_whole_answer_leaves_the_connection_to_others(loop: str) -> None:
    async def main() -> None:
        async with raw_upstream(answers(HELLO, HELLO, HELLO)) as up:
            pool = Meddling(Origin("127.0.0.1", up.port), SystemClock(), connect_s=2, keepalive_s=4)
            pool.victim = None
            await ask(pool)
            pool.victim = asyncio.ensure_future(ask(pool))
            with pytest.raises(asyncio.CancelledError):
                await pool.victim
            pool.victim = None
            assert len(pool._idle) == 1
            assert pool._idle[0].usable
            assert (await ask(pool), up.made) == (b"hello", 1)
            await pool.aclose()

    run_on(loop, main())


def test_a_response_closed_in_its_middle(loop: str) -> None:
    async def main() -> None:
        async with raw_upstream(answers(CUTS["length"])) as up, pool_to(up.port) as pool:
            response = await post(pool)
            assert await response.content.readany() == b"hello"
            response.close()
            response.close()
            await up.empty()
            assert not pool._idle

    run_on(loop, main())


@pytest.mark.parametrize("chunked", [False, True])
def test_a_slow_reader_stops_the_server(loop: str, chunked: bool) -> None:
    sent = 0
    total = 64 << 20
    piece = b"x" * (1 << 16)

    async def serve(peer: Peer) -> None:
        nonlocal sent
        await peer.request()
        framing = b"transfer-encoding: chunked" if chunked else b"content-length: %d" % total
        await peer.send(b"HTTP/1.1 200 OK\r\n" + framing + b"\r\n\r\n")
        while sent < total:
            await peer.send(b"%x\r\n%b\r\n" % (len(piece), piece) if chunked else piece)
            sent += len(piece)
        await peer.send(b"0\r\n\r\n" if chunked else b"")
        await peer.gone()

    async def main() -> None:
        async with raw_upstream(serve) as up, pool_to(up.port) as pool:
            response = await post(pool)
            before = -1
            while before != sent:
                before = sent
                await asyncio.sleep(0.1)
            # Our reader's half a megabyte, one read of the loop, and the buffers of the sockets.
            assert sent < 16 << 20
            assert response.content._size <= (1 << 19) + (1 << 18)
            assert len(await read(response)) == total
            assert len(pool._idle) == 1

    run_on(loop, main())


@pytest.mark.parametrize("framing", [b"", b"connection: close\r\n", b"content-length: %d\r\n"])
def test_a_small_body_that_swells_is_read_piece_by_piece(loop: str, framing: bytes) -> None:
    packed = gzip.compress(b"\0" * (32 << 20))
    head = framing % len(packed) if b"%d" in framing else framing
    data = b"HTTP/1.1 200 OK\r\ncontent-encoding: gzip\r\n" + head + b"\r\n" + packed

    async def main() -> None:
        async with raw_upstream(answers(data, then="close")) as up, pool_to(up.port) as pool:
            response = await post(pool)
            size = 0
            while not response.content.at_eof():
                await asyncio.sleep(0)
                assert response.content._size <= 1 << 20
                size += len(await response.content.readany())
            assert size == 32 << 20
            assert response.connection is None

    run_on(loop, main())


def test_a_connection_takes_no_longer_than_its_limit(loop: str) -> None:
    async def main() -> None:
        # TCP connects at once; the other side never speaks TLS.
        async with raw_upstream(lambda peer: peer.gone()) as up:
            async with pool_to(up.port, connect_s=0.05, tls=ssl.create_default_context()) as pool:
                with pytest.raises(TimeoutError, match="no connection within 50 ms"):
                    await ask(pool)
            await up.empty()

    run_on(loop, main())


def test_nobody_listens(loop: str) -> None:
    async def main() -> None:
        async with pool_to(free_port()) as pool:
            with pytest.raises(ConnectionRefusedError):
                await ask(pool)

    run_on(loop, main())


def test_a_name_that_cannot_be_looked_up(loop: str) -> None:
    async def main() -> None:
        pool = HttpPool(Origin("x" * 70 + ".invalid", 80), SystemClock(), connect_s=0.25, keepalive_s=4)
        with pytest.raises(OSError):
            await ask(pool)
        await pool.aclose()

    run_on(loop, main())


def test_closing_ends_what_is_under_way(loop: str) -> None:
    async def serve(peer: Peer) -> None:
        await peer.request()
        if peer.number == 2:
            await peer.send(b"HTTP/1.1 200 OK\r\n\r\nuntil the end")
        await peer.gone()

    async def main() -> None:
        async with raw_upstream(serve) as up, pool_to(up.port) as pool:
            waiting = asyncio.ensure_future(ask(pool))
            while up.made < 1 or not pool._open:
                await asyncio.sleep(0.001)
            response = await post(pool)
            assert await response.content.readany() == b"until the end"
            reading = asyncio.ensure_future(response.content.readany())
            await asyncio.sleep(0)
            await asyncio.gather(pool.aclose(), pool.aclose())
            with pytest.raises(Unanswered):
                await waiting
            # A body without a length must not look complete because we closed.
            with pytest.raises(aiohttp.ClientPayloadError):
                await reading
            with pytest.raises(ConnectionAbortedError):
                await ask(pool)
            await up.empty()

    run_on(loop, main())


def test_closing_while_a_connection_is_being_made(loop: str) -> None:
    async def main() -> None:
        async with raw_upstream(answers(HELLO)) as up, pool_to(up.port) as pool:
            task = asyncio.ensure_future(ask(pool))
            await asyncio.sleep(0)
            await pool.aclose()
            with pytest.raises(OSError):
                await task
            await up.empty()

    run_on(loop, main())


# ------------------------------------------------------------------------------------------------------------------- TLS


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Key and certificate of this machine, in one file."""
    path = tmp_path_factory.mktemp("tls") / "both.pem"
    words = "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=test"
    subprocess.run(
        [
            "openssl",
            *words.split(),
            "-addext",
            "subjectAltName=IP:127.0.0.1,DNS:localhost",
            "-keyout",
            path,
            "-out",
            f"{path}.crt",
        ],
        check=True,
        capture_output=True,
    )
    path.write_bytes(path.read_bytes() + Path(f"{path}.crt").read_bytes())
    return path


def test_tls(loop: str, certificate: Path) -> None:
    async def main() -> None:
        serving = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        serving.load_cert_chain(certificate)
        until_close = answers(HELLO, b"HTTP/1.1 200 OK\r\n\r\nuntil the end", then="close")
        async with raw_upstream(until_close, serving) as up:
            trusting = ssl.create_default_context(cafile=str(certificate))
            async with pool_to(up.port, tls=trusting) as pool:
                body = b"x" * BIG
                assert await read(await post(pool, body)) == b"hello"
                assert await ask(pool) == b"until the end"
                assert await ask(pool) == b"hello"
                assert up.made == 2
                response = await post(pool)
                response.close()
            # By name: it is looked up, may have several addresses, and is what the certificate must say.
            named = HttpPool(Origin("localhost", up.port, trusting), SystemClock(), connect_s=2, keepalive_s=4)
            assert await ask(named) == b"hello"
            await named.aclose()
            async with pool_to(up.port, tls=ssl.create_default_context()) as pool:
                with pytest.raises(ssl.SSLCertVerificationError):
                    await ask(pool)
            await up.empty()

    run_on(loop, main())


def test_calls_at_once_do_not_mix(loop: str) -> None:
    async def serve(peer: Peer) -> None:
        while True:
            _, body = await peer.request()
            await asyncio.sleep(0)
            await peer.send(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body))

    async def main() -> None:
        async with raw_upstream(serve) as up, pool_to(up.port) as pool:

            async def caller(number: int) -> None:
                for turn in range(40):
                    body = b"%d/%d" % (number, turn)
                    task = asyncio.ensure_future(post(pool, body))
                    if (number + turn) % 7 == 0:
                        await asyncio.sleep(turn % 3 * 0.0003)
                        task.cancel()
                        await asyncio.gather(task, return_exceptions=True)
                        if not task.cancelled():
                            (await task).close()
                        continue
                    assert await read(await task) == body

            await asyncio.gather(*[caller(number) for number in range(20)])
            assert len(pool._open) == len(pool._idle) <= 20
            assert isinstance(up, RawUpstream)

    run_on(loop, main())
