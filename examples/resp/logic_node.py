"""A logic node with redis-py. Run it as `python3 logic_node.py`, with PORT and TOKEN in the environment."""
import os

import redis

PORT, TOKEN = int(os.environ.get("PORT", "7417")), os.environ.get("TOKEN")


def store_offline(id, client="0"):
    print("offline", id, client, flush=True)


r = redis.Redis(port=PORT, password=TOKEN, decode_responses=True, socket_timeout=10)
r.execute_command("AW.ADD", "101:7", "102:8")  # before the push
print(r.execute_command("AW.DEL", "101:7"))  # the Ack of the phone: ['acked']
while True:
    for batch, _, messages, *_ in r.execute_command("AW.TAKE", "default", "BLOCK", 2000):
        for message in messages:
            store_offline(*message.split(":"))
        r.execute_command("AW.ACK", "default", batch)
