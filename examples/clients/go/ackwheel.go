// Package ackwheel is a client of ackwheel in one file, for version 1 of docs/PROTOCOL.md. When its connection is lost
// it connects again and subscribes again. Requests that were not answered by then end with an *Error that says
// OutcomeUnknown; while there is no connection they fail at once, not applied. The caller repeats what should be, except
// for a BatchAck, which the client repeats: on the next connection, and with the next delivery. A Redis client
// library needs no such file: see docs/RESP.md.
package ackwheel

import (
	"bytes"
	"context"
	"crypto/tls"
	"encoding/binary"
	"fmt"
	"net"
	"sync"
	"time"
)

const (
	hello, ping, goAway, addNewMsg, delMsg, subscribe, timeoutBatch, batchAck, batchNack = 0x01, 0x02, 0x03, 0x10, 0x11, 0x20, 0x21, 0x22, 0x23
	pong, errorType, answer, maxFrameLength, maxBatchIDs                                 = 0x82, 0xff, 0x80, 1 << 20, 4096 // answer: a bit
	firstPause, longestPause, patience                                                   = 100 * time.Millisecond, 5 * time.Second, 5 * time.Second
)
const Unknown, Acked, Late, Withdrawn, Withdraw uint8 = 0, 1, 2, 3, 2 // the outcomes of DelMsg, and its flag
var be, mistakes = binary.BigEndian, map[uint16]string{0x4854: " It is HTTP: the admin port?", 0x1503: " It wants TLS."}

// BatchID names a batch. It is the same on every delivery: a consumer knows by it what it has dealt with already.
type BatchID [24]byte

// TimeoutBatch has messages that nobody acknowledged: the id, the client and the attempt of each.
type TimeoutBatch struct {
	ID                   BatchID
	DeliveryCount        uint32 // above 1: it was delivered before
	AgeMs, Added, Acked  uint64
	Last, Storm, Drained bool
	MsgIDs, Clients      []uint64
	Attempts             []uint8
}

// Error is why a request failed. Unless OutcomeUnknown, no part of it was applied; if Retryable, it can succeed later.
type Error struct {
	Code                      uint16 // that of the server's Error; 0 where the client itself gave up
	OutcomeUnknown, Retryable bool
	Text                      string
}

func (e *Error) Error() string { return fmt.Sprintf("%s (code %d)", e.Text, e.Code) }

// Client is a connection to a sidecar, for any number of goroutines. Set the first fields, and Connect.
type Client struct {
	Address, Token, Name, Group string             // Without a group there are no batches.
	SubscribeFlags              uint8              // 1: ephemeral, 2: a new group begins with the next batch
	TLS                         *tls.Config        // without one the connection is plain
	Credit                      uint32             // how many messages of batches wait for their BatchAck at most
	Batches                     chan *TimeoutBatch // made by Connect, and closed when the client ends
	closing                     context.Context
	stop                        context.CancelFunc
	interval                    time.Duration // of pings
	writing                     chan struct{} // holds one while a frame is written: who waits for that can wait for a context too
	mutex                       sync.Mutex    // guards what follows
	conn                        net.Conn      // the last one
	up, subscribed              bool
	down                        Error // why it is not up
	lastID                      uint32
	unanswered                  map[uint32]chan []byte // nil without a connection
	acked                       map[BatchID]bool       // acknowledged, and not known to be settled: not delivered again
}

// why reads an Error. A frame has its type at 4, its flags at 5, its status at 6, its id at 8, and its body at 12.
func why(f []byte) *Error { return &Error{be.Uint16(f[6:]), f[5]&1 > 0, f[5]&2 > 0, string(f[12:])} }

// Connect makes the first connection, or says why there is none; it can be called again then.
func (c *Client) Connect(ctx context.Context) error {
	c.Batches, c.writing, c.acked = make(chan *TimeoutBatch, c.Credit), make(chan struct{}, 1), map[BatchID]bool{}
	c.closing, c.stop = context.WithCancel(context.Background())
	lost, err := c.connect(ctx, nil)
	if err != nil {
		c.stop()
		c.run(lost) // It ends at once.
		return err
	}
	go c.run(lost)
	return nil
}

