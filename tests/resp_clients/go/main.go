// Runs commands of the scenario with redigo: `adapter PORT PASSWORD`.
package main

import (
	"bufio"
	"fmt"
	"os"
	"strconv"
	"strings"

	"github.com/gomodule/redigo/redis"
)

func shown(reply interface{}) string {
	switch value := reply.(type) {
	case int64:
		return strconv.FormatInt(value, 10)
	case []byte:
		return strconv.Quote(string(value))
	case []interface{}:
		elements := make([]string, len(value))
		for index, element := range value {
			elements[index] = shown(element)
		}
		return "[" + strings.Join(elements, ",") + "]"
	default:
		return fmt.Sprintf("%q", value)
	}
}

func main() {
	clients := map[string]redis.Conn{}
	lines := bufio.NewScanner(os.Stdin)
	for lines.Scan() {
		words := strings.Split(lines.Text(), "\t")
		client := clients[words[0]]
		if client == nil {
			var err error
			if client, err = redis.Dial("tcp", "127.0.0.1:"+os.Args[1], redis.DialPassword(os.Args[2])); err != nil {
				panic(err)
			}
			clients[words[0]] = client
		}
		if words[1] == "PIPELINE" {
			count, _ := strconv.Atoi(words[2])
			for id := 0; id < count; id++ {
				client.Send("AW.ADD", id)
			}
			client.Flush()
			sum := int64(0)
			for id := 0; id < count; id++ {
				reply, err := redis.Values(client.Receive())
				if err != nil {
					panic(err)
				}
				sum += reply[0].(int64)
			}
			fmt.Println(sum)
			continue
		}
		arguments := []interface{}{}
		for _, word := range words[2:] {
			arguments = append(arguments, word)
		}
		reply, err := client.Do(words[1], arguments...)
		if err != nil {
			fmt.Println("error", err)
		} else {
			fmt.Println(shown(reply))
		}
	}
}
