"""Runs each command over a connection that is borrowed from a pool of redis-py: `pool.py CLASS PORT PASSWORD`."""
import sys

import redis
from shown import shown

pool = getattr(redis, sys.argv[1])(
    port=int(sys.argv[2]),
    password=sys.argv[3] or None,
    decode_responses=True,
    # Each check-out after this time is preceded by a PING.
    health_check_interval=0.001,
)


for line in sys.stdin:
    _, *words = line.rstrip("\n").split("\t")
    try:
        print(shown(redis.Redis(connection_pool=pool).execute_command(*words)), flush=True)
    except redis.exceptions.RedisError as error:
        print("error " + str(error), flush=True)
