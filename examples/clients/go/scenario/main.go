// The scenario that every client of examples/clients runs: go run ./scenario ADDR GROUP [TOKEN [CA]]
//
// Adds 1,000 messages, acknowledges 900, and receives exactly the other 100 as timeouts, whatever happens to its
// connection meanwhile. The first batch is given back once, and must be redelivered. Prints its figures as one line of
// JSON; exits with 1 and says why if they are wrong.
package main

import (
	"ackwheel"
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"sync"
	"time"
)

const patience = 60 * time.Second

type figures struct {
	Added          int `json:"added"`
	Acked          int `json:"acked"`
	TimedOut       int `json:"timed_out"`
	Unexpected     int `json:"unexpected"`
	GivenBack      int `json:"given_back"`
	Redelivered    int `json:"redelivered"`
	Drained        int `json:"drained"`
	OutcomeUnknown int `json:"outcome_unknown"`
}

type message struct{ id, client uint64 }

type scenario struct {
	client *ackwheel.Client
	mutex  sync.Mutex
	figures
}

func main() {
	if len(os.Args) < 3 || len(os.Args) > 5 {
		fail(errors.New("usage: go run ./scenario ADDR GROUP [TOKEN [CA]]"))
	}
	token := append(os.Args, "")[3]
	client := &ackwheel.Client{Address: os.Args[1], Group: os.Args[2], Token: token, Name: "scenario.go",
		SubscribeFlags: 2, Credit: 10_000}
	if len(os.Args) == 5 {
		client.TLS = trusting(os.Args[4])
	}
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	if err := client.Connect(ctx); err != nil {
		fail(err)
	}
	s := &scenario{client: client}
	if err := s.run(ctx); err != nil {
		fail(err)
	}
	client.Close()
	line, _ := json.Marshal(s.figures)
	fmt.Println(string(line))
	if s.Added != 1_000 || s.Acked != 900 || s.TimedOut != 100 || s.Unexpected != 0 {
		fail(errors.New("expected: 1,000 added, 900 acked, 100 timed out, nothing unexpected"))
	}
}

// trusting is TLS with the servers whose certificate the authority in this file has signed.
func trusting(file string) *tls.Config {
	pem, err := os.ReadFile(file)
	if err != nil {
		fail(err)
	}
	authorities := x509.NewCertPool()
	if !authorities.AppendCertsFromPEM(pem) {
		fail(errors.New(file + " has no certificate"))
	}
	return &tls.Config{RootCAs: authorities}
}

func fail(err error) {
	var failure *ackwheel.Error
	if errors.As(err, &failure) {
		err = fmt.Errorf("code %d, retryable %t: %s", failure.Code, failure.Retryable, failure.Text)
	}
	fmt.Fprintln(os.Stderr, err)
	os.Exit(1)
}

func (s *scenario) run(ctx context.Context) error {
	// Ids and clients beyond what a signed 64-bit integer holds: all of them are legal.
	var all, acknowledged []message
	silent := map[message]bool{}
	for i := uint64(0); i < 1_000; i++ {
		m := message{1<<63 - 500 + i, 1<<64 - 1 - i}
		all = append(all, m)
		if silent[m] = i%10 == 9; !silent[m] {
			acknowledged = append(acknowledged, m)
			delete(silent, m)
		}
	}
	listened := make(chan error, 1)
	go func() { listened <- s.listen(ctx, silent) }()
	if err := s.each(ctx, all, s.add); err != nil {
		return err
	}
	nothing := make(chan error)
	go func() { nothing <- s.giveBackNothing(ctx) }()
	if err := s.each(ctx, acknowledged, s.acknowledge); err != nil {
		return err
	}
	if err := <-nothing; err != nil {
		return err
	}
	return <-listened
}

// giveBackNothing: what a client says of batches before it is subscribed again is no mistake, and may be repeated.
func (s *scenario) giveBackNothing(ctx context.Context) error {
	held, err := s.client.BatchNack(ctx, ackwheel.BatchID{}, 0)
	var failure *ackwheel.Error
	for errors.As(err, &failure) && failure.Retryable && ctx.Err() == nil {
		time.Sleep(20 * time.Millisecond)
		held, err = s.client.BatchNack(ctx, ackwheel.BatchID{}, 0)
	}
	s.count(func(f *figures) {
		if held {
			f.Unexpected++
		}
	})
	return err
}

