"""Runs commands of the scenario with redis-py or valkey-py: `adapter.py MODULE PORT PASSWORD`."""
import importlib
import sys

from shown import shown

module = importlib.import_module(sys.argv[1])
port, password = int(sys.argv[2]), sys.argv[3] or None
clients = {}


def client(number):
    if number not in clients:
        clients[number] = module.Redis(port=port, password=password, decode_responses=True, socket_timeout=None)
    return clients[number]


for line in sys.stdin:
    number, *words = line.rstrip("\n").split("\t")
    try:
        if words[0] == "PIPELINE":
            pipeline = client(number).pipeline(transaction=False)
            for id in range(int(words[1])):
                pipeline.execute_command("AW.ADD", str(id))
            print(sum(added for added, _, _ in pipeline.execute()), flush=True)
        else:
            print(shown(client(number).execute_command(*words)), flush=True)
    except module.exceptions.ResponseError as error:
        print("error " + str(error), flush=True)
