"""What the scenario does not show: python3 manners.py ADDR GROUP GATE

Closes a client at odd moments, repeats a request whose connection is lost, and is slow with its batches until the
file GATE is there: then one copy waits. Prints a line of JSON; exits with 1 and says why if something is wrong.
"""

import asyncio
import json
import pathlib
import socket
import sys

from ackwheel import AckwheelError, Client, Message


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


async def must_refuse(request):
    try:
        await request
    except ValueError:
        return
    sys.exit("it should be refused")


async def run(address, group, gate):
    await close_without_connection()
    await leave_no_task_behind()
    async with Client(address, name="manners.py", group=group, credit=100, from_end=True) as client:
        lost = sum([await until_it_succeeds(client) for _ in range(20)])
        for ticks, attempt in (-1, 1), (65_536, 1), (1, -1), (1, 256):
            await must_refuse(client.add_new_msg([Message(7)], ticks, attempt))
        await client.add_new_msg([Message(7)], ack_timeout_ticks=1, attempt=200)
        while not pathlib.Path(gate).exists():
            await asyncio.sleep(0.01)
        batches = client.batches()
        batch, waiting = await anext(batches), 1
        try:
            await asyncio.wait_for(anext(batches), 0.001)
            waiting += 1
        except asyncio.TimeoutError:
            pass
        await client.batch_ack(batch)
    await client.__aexit__()
    print(json.dumps({"lost": lost, "waiting": waiting, "attempt": batch.attempts[0]}))


if __name__ == "__main__":
    asyncio.run(run(*sys.argv[1:]))
