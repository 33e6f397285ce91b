// What the scenario does not show: go run ./manners ADDR GROUP GATE
//
// Closes a client at odd moments, names what is no sidecar, repeats a request whose connection is lost, and is slow
// with its batches until the file GATE is there: then one copy waits, the last. Its acknowledgement is lost, which the
// client mends. Prints a line of JSON; exits with 1 and says why if something is wrong.
package main

import (
	"ackwheel"
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"strings"
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
	closeWhileAnAckIsHeld()
	nameWhatIsNoSidecar()
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
	done, cancel := context.WithCancel(ctx)
	cancel()
	_, err := client.DelMsg(done, []uint64{1}, []uint64{0}, 0)
	var failure *ackwheel.Error
	must(errors.As(err, &failure) && !failure.OutcomeUnknown, "it should not be sent:", err)
	_, _, err = client.AddNewMsg(ctx, []uint64{7}, []uint64{0}, 1, 200)
	must(err == nil, "not added:", err)
	for _, err = os.Stat(os.Args[3]); err != nil; _, err = os.Stat(os.Args[3]) {
		time.Sleep(10 * time.Millisecond)
	}
	waiting := len(client.Batches)
	batch := <-client.Batches
	_, err = client.BatchAck(ctx, batch.ID)
	must(errors.As(err, &failure) && failure.OutcomeUnknown, "its connection should be cut:", err)
	select { // The client repeats it by itself, and hands the batch out no more.
	case again := <-client.Batches:
		must(false, "what was acknowledged is handed out again:", again.ID)
	case <-time.After(2 * time.Second):
	}
	client.Close()
	client.Close()
	fmt.Printf("{\"lost\":%d,\"waiting\":%d,\"delivery\":%d,\"attempt\":%d}\n", lost, waiting, batch.DeliveryCount, batch.Attempts[0])
}

// served has one connection made to it answered with these bytes; it reads on until the client is gone.
func served(answer string) string {
	server, err := net.Listen("tcp", "127.0.0.1:0")
	must(err == nil, "no port:", err)
	go func() {
		conn, _ := server.Accept()
		server.Close()
		conn.Write([]byte(answer))
		io.Copy(io.Discard, conn)
		conn.Close()
	}()
	return server.Addr().String()
}

// closeWhileAnAckIsHeld waits for a server that holds an Ack, but not for ever: then nobody knows what became of it.
func closeWhileAnAckIsHeld() {
	// Version 1, 15 slots of 1 s, the usual limits, and a ping interval of 5 s; neither a store nor a name.
	welcome, _ := hex.DecodeString("000000228100000000000001" + "0100000f000003e80010000000008000000f4240000013880000")
	client := &ackwheel.Client{Address: served(string(welcome))}
	must(client.Connect(ctx) == nil, "no connection")
	held := make(chan error)
	go func() {
		_, err := client.DelMsg(ctx, []uint64{1}, []uint64{0}, 0)
		held <- err
	}()
	time.Sleep(100 * time.Millisecond)
	client.Close()
	err := <-held
	var failure *ackwheel.Error
	must(errors.As(err, &failure) && failure.OutcomeUnknown, "nobody knows what became of it:", err)
}

// nameWhatIsNoSidecar has the mistakes named that are made most.
func nameWhatIsNoSidecar() {
	answers := map[string]string{"HTTP": "HTTP/1.1 400 Bad Request\r\n\r\n", "TLS": "\x15\x03\x03\x00\x02\x02\x46"}
	for name, answer := range answers {
		err := (&ackwheel.Client{Address: served(answer)}).Connect(ctx)
		must(err != nil && strings.Contains(err.Error(), name), "that is no sidecar:", err)
	}
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