// each has all chunks of 50 messages in flight at once, and repeats what may succeed later.
func (s *scenario) each(ctx context.Context, all []message, ask func(ctx context.Context, ids, clients []uint64, repeated bool) error) error {
	done := make(chan error)
	for start := 0; start < len(all); start += 50 {
		var ids, clients []uint64
		for _, m := range all[start : start+50] {
			ids, clients = append(ids, m.id), append(clients, m.client)
		}
		go func() {
			err, repeated := ask(ctx, ids, clients, false), false
			var failure *ackwheel.Error
			for errors.As(err, &failure) && failure.Retryable && ctx.Err() == nil {
				repeated = repeated || failure.OutcomeUnknown
				s.count(func(f *figures) {
					if failure.OutcomeUnknown {
						f.OutcomeUnknown++
					}
				})
				time.Sleep(20 * time.Millisecond)
				err = ask(ctx, ids, clients, repeated)
			}
			done <- err
		}()
	}
	var failure error
	for start := 0; start < len(all); start += 50 {
		if err := <-done; err != nil {
			failure = err
		}
	}
	return failure
}

func (s *scenario) count(change func(*figures)) {
	s.mutex.Lock()
	defer s.mutex.Unlock()
	change(&s.figures)
}

func (s *scenario) add(ctx context.Context, ids, clients []uint64, repeated bool) error {
	_, rearmed, err := s.client.AddNewMsg(ctx, ids, clients, 0, 1)
	if err != nil {
		return err
	}
	s.count(func(f *figures) {
		for i := range ids {
			if repeated || rearmed[i/8]>>(i%8)&1 == 0 {
				f.Added++
			}
		}
	})
	return nil
}

func (s *scenario) acknowledge(ctx context.Context, ids, clients []uint64, repeated bool) error {
	outcomes, err := s.client.DelMsg(ctx, ids, clients, 0)
	if err != nil {
		return err
	}
	s.count(func(f *figures) {
		for _, outcome := range outcomes {
			// What an earlier try acknowledged is unknown to the second.
			if outcome == ackwheel.Acked || repeated && outcome == ackwheel.Unknown {
				f.Acked++
			}
		}
	})
	return nil
}

// listen takes batches until all that must time out has come and is settled, and for half a second longer.
func (s *scenario) listen(ctx context.Context, missing map[message]bool) error {
	dealtWith := map[ackwheel.BatchID]bool{}
	for {
		wait := patience
		if len(missing) == 0 {
			wait = 500 * time.Millisecond
		}
		var batch *ackwheel.TimeoutBatch
		select {
		case batch = <-s.client.Batches:
		case <-time.After(wait):
		}
		if batch == nil {
			return nil
		}
		if batch.DeliveryCount > 1 {
			s.count(func(f *figures) { f.Redelivered++ })
		}
		if s.GivenBack == 0 {
			held, _ := s.client.BatchNack(ctx, batch.ID, 50)
			s.count(func(f *figures) {
				if held {
					f.GivenBack++
				}
			})
			continue
		}
		if !dealtWith[batch.ID] {
			s.count(func(f *figures) { f.take(batch, missing) })
			dealtWith[batch.ID] = true
		}
		// The client would repeat it by itself; but it is closed soon.
		for _, err := s.client.BatchAck(ctx, batch.ID); err != nil && ctx.Err() == nil; _, err = s.client.BatchAck(ctx, batch.ID) {
			time.Sleep(20 * time.Millisecond)
		}
	}
}

func (f *figures) take(batch *ackwheel.TimeoutBatch, missing map[message]bool) {
	if batch.Drained {
		f.Drained++
	}
	for i, id := range batch.MsgIDs {
		m := message{id, batch.Clients[i]}
		if missing[m] {
			f.TimedOut++
		} else {
			f.Unexpected++
		}
		delete(missing, m)
	}
}
