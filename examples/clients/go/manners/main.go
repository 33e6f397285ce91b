// What the scenario does not show: go run ./manners ADDR GROUP GATE
//
// Closes a client at odd moments, repeats a request whose connection is lost, and is slow with its batches until the
// file GATE is there: then one copy waits. Prints a line of JSON; exits with 1 and says why if something is wrong.
package main

import (
	"ackwheel"
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"time"
)

var ctx = context.Background()

func must(fine bool, what string, values ...any) {
	if !fine {
		fmt.Fprintln(os.Stderr, append([]any{what}, values...)...)
		os.Exit(1)
	}
}

func main() {
	closeWithoutConnection()
	client := &ackwheel.Client{Address: os.Args[1], Name: "manners.go", Group: os.Args[2], SubscribeFlags: 2, Credit: 100}
	must(client.Connect(ctx) == nil, "no connection")
	lost := 0
	for i := 0; i < 20; i++ {
		_, err := client.DelMsg(ctx, []uint64{1}, []uint64{0}, 0)
		for err != nil {
			var failure *ackwheel.Error
			must(errors.As(err, &failure) && failure.Retryable, "it should be retryable:", err)
			if failure.OutcomeUnknown {
				lost++
			}
			time.Sleep(10 * time.Millisecond)
			_, err = client.DelMsg(ctx, []uint64{1}, []uint64{0}, 0)
		}
	}
	_, _, err := client.AddNewMsg(ctx, []uint64{7}, []uint64{0}, 1, 200)
	must(err == nil, "not added:", err)
	for _, err = os.Stat(os.Args[3]); err != nil; _, err = os.Stat(os.Args[3]) {
		time.Sleep(10 * time.Millisecond)
	}
	waiting := len(client.Batches)
	batch := <-client.Batches
	_, err = client.BatchAck(ctx, batch.ID)
	must(err == nil, "not settled:", err)
	client.Close()
	client.Close()
	fmt.Printf("{\"lost\":%d,\"waiting\":%d,\"attempt\":%d}\n", lost, waiting, batch.Attempts[0])
}

// closeWithoutConnection closes before Connect, after one that failed, and twice: each returns.
func closeWithoutConnection() {
	nobody, err := net.Listen("tcp", "127.0.0.1:0")
	must(err == nil, "no port:", err)
	address := nobody.Addr().String()
	nobody.Close()
	client := &ackwheel.Client{Address: address, Group: "nobody", Credit: 10}
	client.Close()
	_, err = client.BatchAck(ctx)
	must(err != nil, "there is no connection to ask on:", err)
	err = client.Connect(ctx)
	var failure *ackwheel.Error
	must(errors.As(err, &failure) && failure.Retryable, "nobody listens there:", err)
	_, isOpen := <-client.Batches
	must(!isOpen, "there are no batches")
	client.Close()
	client.Close()
}
