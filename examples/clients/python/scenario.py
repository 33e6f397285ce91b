"""The scenario that every client of this folder runs: python3 scenario.py ADDR GROUP [TOKEN [CA]]

Adds 1,000 messages, acknowledges 900, and receives exactly the other 100 as timeouts, whatever happens to its
connection meanwhile. The first batch is given back once, and must come again. Prints its figures as one line of
JSON; exits with 1 and says why if they are wrong.
"""

import asyncio
import json
import ssl
import sys
from collections import Counter
from types import SimpleNamespace

from ackwheel import AckwheelError, Client, Message, Outcome

# Ids and clients beyond what a signed 64-bit integer holds: all of them are legal.
MESSAGES = [Message((1 << 63) - 500 + i, client=(1 << 64) - 1 - i) for i in range(1_000)]
SILENT = {message for i, message in enumerate(MESSAGES) if i % 10 == 9}
ACKNOWLEDGED = [message for message in MESSAGES if message not in SILENT]
PATIENCE = 60.0


async def until_it_succeeds(figures, request):
    """Repeats a request while that may help. Returns its result, and whether an earlier try may have been applied."""
    repeated = False
    while True:
        try:
            return await request(), repeated
        except AckwheelError as error:
            if not error.retryable:
                raise
            figures["outcome_unknown"] += error.outcome_unknown
            repeated |= error.outcome_unknown
            await asyncio.sleep(0.02)


async def add(client, figures, messages):
    (_, rearmed), repeated = await until_it_succeeds(figures, lambda: client.add_new_msg(messages))
    figures["added"] += len(messages) if repeated else rearmed.count(False)


async def acknowledge(client, figures, messages):
    outcomes, repeated = await until_it_succeeds(figures, lambda: client.del_msg(messages))
    # What an earlier try acknowledged is unknown to the second.
    fine = (Outcome.ACKED, Outcome.UNKNOWN) if repeated else (Outcome.ACKED,)
    figures["acked"] += sum(outcome in fine for outcome in outcomes)


async def give_back_nothing(client, figures):
    """What a client says of batches before it is subscribed again is no mistake: it may be repeated."""
    nobodys = SimpleNamespace(id=bytes(24))
    held, _ = await until_it_succeeds(figures, lambda: client.batch_nack(nobodys, delay_ms=0))
    figures["unexpected"] += held


async def listen(client, figures):
    """Takes batches until all that must time out has come and is settled, and for three ticks longer."""
    missing, dealt_with, batches = set(SILENT), set(), client.batches()
    while True:
        try:
            longer = PATIENCE if missing else 3 * client.tick_ms / 1_000
            batch = await asyncio.wait_for(anext(batches), longer)
        except asyncio.TimeoutError:
            return
        figures["redelivered"] += batch.delivery_count > 1
        if not figures["given_back"]:
            figures["given_back"] += await give_back(client, batch)
            continue
        if batch.id not in dealt_with:
            dealt_with.add(batch.id)
            figures["drained"] += batch.drained
            for message in batch.messages:
                figures["timed_out" if message in missing else "unexpected"] += 1
                missing.discard(message)
        # The client would repeat it by itself; but it is closed soon.
        await until_it_succeeds(figures, lambda: client.batch_ack(batch))


async def give_back(client, batch):
    try:
        return await client.batch_nack(batch, delay_ms=50)
    except AckwheelError:
        return False  # With the connection it is given back too.


async def run(address, group, token, ca):
    names = "added", "acked", "timed_out", "unexpected", "given_back", "redelivered", "drained", "outcome_unknown"
    figures = Counter(dict.fromkeys(names, 0))
    tls = ssl.create_default_context(cafile=ca) if ca else None
    async with Client(address, token=token.encode(), name="scenario.py", group=group, from_end=True, tls=tls) as client:
        listening = asyncio.create_task(listen(client, figures))
        # All requests of a step are in flight at once.
        await asyncio.gather(*(add(client, figures, MESSAGES[i : i + 50]) for i in range(0, 1_000, 50)))
        acknowledging = (acknowledge(client, figures, ACKNOWLEDGED[i : i + 50]) for i in range(0, 900, 50))
        await asyncio.gather(*acknowledging, give_back_nothing(client, figures))
        await listening
        figures["connections"] = client.connections
    return figures


def main():
    if len(sys.argv) not in (3, 4, 5):
        sys.exit(__doc__.splitlines()[0])
    try:
        figures = asyncio.run(run(*sys.argv[1:], *[""] * (5 - len(sys.argv))))
    except AckwheelError as error:
        sys.exit(f"code {error.code}, retryable {error.retryable}: {error.text}")
    print(json.dumps(figures))
    expected = {"added": 1_000, "acked": 900, "timed_out": 100, "unexpected": 0}
    wrong = [f"{name} is {figures[name]}, not {value}" for name, value in expected.items() if figures[name] != value]
    sys.exit("; ".join(wrong) or 0)


if __name__ == "__main__":
    main()
