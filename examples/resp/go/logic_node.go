// A logic node with redigo. Run it as `go run logic_node.go`, with PORT and TOKEN in the environment.
package main

import (
	"fmt"
	"log"
	"os"
	"strings"
	"time"

	"github.com/gomodule/redigo/redis"
)

func storeOffline(message string) {
	fmt.Println("offline", strings.ReplaceAll(message, ":", " "))
}

func main() {
	port, token := os.Getenv("PORT"), os.Getenv("TOKEN")
	r, err := redis.Dial("tcp", "127.0.0.1:"+port, redis.DialPassword(token), redis.DialReadTimeout(10*time.Second))
	if err != nil {
		log.Fatal(err)
	}
	r.Do("AW.ADD", "101:7", "102:8")                    // before the push
	fmt.Println(redis.Strings(r.Do("AW.DEL", "101:7"))) // the Ack of the phone: [acked]
	for {
		batches, err := redis.Values(r.Do("AW.TAKE", "default", "BLOCK", 2000))
		if err != nil {
			log.Fatal(err)
		}
		for _, batch := range batches {
			fields, _ := redis.Values(batch, nil)
			messages, _ := redis.Strings(fields[2], nil)
			for _, message := range messages {
				storeOffline(message)
			}
			r.Do("AW.ACK", "default", fields[0])
		}
	}
}
