"""A client of ackwheel in one file, with the standard library only (Python 3.10 and later).

    async with Client("127.0.0.1:7415", name="node-7", group="logic") as client:
        await client.add_new_msg([Message(101, client=7)])            # and then push it
        [outcome] = await client.del_msg([Message(101, client=7)])    # its Ack has come
        async for batch in client.batches():                          # nobody acknowledged these
            await store_for_later(batch.messages)
            try:
                await client.batch_ack(batch)                         # after it was dealt with, never before
            except AckwheelError as error:
                print(error.text)                                     # and go on: the client repeats it

With `tls=ssl.create_default_context(cafile=...)` the connection is encrypted. A Redis client library needs no such file: see
docs/RESP.md. It speaks version 1 of docs/PROTOCOL.md; when its connection is lost it connects and subscribes anew. What was not
answered ends with an AckwheelError that says `outcome_unknown`; without a connection requests fail, not applied.
Only a batch_ack is repeated by the client: on the next connection, and when its batch comes again, which is not handed
out a second time. Code that blocks belongs into `asyncio.to_thread`: for as long as it holds the event loop up, no Ping
is answered, and after two ping intervals the server closes the connection.
"""

from __future__ import annotations

import asyncio
import random
import ssl
import struct
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, AsyncIterator, Callable, NamedTuple, Sequence

HELLO, PING, GO_AWAY, ADD_NEW_MSG, DEL_MSG = 0x01, 0x02, 0x03, 0x10, 0x11
SUBSCRIBE, TIMEOUT_BATCH, BATCH_ACK, BATCH_NACK = 0x20, 0x21, 0x22, 0x23
ANSWER, PONG, ERROR = 0x80, 0x82, 0xFF  # An answer has the number of its request and the highest bit.
FLAGS = {TIMEOUT_BATCH: 7, SUBSCRIBE | ANSWER: 1, BATCH_NACK | ANSWER: 1, ERROR: 3}  # that a server may set
HEAD = struct.Struct(">IBBHI")  # length, type, flags, status, correlation id
WELCOME = struct.Struct(">BBHIIIII")  # version, reserved, slots, tick_ms, three limits, ping_interval_ms
BATCH = struct.Struct(">HHIQQIQQQI")  # batch id with its tick, delivery count, age_ms, added, acked, count
MISTAKES = {0x4854: " It is HTTP: the admin port?", 0x1503: " It wants TLS."}  # by the first bytes of no frame
HELLO_ID, SUBSCRIBE_ID, LAST_ID = 1, 2, 0xFFFF_FFFF  # The ids of other requests lie behind the first two.
MAX_FRAME_LENGTH, FIRST_PAUSE, LONGEST_PAUSE = 1_048_576, 0.1, 5.0  # pauses in seconds, between attempts to connect
MAX_BATCH_IDS = 4_096  # that a BatchAck carries


class Message(NamedTuple):
    msg_id: int
    client: int = 0


class TimeoutBatch(NamedTuple):
    id: bytes  # the 24 bytes that name it on every delivery: a consumer knows by them what it has dealt with
    tick: int
    delivery_count: int  # above 1: it was delivered before
    age_ms: int
    added: int
    acked: int
    last: bool
    storm: bool
    drained: bool
    messages: list[Message]
    attempts: bytes  # a number for each message


class Outcome(IntEnum):
    UNKNOWN, ACKED, LATE, WITHDRAWN = range(4)


@dataclass(eq=False)
class AckwheelError(Exception):
    """A request failed. Unless `outcome_unknown`, no part of it was applied. If `retryable`, it can succeed later."""

    code: int  # that of the server's Error; 0 where the client itself gave up
    outcome_unknown: bool
    retryable: bool
    text: str


