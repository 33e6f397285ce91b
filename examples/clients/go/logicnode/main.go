// A small logic node: go run ./logicnode -addr ADDR -timeout TIME
//
// It pushes messages to simulated phones, and knows which of them are online: it adds before it pushes, withdraws what
// could not be pushed, pushes a second time what timed out once, gives up what timed out twice, and acknowledges a batch
// when it was dealt with. All of that is in node.go; here are the phones. TIME is what the sidecar gives an Ack, which
// the phones must know to be late: 3s with `ackwheel serve --tick 200ms`. It ends by itself after some eight times as long,
// prints what came of it as one line of JSON, and exits with 1 if something is left open.
package main

import (
	"ackwheel"
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"log"
	"sort"
	"sync"
	"sync/atomic"
	"time"
)

const (
	sessions, messages = 20, 300
	pace               = 5 * time.Millisecond
)

// phones answer as their sessions' numbers want it: of ten, six at once, one to the second push alone, one when it was
// given up, one never, and one has closed its connection.
type phones struct {
	timeout   time.Duration
	acks      chan message
	answering atomic.Int64 // Acks that the node does not know yet
}

// push says whether there is somebody at the other end.
func (p *phones) push(m message, attempt uint8) bool {
	roundTrip := time.Duration(10+m.id%90) * time.Millisecond
	switch m.client % 10 {
	case 6:
		if attempt == 1 {
			return true
		}
	case 7:
		roundTrip = p.timeout * 5 / 2
	case 8:
		return true
	case 9:
		return false
	}
	p.answering.Add(1)
	time.AfterFunc(roundTrip, func() { p.acks <- m })
	return true
}

func main() {
	address := flag.String("addr", "127.0.0.1:7415", "where the sidecar listens")
	token := flag.String("token", "", "its token, if it asks for one")
	timeout := flag.Duration("timeout", 15*time.Second, "what it gives an Ack: its slots times its tick")
	flag.Parse()
	client := &ackwheel.Client{Address: *address, Token: *token, Name: "logicnode.go", Group: "default", Credit: 10_000}
	ctx, cancel := context.WithCancel(context.Background())
	if err := client.Connect(ctx); err != nil {
		log.Fatal(err)
	}
	node := newNode(client, &phones{timeout: *timeout, acks: make(chan message, acksAtOnce)})
	go node.acknowledge(ctx)
	listened := make(chan struct{})
	go func() {
		defer close(listened)
		node.listen(ctx)
	}()

	// Message ids must not repeat while a phone may still answer an old one: a real node's are unique for ever, and so are
	// its sessions. Here the time makes the ids so.
	first := uint64(time.Now().UnixMicro())
	var sending sync.WaitGroup
	for i := uint64(0); i < messages; i++ {
		m := message{first + i, 1 + i%sessions}
		sending.Add(1)
		go func() { // No message waits for another: a sidecar that is away would hold up all of them.
			defer sending.Done()
			node.send(ctx, m)
		}()
		time.Sleep(pace)
	}
	sending.Wait()
	for giveUp := time.Now().Add(10**timeout + 10*time.Second); !node.isSettled() && time.Now().Before(giveUp); time.Sleep(pace) {
	}
	settled := node.isSettled()
	node.printSummary()
	cancel()
	client.Close()
	<-listened
	if !settled {
		log.Fatal("messages or Acks are open")
	}
}

// isSettled: every message has arrived or is stored, and neither a phone nor the sidecar will say anything more.
func (n *node) isSettled() (settled bool) {
	n.know(func(r *records) { settled = len(r.onTheWay) == 0 && r.reporting == 0 && n.phones.answering.Load() == 0 })
	return settled
}

func (n *node) printSummary() {
	n.know(func(r *records) {
		offline := []uint64{}
		for session := range r.offline {
			offline = append(offline, session)
		}
		sort.Slice(offline, func(i, j int) bool { return offline[i] < offline[j] })
		line, _ := json.Marshal(struct {
			counts
			Stored  int      `json:"stored"`
			Offline []uint64 `json:"offline"`
		}{r.counts, len(r.stored), offline})
		fmt.Println(string(line))
	})
}
