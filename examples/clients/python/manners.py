"""What the scenario does not show: python3 manners.py ADDR GROUP GATE

Closes a client at odd moments, names what is no sidecar, repeats a request whose connection is lost, and is slow
with its batches until the file GATE is there: then one copy waits, the last. Its acknowledgement is lost, which the
client mends. Prints a line of JSON; exits with 1 and says why if something is wrong.
"""

import asyncio
import json
import pathlib
import socket
import sys
import time

from ackwheel import AckwheelError, Client, Message

# Version 1, 15 slots of 1 s, the usual limits, and a ping interval of 5 s; neither a store nor a name.
WELCOME = bytes.fromhex("00000022810000000000000101 00 000f 000003e8 00100000 00008000 000f4240 00001388 00 00")
# What was read is no frame, so it has no correlation id: malformed_frame, "no".
NO_FRAME = bytes.fromhex("0000000a ff 00 0001 00000000") + b"no"


async def close_without_connection():
    """Closes before it is connected, after that has failed, and twice: each returns."""
    with socket.create_server(("127.0.0.1", 0)) as nobody:
        address = "127.0.0.1:{}".format(nobody.getsockname()[1])
    await Client(address).__aexit__()
    client = Client(address, time_limit=0.2)
    try:
        await client.__aenter__()
        sys.exit("nobody listens there")
    except AckwheelError as error:
        assert error.retryable and not error.outcome_unknown, error
    await client.__aexit__()


async def close_while_an_ack_is_held():
    """A server that holds an Ack is waited for, but not for ever: then nobody knows what became of it."""
    async def hold(reader, writer):
        writer.write(WELCOME)
        await reader.read()
        writer.close()

    server = await asyncio.start_server(hold, "127.0.0.1", 0)
    client = await Client("127.0.0.1:{}".format(server.sockets[0].getsockname()[1]), time_limit=0.5).__aenter__()
    held = asyncio.create_task(client.del_msg([Message(1)]))
    await asyncio.sleep(0.1)
    await client.__aexit__()
    error = (await asyncio.gather(held, return_exceptions=True))[0]
    assert error.outcome_unknown and "the client was closed" in error.text, error
    server.close()


async def connect_anew_after_a_wrong_frame():
    """What ends a connection that was welcomed does not end the client."""
    async def end(reader, writer):
        writer.write(WELCOME + NO_FRAME)
        writer.close()

    server = await asyncio.start_server(end, "127.0.0.1", 0)
    async with Client("127.0.0.1:{}".format(server.sockets[0].getsockname()[1])) as client:
        deadline = time.monotonic() + 10
        while client.connections < 2:
            assert time.monotonic() < deadline, "it should connect anew"
            await asyncio.sleep(0.01)
    server.close()


async def name_what_is_no_sidecar():
    """The mistakes that are made most are named, where the server says enough."""
    for answer, name in (b"HTTP/1.1 400 Bad Request\r\n\r\n", "HTTP"), (bytes.fromhex("15030300020246"), "TLS"):
        async def refuse(reader, writer):
            await reader.read(1)
            writer.write(answer)
            writer.close()

        server = await asyncio.start_server(refuse, "127.0.0.1", 0)
        try:
            await Client("127.0.0.1:{}".format(server.sockets[0].getsockname()[1]), time_limit=0.2).__aenter__()
            sys.exit("that is no sidecar")
        except AckwheelError as error:
            assert name in error.text, error
        server.close()


async def leave_no_task_behind():
    """Who gives up waiting for a connection does not leave a client that goes on connecting."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        opening = asyncio.create_task(Client("127.0.0.1:{}".format(silent.getsockname()[1])).__aenter__())
        connection, _ = await asyncio.get_running_loop().run_in_executor(None, silent.accept)
        opening.cancel()
        while others := asyncio.all_tasks() - {asyncio.current_task()}:
            await asyncio.wait(others)
        connection.close()
        assert opening.cancelled()


async def until_it_succeeds(client):
    lost = 0
    while True:
        try:
            await client.del_msg([Message(1)])
            return lost
        except AckwheelError as error:
            assert error.retryable, error
            lost += error.outcome_unknown
            await asyncio.sleep(0.01)


async def lose_the_ack_of(client, batch):
    """The client repeats it by itself, and hands the batch out no more. (Its consumer need not know of the loss.)"""
    try:
        await client.batch_ack(batch)
        sys.exit("its connection should be cut")
    except AckwheelError as error:
        assert error.outcome_unknown, error
    try:
        await asyncio.wait_for(anext(client.batches()), 2)
        sys.exit("what was acknowledged is handed out again")
    except asyncio.TimeoutError:
        pass


async def must_refuse(request):
    try:
        await request
    except ValueError:
        return
    sys.exit("it should be refused")


async def run(address, group, gate):
    await close_without_connection()
    await leave_no_task_behind()
    await close_while_an_ack_is_held()
    await connect_anew_after_a_wrong_frame()
    await name_what_is_no_sidecar()
    async with Client(address, name="manners.py", group=group, credit=100, from_end=True) as client:
        lost = sum([await until_it_succeeds(client) for _ in range(20)])
        for ticks, attempt in (-1, 1), (65_536, 1), (1, -1), (1, 256):
            await must_refuse(client.add_new_msg([Message(7)], ticks, attempt))
        batches = client.batches()
        try:
            await asyncio.wait_for(anext(batches), 0.001)
            sys.exit("nothing can have timed out yet")
        except asyncio.TimeoutError:
            pass  # Who gives up waiting may wait again.
        await client.add_new_msg([Message(7)], ack_timeout_ticks=1, attempt=200)
        while not pathlib.Path(gate).exists():
            await asyncio.sleep(0.01)
        batch, waiting = await anext(batches), 1
        try:
            await asyncio.wait_for(anext(batches), 0.001)
            waiting += 1
        except asyncio.TimeoutError:
            pass
        await lose_the_ack_of(client, batch)
    await client.__aexit__()
    figures = {"lost": lost, "waiting": waiting, "delivery": batch.delivery_count, "attempt": batch.attempts[0]}
    print(json.dumps(figures))


if __name__ == "__main__":
    asyncio.run(run(*sys.argv[1:]))