class Client:
    """A connection to a sidecar, with a subscription if a group is named. For use in one event loop."""

    draining = False  # The server said GoAway and takes no more adds; this client stays for its last batches.
    connections = 0  # how many were made
    slots, tick_ms, max_messages, _ping_interval = 0xFFFF, 1_000, 32_768, 5.0  # until the server says its own

    def __init__(self, address: str, *, token: bytes = b"", name: str = "", group: str = "", credit: int = 10_000,
                 from_end: bool = False, time_limit: float = 5.0, tls: ssl.SSLContext | None = None) -> None:
        self._host, _, self._port, self._time_limit, self._tls = *address.rpartition(":"), time_limit, tls
        self._hello = struct.pack(">4sBBH", b"ACKW", 1, 1, len(token)) + token + _text(name)
        self._subscribe = (SUBSCRIBE, 2 * from_end, SUBSCRIBE_ID, struct.pack(">I", credit) + _text(group)) if group else ()
        self._unanswered: dict[int, asyncio.Future[Any]] = {}  # by correlation id
        self._batches: asyncio.Queue[bytes | None] = asyncio.Queue()  # their ids; None is the end
        self._waiting: dict[bytes, TimeoutBatch] = {}
        self._acked: dict[bytes, None] = {}  # acknowledged, and not known to be settled: never delivered again
        self._task: asyncio.Task[None] | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._again: asyncio.TimerHandle | None = None  # for a Subscribe that was refused for now
        self._to_write: list[bytes] = []
        self._last_id, self._pause, self._begun, self._up, self._closing = 2, FIRST_PAUSE, asyncio.Event(), False, False
        self._lost = AckwheelError(0, False, True, "no connection within the time limit")

    async def __aenter__(self) -> Client:
        self._task = asyncio.create_task(self._run())
        try:
            await asyncio.wait_for(self._begun.wait(), self._time_limit)
            if self.connections:
                return self
        except asyncio.TimeoutError:
            pass
        except asyncio.CancelledError:  # It must not go on alone.
            await self.__aexit__()
            raise
        lost = self._lost
        await self.__aexit__()
        raise lost

    async def __aexit__(self, *_: object) -> None:
        """Says GoAway and reads until the server has closed, so that no answer is lost. More than once is fine."""
        self._closing = True
        if self._up:
            self._lost = AckwheelError(0, False, True, "the client was closed")
            self._send(GO_AWAY, 0, self._new_id(), struct.pack(">HHI", 2, 0, int(1_000 * self._time_limit)))
            await asyncio.wait({self._task}, timeout=self._time_limit)
        while self._task and not self._task.done():  # Before Python 3.12 wait_for may swallow a cancellation.
            self._task.cancel()
            await asyncio.wait({self._task}, timeout=0.1)

    async def add_new_msg(self, messages: Sequence[Message], ack_timeout_ticks: int = 0, attempt: int = 1) -> tuple[int, list[bool]]:
        """Takes messages into flight, before they are pushed; 0 ticks are the default, one revolution. Returns the
        tick of their deadline, and for each message whether it was in flight already and is re-armed."""
        if not (0 <= ack_timeout_ticks <= self.slots and 0 <= attempt <= 255):
            raise ValueError(f"at most {self.slots} ticks and attempt 255, not {ack_timeout_ticks} and {attempt}")
        flags, body = self._list(messages)
        return await self._request(ADD_NEW_MSG, flags, struct.pack(">HBB", ack_timeout_ticks, attempt, 0) + body)

    async def del_msg(self, messages: Sequence[Message], withdraw: bool = False) -> list[Outcome]:
        """Reports Acks, or pushes that failed. Has no time limit: a server holds it while its store is away."""
        flags, body = self._list(messages)
        return await self._request(DEL_MSG, flags | 2 * withdraw, body, limited=False)

    def batches(self) -> AsyncIterator[TimeoutBatch]:
        """Timeout batches, until the client ends; some of them more than once. Who gives up waiting may wait again."""
        return self
    __aiter__ = batches

    async def __anext__(self) -> TimeoutBatch:
        while batch_id := await self._batches.get():
            if batch := self._waiting.pop(batch_id, None):  # Else it was acknowledged meanwhile.
                return batch
        self._batches.put_nowait(None)  # for others who iterate
        raise StopAsyncIteration if self._closing else self._lost

    async def batch_ack(self, *batches: TimeoutBatch) -> int:
        """Settles batches that were dealt with; returns how many were not settled before. If it fails it is repeated."""
        ids = [batch.id for batch in batches]
        for batch_id in ids:
            self._waiting.pop(batch_id, None)
            if len(self._acked) < MAX_BATCH_IDS:  # Of more than these the client knows nothing: they are delivered again.
                self._acked[batch_id] = None
        settled = await self._request(BATCH_ACK, 0, _ids(ids))
        self._forget(ids)
        return settled

    def _ack_again(self, ids: list[bytes]) -> None:
        correlation_id, result = self._new_id(), asyncio.get_running_loop().create_future()
        self._unanswered[correlation_id] = result
        result.add_done_callback(lambda result: result.exception() or self._forget(ids))
        self._send(BATCH_ACK, 0, correlation_id, _ids(ids))

    def _forget(self, ids: list[bytes]) -> None:
        for batch_id in ids:
            self._acked.pop(batch_id, None)

    async def batch_nack(self, batch: TimeoutBatch, delay_ms: int) -> bool:
        """Gives a batch back for others, or for later; returns whether this connection held it."""
        return await self._request(BATCH_NACK, 0, batch.id + struct.pack(">I", delay_ms))

    def _list(self, messages: Sequence[Message]) -> tuple[int, bytes]:
        if not 1 <= len(messages) <= self.max_messages:
            raise ValueError(f"a request has 1 to {self.max_messages} messages, not {len(messages)}")
        ids, clients = zip(*messages)
        numbers = ids + clients if any(clients) else ids
        return int(any(clients)), struct.pack(f">I{len(numbers)}Q", len(ids), *numbers)

    async def _request(self, kind: int, flags: int, body: bytes, limited: bool = True) -> Any:
        if not self._up or self._closing:
            raise AckwheelError(0, False, self._lost.retryable and not self._closing, f"not connected: {self._lost.text}")
        if kind in (BATCH_ACK, BATCH_NACK) and self._subscribe and not self._subscribed:
            raise AckwheelError(0, False, True, "not subscribed again yet; the batch comes again then")
        correlation_id, result = self._new_id(), asyncio.get_running_loop().create_future()
        self._unanswered[correlation_id] = result
        self._send(kind, flags, correlation_id, body)
        try:
            return await asyncio.wait_for(result, self._time_limit if limited else None)
        except asyncio.TimeoutError:  # Its correlation id stays in use until it is answered.
            raise AckwheelError(0, True, True, "not answered within the time limit") from None

    def _new_id(self) -> int:
        self._last_id = self._last_id + 1 if self._last_id < LAST_ID else SUBSCRIBE_ID + 1
        return self._last_id if self._last_id not in self._unanswered else self._new_id()

    def _send(self, kind: int, flags: int, correlation_id: int, body: bytes) -> None:
        if not self._to_write:  # What is sent in the same step of the event loop goes out in one write.
            asyncio.get_running_loop().call_soon(self._flush)
        self._to_write.append(HEAD.pack(8 + len(body), kind, flags, 0, correlation_id) + body)

    def _flush(self) -> None:
        if self._writer:
            self._writer.write(b"".join(self._to_write))
        self._to_write.clear()

    async def _run(self) -> None:
        try:
            while self._lost.retryable and not self._closing:
                try:
                    opening = asyncio.open_connection(self._host.strip("[]"), self._port, ssl=self._tls)
                    reader, self._writer = await asyncio.wait_for(opening, self._time_limit)
                    self._send(HELLO, 0, HELLO_ID, self._hello)
                    await self._read(reader)
                except AckwheelError as error:  # The server refuses the connection, perhaps for good.
                    self._lost = error
                except (OSError, ValueError, LookupError, struct.error, asyncio.TimeoutError) as error:
                    self._lost = AckwheelError(0, False, True, str(error) or "nothing was heard of the server")
                finally:
                    self._disconnect()
                if self._lost.retryable and not self._closing:
                    await asyncio.sleep(self._pause * random.uniform(0.5, 1))
                    self._pause = min(2 * self._pause, LONGEST_PAUSE)
        finally:
            self._batches.put_nowait(None)
            self._begun.set()

    def _disconnect(self) -> None:
        """Ends what belongs to the connection. Batches that nobody took yet come again on the next."""
        if self._writer:
            self._writer.transport.abort()
        if self._again:
            self._again.cancel()
        self._writer, self._again, self._up = None, None, False
        for correlation_id in list(self._unanswered):
            self._finish(correlation_id, AckwheelError(0, True, True, f"connection lost: {self._lost.text}"))
        while not self._batches.empty():
            self._batches.get_nowait()
        self._waiting.clear()

    async def _read(self, reader: asyncio.StreamReader) -> None:
        """Reads frames until the connection is lost, which is always an exception."""
        received = bytearray()
        while data := await self._hear(reader):
            received += data
            while len(received) >= 4:
                length = int.from_bytes(received[:4], "big")
                if not 8 <= length <= MAX_FRAME_LENGTH:
                    raise ValueError(f"the server sent a frame of length {length}: no ackwheel port?{MISTAKES.get(length >> 16, '')}")
                if len(received) < 4 + length:
                    break
                _, kind, flags, status, correlation_id = HEAD.unpack_from(received)
                self._receive(kind, flags, status, correlation_id, bytes(received[HEAD.size : 4 + length]))
                del received[: 4 + length]
        raise ConnectionResetError("the server closed the connection")

    async def _hear(self, reader: asyncio.StreamReader) -> bytes:
        """The next bytes. Each is a sign of life; without one for a ping interval the server is asked, once."""
        try:
            return await asyncio.wait_for(reader.read(1 << 16), self._ping_interval)
        except asyncio.TimeoutError:
            self._send(PING, 0, self._new_id(), b"")
            return await asyncio.wait_for(reader.read(1 << 16), self._ping_interval)

    def _receive(self, kind: int, flags: int, status: int, correlation_id: int, body: bytes) -> None:
        if kind in FLAGS and flags & ~FLAGS[kind]:
            raise ValueError(f"the server sent type {kind} with flags {flags}")
        if kind == PING:
            self._send(PONG, 0, correlation_id, body)
        elif kind == GO_AWAY:
            self.draining = True
        elif kind == TIMEOUT_BATCH:
            batch = _read_batch(flags, body)
            if batch.id in self._acked:
                return self._ack_again([batch.id])
            if batch.id not in self._waiting:
                self._batches.put_nowait(batch.id)
            self._waiting[batch.id] = batch  # For a slow consumer it takes the place of its copy that waits.
        elif kind == HELLO | ANSWER:
            _, _, self.slots, self.tick_ms, _, self.max_messages, _, ping_ms = WELCOME.unpack_from(body)
            self._up, self._subscribed, self.draining, self._ping_interval = True, False, False, ping_ms / 1_000
            if self._subscribe:
                self._send(*self._subscribe)
        elif kind == ERROR:
            error = AckwheelError(status, bool(flags & 1), bool(flags & 2), body.decode(errors="replace"))
            if correlation_id == SUBSCRIBE_ID and error.retryable:  # Requests are served meanwhile, DelMsg above all.
                self._lost = error
                self._again = asyncio.get_running_loop().call_later(random.uniform(0.5, 1), self._send, *self._subscribe)
            elif correlation_id not in self._unanswered:
                raise ValueError(error.text) if correlation_id == 0 and self._up else error  # Of a wrong frame, or a refusal.
            else:
                self._finish(correlation_id, error)
        elif kind in READERS and correlation_id in self._unanswered:
            self._finish(correlation_id, READERS[kind](flags, body))
        if kind == (SUBSCRIBE if self._subscribe else HELLO) | ANSWER:
            self._pause, self._subscribed, self.connections = FIRST_PAUSE, True, self.connections + 1
            if self._acked:
                self._ack_again(list(self._acked))
            self._begun.set()

    def _finish(self, correlation_id: int, value: Any) -> None:
        result = self._unanswered.pop(correlation_id)
        if not result.done():  # It is if its caller waits no more.
            result.set_exception(value) if isinstance(value, AckwheelError) else result.set_result(value)


