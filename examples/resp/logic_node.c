/* A logic node with hiredis: cc -o logic_node logic_node.c -lhiredis. It reads PORT and TOKEN from the environment. */
#include <hiredis/hiredis.h>
#include <stdio.h>
#include <stdlib.h>

static void store_offline(const char *message) {
    printf("offline ");
    for (; *message != '\0'; message++) putchar(*message == ':' ? ' ' : *message);
    printf("\n");
    fflush(stdout);
}

int main(void) {
    const char *port = getenv("PORT"), *token = getenv("TOKEN");
    redisContext *c = redisConnect("127.0.0.1", port == NULL ? 7417 : atoi(port));
    if (c == NULL || c->err) return 1;
    if (token != NULL) freeReplyObject(redisCommand(c, "AUTH %s", token));
    freeReplyObject(redisCommand(c, "AW.ADD 101:7 102:8")); /* before the push */
    freeReplyObject(redisCommand(c, "AW.DEL 101:7"));       /* the Ack of the phone */
    for (redisReply *batches; (batches = redisCommand(c, "AW.TAKE default BLOCK 2000")) != NULL;) {
        for (size_t b = 0; b < batches->elements; b++) {
            redisReply **fields = batches->element[b]->element;
            for (size_t m = 0; m < fields[2]->elements; m++) store_offline(fields[2]->element[m]->str);
            freeReplyObject(redisCommand(c, "AW.ACK default %s", fields[0]->str));
        }
        freeReplyObject(batches);
    }
    return 1;
}
