package main

import (
	"ackwheel"
	"context"
	"errors"
	"log"
	"sync"
	"time"
)

const (
	maxAttempts = 2 // pushes of a message before it is given up
	draining    = 65
	pause       = 200 * time.Millisecond // before what failed is asked again
	later       = time.Second            // after which a batch that could not be dealt with is wanted again
	acksAtOnce  = 1_024
	remembered  = time.Hour // for as long a batch that was dealt with may come again
)

type message struct{ id, client uint64 }

// push is the last push of a message.
type push struct {
	attempt uint8
	at      time.Time
}

// records are what the node knows. In a real one they are a database, for nodes come and go.
type records struct {
	stored    map[message]bool               // all that was sent and has not arrived: a phone fetches it when it comes back
	onTheWay  map[message]push               // pushed, and neither arrived nor given up
	heard     map[uint64]time.Time           // when each session was heard last: here by its Acks, in a real node by whatever it says
	offline   map[uint64]bool                // all others are online; a phone that connects anew gets a new session
	dealtWith map[ackwheel.BatchID]time.Time // one that comes again is acknowledged, and that is all
	reporting int                            // reports of Acks that are not answered
	counts
}

// counts are for the summary.
type counts struct {
	Sent       int `json:"sent"`
	NotPushed  int `json:"not_pushed"`  // for its session was offline, or no sidecar took the message
	FirstPush  int `json:"first_push"`  // acknowledged in time, by the push that it was on
	SecondPush int `json:"second_push"` // the same
	Late       int `json:"late"`        // acknowledged after it had timed out
	Withdrawn  int `json:"withdrawn"`   // its push failed at once
	GivenUp    int `json:"given_up"`
	Again      int `json:"batches_again"`
}

type node struct {
	client *ackwheel.Client
	phones *phones
	mutex  sync.Mutex // held for moments, never while a request waits
	records
}

func newNode(client *ackwheel.Client, phones *phones) *node {
	return &node{client: client, phones: phones, records: records{
		stored: map[message]bool{}, onTheWay: map[message]push{}, heard: map[uint64]time.Time{},
		offline: map[uint64]bool{}, dealtWith: map[ackwheel.BatchID]time.Time{},
	}}
}

// know reads or changes the records.
func (n *node) know(with func(r *records)) {
	n.mutex.Lock()
	defer n.mutex.Unlock()
	with(&n.records)
}

// send stores what a user sent, and pushes it if the other side is online.
func (n *node) send(ctx context.Context, m message) {
	offline := false
	n.know(func(r *records) {
		r.Sent++
		r.stored[m] = true
		offline = r.offline[m.client]
	})
	var err error
	if !offline {
		err = n.push(ctx, []message{m}, 1)
	}
	if offline || err != nil {
		n.know(func(r *records) { r.NotPushed++ })
	}
	if err != nil {
		log.Printf("%v stays in the store, and is not pushed: %v", m, err)
	}
}

// push adds, then pushes, then takes back what could not be pushed.
func (n *node) push(ctx context.Context, messages []message, attempt uint8) error {
	if len(messages) == 0 {
		return nil
	}
	ids, clients := columns(messages)
	if _, _, err := n.client.AddNewMsg(ctx, ids, clients, 0, attempt); err != nil {
		return err
	}
	var failed []message
	for _, m := range n.setOut(messages, attempt) {
		if !n.phones.push(m, attempt) {
			failed = append(failed, m)
		}
	}
	if len(failed) == 0 {
		return nil
	}
	n.know(func(r *records) {
		for _, m := range failed {
			delete(r.onTheWay, m)
			r.offline[m.client] = true
			r.Withdrawn++
		}
	})
	// What is not withdrawn times out, and then nobody waits for it.
	n.delMsg(ctx, failed, ackwheel.Withdraw)
	return nil
}

// setOut notes that messages are pushed, and returns which: what was pushed before and has arrived meanwhile is left
// out. If it times out after all it finds no push noted.
func (n *node) setOut(messages []message, attempt uint8) (meant []message) {
	n.know(func(r *records) {
		for _, m := range messages {
			if _, waits := r.onTheWay[m]; attempt == 1 || waits {
				r.onTheWay[m] = push{attempt, time.Now()}
				meant = append(meant, m)
			}
		}
	})
	return meant
}

// acknowledge takes Acks from the phones, as many together as are there. None waits for the answer to another: while
// Redis is away a sidecar holds them, and must have them for that.
func (n *node) acknowledge(ctx context.Context) {
	for first := range n.phones.acks {
		acks := []message{first}
		for len(acks) < acksAtOnce && len(n.phones.acks) > 0 {
			acks = append(acks, <-n.phones.acks)
		}
		attempts := make([]uint8, len(acks)) // 0 for one that is on the way no more
		n.know(func(r *records) {
			for i, m := range acks {
				// Whatever the sidecar says of it: the phone has answered, and will not do so twice.
				attempts[i] = r.onTheWay[m].attempt
				delete(r.onTheWay, m)
				delete(r.stored, m)
				delete(r.offline, m.client)
				r.heard[m.client] = time.Now()
			}
			r.reporting++
			n.phones.answering.Add(-int64(len(acks)))
		})
		go n.report(ctx, acks, attempts)
	}
}