// Close says GoAway, and returns when the server has closed, so that no answer is lost, or after 5 s. Twice is fine.
func (c *Client) Close() {
	if c.stop != nil { // Else there was no Connect.
		c.stop()
		for range c.Batches { // What was not taken goes to others.
		}
	}
}

// AddNewMsg takes messages into flight, before they are pushed; clients has one for each, which may be 0, and 0 ticks
// are the default. It returns the tick of their deadline, and a bit for each that was in flight already.
func (c *Client) AddNewMsg(ctx context.Context, msgIDs, clients []uint64, ticks uint16, attempt uint8) (deadline uint64, rearmed []byte, err error) {
	rearmed = make([]byte, (len(msgIDs)+7)/8)
	_, err = c.do(ctx, addNewMsg, 1, []any{&deadline, new([8]byte), rearmed}, ticks, attempt, uint8(0), uint32(len(msgIDs)), msgIDs, clients)
	return deadline, rearmed, err
}

// DelMsg reports Acks, or failed pushes (Withdraw). Give ctx no deadline: a server holds it while its store is away.
func (c *Client) DelMsg(ctx context.Context, msgIDs, clients []uint64, flags uint8) ([]uint8, error) {
	outcomes := make([]uint8, len(msgIDs))
	_, err := c.do(ctx, delMsg, 1|flags, []any{new(uint32), outcomes}, uint32(len(msgIDs)), msgIDs, clients)
	return outcomes, err
}

// BatchAck settles batches that were dealt with; it returns how many were not settled before. If it fails it is repeated.
func (c *Client) BatchAck(ctx context.Context, batches ...BatchID) (settled uint32, err error) {
	c.mutex.Lock()
	for _, batch := range batches {
		if c.acked != nil && len(c.acked) < maxBatchIDs { // Of more than these the client knows nothing: they are redelivered.
			c.acked[batch] = true
		}
	}
	c.mutex.Unlock()
	if _, err = c.do(ctx, batchAck, 0, []any{&settled}, uint32(len(batches)), batches); err == nil {
		c.mutex.Lock()
		defer c.mutex.Unlock()
		for _, batch := range batches {
			delete(c.acked, batch)
		}
	}
	return settled, err
}

// ackAgain repeats what was not answered, on a connection that has just subscribed.
func (c *Client) ackAgain() {
	c.mutex.Lock()
	var batches []BatchID
	for batch := range c.acked {
		batches = append(batches, batch)
	}
	c.mutex.Unlock()
	if len(batches) > 0 {
		c.BatchAck(c.closing, batches...)
	}
}

// BatchNack gives a batch back, for others or for later; it returns whether this connection held it.
func (c *Client) BatchNack(ctx context.Context, batch BatchID, delayMs uint32) (held bool, err error) {
	flags, err := c.do(ctx, batchNack, 0, nil, batch, delayMs)
	return flags == 1, err
}

