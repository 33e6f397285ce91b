package main

import (
	"ackwheel"
	"context"
	"errors"
	"log"
	"math/rand"
	"sync"
	"time"
)

const (
	maxAttempts = 2 // pushes of a message before it is given up
	draining    = 65
	firstPause  = 100 * time.Millisecond // before what failed is asked again; then twice as long each time
	lastPause   = 5 * time.Second
	patience    = 5 * time.Second  // with any answer but that to a DelMsg, which a server holds while its store is away
	persistence = 10 * time.Second // with an add, shorter than a batch may stay unacknowledged
	later       = time.Second      // after which a batch that could not be dealt with is wanted again
	acksAtOnce  = 1_024
	remembered  = time.Hour // a batch whose BatchAck was answered is not redelivered, but for what Redis has lost
)

type message struct{ id, client uint64 }

// push is the last push of a message.
type push struct {
	attempt uint8
	at      time.Time
}

// records are what the node knows. In a real one they are a database, for nodes come and go.
type records struct {
	stored    map[message]bool               // all that was sent and has not arrived: pushed when its session is heard again
	onTheWay  map[message]push               // pushed, and neither arrived nor given up
	heard     map[uint64]time.Time           // when each session was heard last: here by its Acks, in a real node by whatever it says
	offline   map[uint64]bool                // all others are online; a phone that connects again gets a new session
	dealtWith map[ackwheel.BatchID]time.Time // one that comes again is acknowledged, and that is all
	reporting int                            // DelMsgs that are not answered, and pushes from the store
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
	known  records
}

func newNode(client *ackwheel.Client, phones *phones) *node {
	return &node{client: client, phones: phones, known: records{
		stored: map[message]bool{}, onTheWay: map[message]push{}, heard: map[uint64]time.Time{},
		offline: map[uint64]bool{}, dealtWith: map[ackwheel.BatchID]time.Time{},
	}}
}

// know reads or changes the records.
func (n *node) know(with func(r *records)) {
	n.mutex.Lock()
	defer n.mutex.Unlock()
	with(&n.known)
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
	if err := n.add(ctx, messages, attempt); err != nil {
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
		r.reporting++
	})
	// Nobody waits for the answer, and it is not repeated: what is not withdrawn times out, and is looked for by nobody,
	// while a withdrawal that comes late would take out what was added again since.
	go func() {
		ids, clients := columns(failed)
		if _, err := n.client.DelMsg(ctx, ids, clients, ackwheel.Withdraw); err != nil {
			log.Printf("%d pushes could not be withdrawn, and will time out: %v", len(failed), err)
		}
		n.know(func(r *records) { r.reporting-- })
	}()
	return nil
}

// add repeats what may succeed later, for some time: while there is no connection the client refuses at once. Of an add
// whose outcome is unknown any part may be done, and to add it again before the push is right.
func (n *node) add(ctx context.Context, messages []message, attempt uint8) error {
	ids, clients := columns(messages)
	pause, giveUp := firstPause, time.Now().Add(persistence)
	for {
		limited, cancel := context.WithTimeout(ctx, patience)
		_, _, err := n.client.AddNewMsg(limited, ids, clients, 0, attempt)
		cancel()
		var failure *ackwheel.Error
		if err == nil || !errors.As(err, &failure) || !failure.Retryable || failure.Code == draining || time.Now().After(giveUp) {
			return err
		}
		if !sleep(ctx, &pause) {
			return err
		}
	}
}

