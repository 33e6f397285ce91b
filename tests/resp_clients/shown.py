"""Writes a reply as the scenario expects it."""


def shown(reply):
    if isinstance(reply, int):
        return str(reply)
    if isinstance(reply, list):
        return "[" + ",".join(map(shown, reply)) + "]"
    return '"%s"' % reply