// do sends a request when its turn to write comes, and reads the fields of its answer into the places given.
func (c *Client) do(ctx context.Context, kind, flags uint8, into []any, fields ...any) (uint8, error) {
	if c.stop == nil || ctx.Err() != nil {
		return 0, &Error{Retryable: c.stop != nil, Text: "not sent: the context was done, or there was no Connect"}
	}
	body, answered, writing := pack(fields...), make(chan []byte, 2), c.writing // two: an answer and an end
	select {
	case <-ctx.Done():
		return 0, &Error{Retryable: true, Text: "not sent: " + ctx.Err().Error()}
	case writing <- struct{}{}:
	}
	c.mutex.Lock()
	if c.unanswered == nil || !c.up && kind != hello || c.Group != "" && !c.subscribed && (kind == batchAck || kind == batchNack) {
		defer c.mutex.Unlock()
		<-writing
		return 0, &Error{c.down.Code, false, c.down.Retryable || c.up, "not connected, or not subscribed again: " + c.down.Text}
	}
	for c.lastID++; c.lastID == 0 || c.unanswered[c.lastID] != nil; c.lastID++ {
	}
	c.unanswered[c.lastID] = answered
	conn, request := c.conn, pack(uint32(8+len(body)), kind, flags, uint16(0), c.lastID, body)
	c.mutex.Unlock()
	go func() { conn.Write(request); <-writing }() // If it fails the reader notices, and learns why.
	select {
	case <-ctx.Done(): // The id stays in use until it is answered.
		return 0, &Error{OutcomeUnknown: true, Retryable: true, Text: ctx.Err().Error()}
	case f := <-answered:
		if f[4] == errorType {
			return 0, why(f)
		} else if f[4] != kind|answer || unpack(f[12:], into...) != nil {
			conn.Close()
			return 0, &Error{OutcomeUnknown: true, Text: "the server sent an answer that cannot be read"}
		}
		return f[5], nil
	}
}

// run connects again whenever the connection is lost, until the client is closed, or refused for good.
func (c *Client) run(lost chan struct{}) {
	defer close(c.Batches)
	for pause, err := firstPause, error(nil); err == nil || err.(*Error).Retryable; {
		again := time.After(pause/2 + time.Duration(time.Now().UnixNano())%(pause/2))
		if err == nil {
			again, pause = nil, firstPause
		} else if pause *= 2; pause > longestPause {
			pause = longestPause
		}
		select {
		case <-again:
			lost, err = c.connect(c.closing, lost)
		case <-lost: // There is one to lose unless it is nil.
			lost, err = nil, &Error{Retryable: true}
		case <-c.closing.Done():
			if lost != nil {
				time.AfterFunc(patience, func() { c.conn.Close() })
				c.do(context.Background(), goAway, 0, nil, uint16(2), uint16(0), uint32(patience.Milliseconds()))
				<-lost
			}
			return
		}
	}
}

// connect connects and says Hello, unless that is done, and subscribes. Until that is granted requests are served, DelMsg above all.
func (c *Client) connect(ctx context.Context, lost chan struct{}) (_ chan struct{}, err error) {
	if lost == nil {
		dialer := &net.Dialer{Timeout: patience}
		dial := dialer.DialContext
		if c.TLS != nil {
			dial = (&tls.Dialer{NetDialer: dialer, Config: c.TLS}).DialContext
		}
		conn, failed := dial(ctx, "tcp", c.Address)
		if failed != nil {
			return nil, &Error{Retryable: true, Text: failed.Error()}
		}
		c.mutex.Lock()
		c.conn, c.interval, c.subscribed, c.unanswered, lost = conn, patience, false, map[uint32]chan []byte{}, make(chan struct{})
		c.mutex.Unlock()
		go c.read(conn, lost)
		_, err = c.do(ctx, hello, 0, nil, []byte("ACKW\x01\x01"), uint16(len(c.Token)), []byte(c.Token), uint8(len(c.Name)), []byte(c.Name))
	}
	if err == nil && c.Group != "" {
		if _, err = c.do(ctx, subscribe, c.SubscribeFlags, nil, c.Credit, uint8(len(c.Group)), []byte(c.Group)); err == nil {
			go c.ackAgain()
		}
	}
	if failure, ok := err.(*Error); ok && (!failure.Retryable || failure.Code == 0) {
		c.conn.Close()
		<-lost
		c.mutex.Lock()
		defer c.mutex.Unlock()
		if failure.Code == c.down.Code && failure.Retryable && ctx.Err() == nil {
			*failure = c.down // It was lost, and the reader knows why.
		}
		c.down = *failure
		return nil, failure
	}
	return lost, err
}