// setOut notes that messages are pushed, and returns which: what was pushed before and has arrived meanwhile is left
// out. If it times out after all it finds no push noted.
func (n *node) setOut(messages []message, attempt uint8) (meant []message) {
	n.know(func(r *records) {
		for _, m := range messages {
			if _, waits := r.onTheWay[m]; attempt == 1 && r.stored[m] || waits {
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
		back := map[uint64]bool{}            // sessions that were offline until now
		var undelivered []message
		n.know(func(r *records) {
			for i, m := range acks {
				// Whatever the sidecar says of it: the phone has answered, and will not do so twice.
				attempts[i] = r.onTheWay[m].attempt
				delete(r.onTheWay, m)
				delete(r.stored, m)
				if r.offline[m.client] {
					back[m.client] = true
					delete(r.offline, m.client)
				}
				r.heard[m.client] = time.Now()
			}
			if len(back) > 0 { // In a database this is a query by session.
				for m := range r.stored {
					if _, waits := r.onTheWay[m]; back[m.client] && !waits {
						undelivered = append(undelivered, m)
					}
				}
			}
			r.reporting += 2
			n.phones.answering.Add(-int64(len(acks)))
		})
		go n.report(ctx, acks, attempts)
		go n.deliver(ctx, undelivered)
	}
}

// deliver pushes what lies in the store of sessions that are online again.
func (n *node) deliver(ctx context.Context, undelivered []message) {
	if err := n.push(ctx, undelivered, 1); err != nil {
		log.Printf("%d messages stay in the store: %v", len(undelivered), err)
	}
	n.know(func(r *records) { r.reporting-- })
}

// report tells the sidecar of Acks, and counts what it says.
func (n *node) report(ctx context.Context, acks []message, attempts []uint8) {
	outcomes, repeated := n.delMsg(ctx, acks)
	n.know(func(r *records) {
		r.reporting--
		for i, outcome := range outcomes {
			// What an earlier try took out is unknown to the next.
			acked := outcome == ackwheel.Acked || repeated && outcome == ackwheel.Unknown
			switch {
			case acked && attempts[i] == 1:
				r.FirstPush++
			case acked && attempts[i] > 1:
				r.SecondPush++
			case outcome == ackwheel.Late || outcome == ackwheel.Acked: // It had timed out, but the phone is alive after all.
				r.Late++
			}
			// Else it says nothing new: it was counted before, or is very old.
		}
	})
}

// delMsg reports Acks until that is answered, as it always may. It says whether an earlier try may have been applied.
// A node with more than some thousand Acks a second gathers those that failed, and bounds what it has in flight.
func (n *node) delMsg(ctx context.Context, messages []message) (outcomes []uint8, repeated bool) {
	ids, clients := columns(messages)
	for pause := firstPause; ; {
		outcomes, err := n.client.DelMsg(ctx, ids, clients, 0)
		if err == nil {
			return outcomes, repeated
		}
		var failure *ackwheel.Error
		if !errors.As(err, &failure) || !failure.Retryable || !sleep(ctx, &pause) {
			log.Printf("%d Acks may not have been counted, and time out then: %v", len(messages), err)
			return nil, repeated
		}
		repeated = repeated || failure.OutcomeUnknown
	}
}

// sleep says whether the time has passed, which is twice as long next time; else the context was done.
func sleep(ctx context.Context, pause *time.Duration) bool {
	timer := time.NewTimer(*pause/2 + time.Duration(rand.Int63n(int64(*pause))))
	defer timer.Stop()
	if *pause *= 2; *pause > lastPause {
		*pause = lastPause
	}
	select {
	case <-timer.C:
		return true
	case <-ctx.Done():
		return false
	}
}

// listen deals with timeout batches, one after the other, until the node ends. A client that ends before was refused for
// good, as with a wrong token: then nobody tells who is offline, and the node must not go on.
func (n *node) listen(ctx context.Context) {
	for batch := range n.client.Batches {
		failure, err := n.timedOut(ctx, batch), error(nil)
		limited, cancel := context.WithTimeout(ctx, patience)
		if failure != nil {
			log.Printf("a batch of %d is given back: %v", len(batch.MsgIDs), failure)
			_, err = n.client.BatchNack(limited, batch.ID, uint32(later.Milliseconds()))
		} else {
			// Only now: had this process died before, another node would have got the batch.
			_, err = n.client.BatchAck(limited, batch.ID)
		}
		cancel()
		if err != nil {
			log.Printf("a batch of %d is not settled yet, or comes again: %v", len(batch.MsgIDs), err)
		}
	}
	if ctx.Err() == nil {
		_, why := n.client.BatchAck(ctx)
		log.Fatal(why)
	}
}

// timedOut deals with a batch. It may be repeated after an error: what it did is seen from the records.
func (n *node) timedOut(ctx context.Context, batch *ackwheel.TimeoutBatch) error {
	again, givenUp, known := n.judge(batch)
	if known {
		return nil
	}
	// The silence of a storm is likelier our fault than the phones', and what a draining sidecar delivers had less than
	// its time: their messages wait in the store, but nobody is offline for that.
	saysOffline := !batch.Storm && !batch.Drained
	if err := n.push(ctx, again, maxAttempts); err != nil {
		var failure *ackwheel.Error
		if !errors.As(err, &failure) || failure.Code != draining {
			return err
		}
		// This sidecar takes no more messages, and given back the batch would end with it, unless its wheel is kept: in
		// Redis, or with --journal. There to give it back is better, and somebody pushes a second time.
		givenUp, saysOffline = append(givenUp, again...), false
	}
	n.know(func(r *records) {
		for _, m := range givenUp {
			last, waits := r.onTheWay[m]
			if !waits {
				continue // Its late Ack came while the others were pushed.
			}
			delete(r.onTheWay, m)
			r.GivenUp++
			// Who was heard since the push is there, whatever it left unanswered. How old the batch is does not matter.
			if saysOffline && r.heard[m.client].Before(last.at) {
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
			// A sidecar that drains takes no new messages, and to whom nobody is there nothing is pushed.
			if batch.Attempts[i] < maxAttempts && !batch.Drained && !r.offline[m.client] {
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