def _ids(ids: list[bytes]) -> bytes:
    return struct.pack(">I", len(ids)) + b"".join(ids)


def _text(text: str) -> bytes:
    return bytes([len(text.encode())]) + text.encode()


def _read_batch(flags: int, body: bytes) -> TimeoutBatch:
    _, _, _, _, tick, delivery_count, age_ms, added, acked, count = BATCH.unpack_from(body)
    *numbers, attempts = struct.unpack(f">{2 * count}Q{count}s", body[BATCH.size :])
    messages = list(map(Message, numbers[:count], numbers[count:]))
    marks = (bool(flags & bit) for bit in (1, 2, 4))  # last, storm, drained
    return TimeoutBatch(body[:24], tick, delivery_count, age_ms, added, acked, *marks, messages, attempts)


READERS: dict[int, Callable[[int, bytes], Any]] = {
    ADD_NEW_MSG | ANSWER: lambda _, body: (
        int.from_bytes(body[:8], "big"), [bool(body[16 + i // 8] >> i % 8 & 1) for i in range(int.from_bytes(body[8:12], "big"))]),
    DEL_MSG | ANSWER: lambda _, body: list(map(Outcome, struct.unpack(f">4x{len(body) - 4}B", body))),
    BATCH_ACK | ANSWER: lambda _, body: struct.unpack(">I", body)[0],
    BATCH_NACK | ANSWER: lambda flags, _: bool(flags),
}