// read reads until the connection is lost. After an interval without a byte it asks for a sign of life, once.
func (c *Client) read(conn net.Conn, lost chan struct{}) {
	defer close(lost)
	received, chunk, asked, count, err := []byte{}, make([]byte, 1<<16), false, 0, error(nil)
	for err == nil {
		conn.SetReadDeadline(time.Now().Add(c.interval))
		count, err = conn.Read(chunk)
		if timeout, ok := err.(net.Error); ok && timeout.Timeout() && !asked {
			go c.do(c.closing, ping, 0, nil)
			err = nil
		}
		asked, received = count == 0, append(received, chunk[:count]...)
		for err == nil && len(received) >= 4 {
			end := 4 + int(be.Uint32(received))
			if end < 12 || end > 4+maxFrameLength {
				err = fmt.Errorf("the server sent a frame of length %d: no ackwheel port?%s", end-4, mistakes[be.Uint16(received)])
			} else if end > len(received) {
				break
			} else if err = c.receive(received[:end]); err == nil {
				received = received[end:]
			}
		}
	}
	conn.Close()
	c.mutex.Lock()
	defer c.mutex.Unlock()
	c.up, c.down = false, Error{Retryable: true, Text: err.Error()}
	if refused, ok := err.(*Error); c.closing.Err() != nil {
		c.down = Error{Text: "the client was closed"}
	} else if ok {
		c.down = *refused
	}
	for _, waiting := range c.unanswered { // It ends as an Error with both flags would end it.
		waiting <- pack(uint32(0), []byte{errorType, 3}, c.down.Code, uint32(0), []byte("connection lost: "+c.down.Text))
	}
	c.unanswered = nil
}

func (c *Client) receive(f []byte) error {
	c.mutex.Lock()
	defer c.mutex.Unlock()
	if f[4] == hello|answer && len(f) > 36 {
		c.up, c.interval = true, time.Duration(be.Uint32(f[32:]))*time.Millisecond
	}
	if id := be.Uint32(f[8:]); f[4] == ping {
		f[4] = pong
		go func(conn net.Conn, writing chan struct{}) { writing <- struct{}{}; conn.Write(f); <-writing }(c.conn, c.writing)
	} else if f[4] == timeoutBatch && len(f) > 68 {
		count := uint32(len(f)-68) / 17
		b := &TimeoutBatch{Last: f[5]&1 != 0, Storm: f[5]&2 != 0, Drained: f[5]&4 != 0,
			MsgIDs: make([]uint64, count), Clients: make([]uint64, count), Attempts: make([]uint8, count)}
		err := unpack(f[12:], &b.ID, &b.DeliveryCount, &b.AgeMs, &b.Added, &b.Acked, &count, b.MsgIDs, b.Clients, b.Attempts)
		for n, other := len(c.Batches), new(TimeoutBatch); err == nil && b.DeliveryCount > 1 && n > 0 && other.ID != b.ID; n-- {
			select {
			case other = <-c.Batches:
				if other.ID != b.ID { // For a slow consumer it goes in place of its copy that waits, mostly as the next.
					c.Batches <- other
				}
			default: // The consumer took what was left.
			}
		}
		if c.acked[b.ID] {
			go c.BatchAck(c.closing, b.ID)
		} else if err == nil && len(c.Batches) < cap(c.Batches) { // Full: it will be redelivered.
			c.Batches <- b
		}
		return err
	} else if waiting := c.unanswered[id]; waiting != nil {
		waiting <- f
		if c.subscribed = c.subscribed || f[4] == subscribe|answer; f[4] != subscribe|answer { // Its id stays in use: batches carry it.
			delete(c.unanswered, id)
		}
	} else if f[4] == errorType { // It is about the connection, and ends it.
		return why(f)
	}
	return nil
}

func pack(fields ...any) []byte {
	var packed bytes.Buffer
	for _, field := range fields {
		binary.Write(&packed, be, field) // It cannot fail for the types of this file.
	}
	return packed.Bytes()
}

func unpack(body []byte, places ...any) (err error) {
	for i, from := 0, bytes.NewReader(body); i < len(places) && err == nil; i++ {
		err = binary.Read(from, be, places[i])
	}
	return err
}