// report tells the sidecar of Acks, and counts what it says.
func (n *node) report(ctx context.Context, acks []message, attempts []uint8) {
	outcomes := n.delMsg(ctx, acks, 0)
	n.know(func(r *records) {
		r.reporting--
		for i, outcome := range outcomes {
			switch {
			case outcome == ackwheel.Acked && attempts[i] == 1:
				r.FirstPush++
			case outcome == ackwheel.Acked && attempts[i] > 1:
				r.SecondPush++
			case outcome == ackwheel.Late: // It timed out, but the phone is alive after all.
				r.Late++
			}
			// Unknown says nothing new: it was counted before, or is very old.
		}
	})
}

// delMsg repeats what may be repeated, as a DelMsg always may, until it is answered.
func (n *node) delMsg(ctx context.Context, messages []message, flags uint8) []uint8 {
	ids, clients := columns(messages)
	for {
		outcomes, err := n.client.DelMsg(ctx, ids, clients, flags)
		if err == nil {
			return outcomes
		}
		var failure *ackwheel.Error
		if ctx.Err() != nil || !errors.As(err, &failure) || !failure.Retryable {
			log.Printf("%d messages may not have been taken out, and time out then: %v", len(messages), err)
			return nil
		}
		time.Sleep(pause)
	}
}

// listen deals with timeout batches, one after the other, until the client ends.
func (n *node) listen(ctx context.Context) {
	for batch := range n.client.Batches {
		var err error
		if failure := n.timedOut(ctx, batch); failure != nil {
			log.Printf("a batch of %d is given back: %v", len(batch.MsgIDs), failure)
			_, err = n.client.BatchNack(ctx, batch.ID, uint32(later.Milliseconds()))
		} else {
			// Only now: had this process died before, another node would have got the batch.
			_, err = n.client.BatchAck(ctx, batch.ID)
		}
		if err != nil {
			log.Printf("a batch of %d will come again: %v", len(batch.MsgIDs), err)
		}
	}
}

// timedOut deals with a batch. It may be repeated after an error: what it did is seen from the records.
func (n *node) timedOut(ctx context.Context, batch *ackwheel.TimeoutBatch) error {
	again, givenUp, known := n.judge(batch)
	if known {
		return nil
	}
	// The silence of a storm is likelier our fault than the phones', and what a draining sidecar hands out had less than
	// its time: their messages wait in the store, but nobody is offline for that.
	saysOffline := !batch.Storm && !batch.Drained
	if err := n.push(ctx, again, maxAttempts); err != nil {
		var failure *ackwheel.Error
		if !errors.As(err, &failure) || failure.Code != draining {
			return err
		}
		// This sidecar takes no more messages, and given back the batch would end with it.
		givenUp, saysOffline = append(givenUp, again...), false
	}
	n.know(func(r *records) {
		for _, m := range givenUp {
			push, waits := r.onTheWay[m]
			if !waits {
				continue // Its late Ack came while the others were pushed.
			}
			delete(r.onTheWay, m)
			r.GivenUp++
			// Who was heard since the push is there, whatever it left unanswered. How old the batch is does not matter.
			if saysOffline && r.heard[m.client].Before(push.at) {
				r.offline[m.client] = true
			}
		}
		r.dealtWith[batch.ID] = time.Now()
		for id, at := range r.dealtWith {
			if time.Since(at) > remembered {
				delete(r.dealtWith, id)
			}
		}
	})
	return nil
}

// judge says which messages of a batch are pushed again, and which are given up. Those that have arrived before it
// came, or were pushed again already, are neither.
func (n *node) judge(batch *ackwheel.TimeoutBatch) (again, givenUp []message, known bool) {
	n.know(func(r *records) {
		if _, known = r.dealtWith[batch.ID]; known {
			r.Again++
			return
		}
		for i, id := range batch.MsgIDs {
			m := message{id, batch.Clients[i]}
			if r.onTheWay[m].attempt != batch.Attempts[i] {
				continue
			}
			if batch.Attempts[i] < maxAttempts && !batch.Drained { // A sidecar that drains takes no new messages.
				again = append(again, m)
			} else {
				givenUp = append(givenUp, m)
			}
		}
	})
	return again, givenUp, known
}

func columns(messages []message) (ids, clients []uint64) {
	for _, m := range messages {
		ids, clients = append(ids, m.id), append(clients, m.client)
	}
	return ids, clients
}
