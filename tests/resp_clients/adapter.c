/* Runs commands of the scenario with hiredis: `adapter PORT PASSWORD`. */
#include <hiredis/hiredis.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static redisContext *clients[16];

static redisContext *client(int number, int port, const char *password) {
    if (clients[number] == NULL) {
        clients[number] = redisConnect("127.0.0.1", port);
        if (*password != '\0') {
            freeReplyObject(redisCommand(clients[number], "AUTH %s", password));
        }
    }
    return clients[number];
}

static void show(const redisReply *reply) {
    switch (reply->type) {
    case REDIS_REPLY_ERROR: printf("error %s", reply->str); break;
    case REDIS_REPLY_INTEGER: printf("%lld", reply->integer); break;
    case REDIS_REPLY_ARRAY:
        printf("[");
        for (size_t index = 0; index < reply->elements; index++) {
            if (index > 0) printf(",");
            show(reply->element[index]);
        }
        printf("]");
        break;
    default: printf("\"%s\"", reply->str);
    }
}

int main(int count, char **arguments) {
    static char line[65536];
    int port = atoi(arguments[1]);
    if (count < 3) return 2;
    while (fgets(line, sizeof line, stdin) != NULL) {
        const char *words[64];
        int number_of_words = 0;
        line[strcspn(line, "\n")] = '\0';
        redisContext *context = client(atoi(strtok(line, "\t")), port, arguments[2]);
        for (char *word = strtok(NULL, "\t"); word != NULL; word = strtok(NULL, "\t")) words[number_of_words++] = word;
        if (strcmp(words[0], "PIPELINE") == 0) {
            long long sum = 0;
            int commands = atoi(words[1]);
            for (int id = 0; id < commands; id++) redisAppendCommand(context, "AW.ADD %d", id);
            for (int id = 0; id < commands; id++) {
                redisReply *reply;
                if (redisGetReply(context, (void **)&reply) != REDIS_OK) return 1;
                sum += reply->element[0]->integer;
                freeReplyObject(reply);
            }
            printf("%lld\n", sum);
        } else {
            redisReply *reply = redisCommandArgv(context, number_of_words, words, NULL);
            if (reply == NULL) return 1;
            show(reply);
            printf("\n");
            freeReplyObject(reply);
        }
        fflush(stdout);
    }
    return 0;
}
