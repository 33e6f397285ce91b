// Package ackwheel is a client of ackwheel in one file, for version 1 of docs/PROTOCOL.md. When its connection is lost
// it connects anew and subscribes again. Requests that were not answered by then end with an *Error that says
// OutcomeUnknown; while there is no connection they fail at once, not applied. The caller repeats what should be.
package ackwheel

import (
	"bytes"
	"context"
	"encoding/binary"
	"fmt"
	"math/rand"
	"net"
	"sync"
	"time"
)

var be = binary.BigEndian

const (
	hello, ping, goAway, addNewMsg, delMsg       = 0x01, 0x02, 0x03, 0x10, 0x11
	subscribe, timeoutBatch, batchAck, batchNack = 0x20, 0x21, 0x22, 0x23
	pong, errorType, answer, maxFrameLength      = 0x82, 0xff, 0x80, 1 << 20 // An answer: its request's type and 0x80.
	firstPause, longestPause, patience           = 100 * time.Millisecond, 5 * time.Second, 5 * time.Second
)
const Unknown, Acked, Late, Withdrawn, Withdraw uint8 = 0, 1, 2, 3, 2 // the outcomes of DelMsg, and its flag

// BatchID names a batch. It is the same on every delivery: a consumer knows by it what it has dealt with already.
type BatchID [24]byte

// TimeoutBatch has messages that nobody acknowledged: the id, the client and the attempt of each.
type TimeoutBatch struct {
	ID                   BatchID
	DeliveryCount        uint32 // above 1: it was handed out before
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
	Address, Token, Name string
	Group                string             // Without one there are no batches.
	SubscribeFlags       uint8              // 1: ephemeral, 2: a new group begins with the next batch
	Credit               uint32             // how many messages of batches wait for their BatchAck at most
	Batches              chan *TimeoutBatch // made by Connect, and closed when the client ends

	closing  context.Context
	stop     context.CancelFunc
	interval time.Duration // of pings
	writing  sync.Mutex    // held over a write; the reader never waits for it

	mutex      sync.Mutex // guards what follows
	conn       net.Conn
	up         bool
	down       Error // why it is not up
	lastID     uint32
	unanswered map[uint32]chan frame // closed when the connection is lost
	waiting    []BatchID             // at its end those in Batches
}

type frame []byte // whole: its type at 4, its flags at 5, the status at 6, the correlation id at 8, its body at 12
func (f frame) refusal() *Error {
	return &Error{be.Uint16(f[6:]), f[5]&1 != 0, f[5]&2 != 0, string(f[12:])}
}

// Connect makes the first connection, or says why there is none; it can be called again then.
func (c *Client) Connect(ctx context.Context) error {
	// A batch takes credit for a message at least, so that no more batches than that wait.
	c.Batches, c.waiting = make(chan *TimeoutBatch, c.Credit), nil
	c.closing, c.stop = context.WithCancel(context.Background())
	lost, err := c.connect(ctx)
	if err != nil {
		c.stop()
		close(c.Batches)
		return err
	}
	go c.run(lost)
	return nil
}

// Close has GoAway said, and returns when the server has closed, so that no answer is lost. More than once is fine.
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

// BatchAck settles batches that were dealt with; it returns how many were not settled before.
func (c *Client) BatchAck(ctx context.Context, batches ...BatchID) (settled uint32, err error) {
	_, err = c.do(ctx, batchAck, 0, []any{&settled}, uint32(len(batches)), batches)
	return settled, err
}

// BatchNack gives a batch back, for others or for later; it returns whether this connection held it.
func (c *Client) BatchNack(ctx context.Context, batch BatchID, delayMs uint32) (held bool, err error) {
	flags, err := c.do(ctx, batchNack, 0, nil, batch, delayMs)
	return flags == 1, err
}

// do sends a request, and reads the fields of its answer into the places given.
func (c *Client) do(ctx context.Context, kind, flags uint8, into []any, fields ...any) (uint8, error) {
	body, answered := pack(fields...), make(chan frame, 1)
	c.mutex.Lock()
	if c.conn == nil || !c.up && kind != hello && kind != subscribe {
		defer c.mutex.Unlock()
		return 0, &Error{c.down.Code, false, c.down.Retryable, "not connected: " + c.down.Text}
	}
	for c.lastID++; c.lastID == 0 || c.unanswered[c.lastID] != nil; c.lastID++ {
	}
	id, conn := c.lastID, c.conn
	c.unanswered[id] = answered
	c.mutex.Unlock()
	c.send(conn, kind, flags, id, body)
	select {
	case <-ctx.Done(): // The id stays in use until it is answered.
		return 0, &Error{OutcomeUnknown: true, Retryable: true, Text: ctx.Err().Error()}
	case f, ok := <-answered:
		if !ok {
			return 0, &Error{OutcomeUnknown: true, Retryable: true, Text: "the connection was lost"}
		} else if f[4] == errorType {
			return 0, f.refusal()
		} else if f[4] != kind|answer || unpack(f[12:], into...) != nil {
			conn.Close()
			return 0, &Error{OutcomeUnknown: true, Text: "the server sent an answer that cannot be read"}
		}
		return f[5], nil
	}
}

func (c *Client) send(conn net.Conn, kind, flags uint8, id uint32, body []byte) {
	c.writing.Lock()
	defer c.writing.Unlock()
	if _, err := conn.Write(pack(uint32(8+len(body)), kind, flags, uint16(0), id, body)); err != nil {
		conn.Close() // The reader notices.
	}
}

// run connects anew whenever the connection is lost, until the client is closed, or refused for good.
func (c *Client) run(lost chan struct{}) {
	defer close(c.Batches)
	for pause, err := firstPause, error(nil); err == nil || err.(*Error).Retryable; lost, err = c.connect(c.closing) {
		if err == nil {
			select {
			case <-lost:
			case <-c.closing.Done():
				c.do(context.Background(), goAway, 0, nil, uint16(2), uint16(0), uint32(patience.Milliseconds()))
			}
			pause = firstPause
		} else if pause < longestPause {
			pause *= 2
		}
		select {
		case <-c.closing.Done():
			return
		case <-time.After(pause/2 + time.Duration(rand.Int63n(int64(pause/2)))):
		}
	}
}

// connect makes a connection, says Hello and subscribes. The channel tells when the connection is lost.
func (c *Client) connect(ctx context.Context) (chan struct{}, error) {
	conn, err := (&net.Dialer{Timeout: patience}).DialContext(ctx, "tcp", c.Address)
	if err != nil {
		return nil, &Error{Retryable: true, Text: err.Error()}
	}
	c.mutex.Lock()
	c.conn, c.interval, c.unanswered = conn, patience, map[uint32]chan frame{}
	c.mutex.Unlock()
	lost := make(chan struct{})
	go c.read(conn, lost)
	_, err = c.do(ctx, hello, 0, nil, []byte("ACKW\x01\x01"), uint16(len(c.Token)), []byte(c.Token), uint8(len(c.Name)), []byte(c.Name))
	if err == nil && c.Group != "" {
		_, err = c.do(ctx, subscribe, c.SubscribeFlags, nil, c.Credit, uint8(len(c.Group)), []byte(c.Group))
	}
	if err != nil {
		conn.Close()
		<-lost
	}
	c.mutex.Lock()
	defer c.mutex.Unlock()
	if failure, ok := err.(*Error); ok {
		c.down = *failure
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
		for err == nil && len(received) >= 12 {
			end := 4 + int(be.Uint32(received))
			if end < 12 || end > 4+maxFrameLength {
				err = fmt.Errorf("the server sent a frame of length %d", end-4)
			} else if end > len(received) {
				break
			} else if err = c.receive(frame(received[:end])); err == nil {
				received = received[end:]
			}
		}
	}
	conn.Close()
	c.mutex.Lock()
	defer c.mutex.Unlock()
	c.conn, c.up, c.down = nil, false, Error{Retryable: c.closing.Err() == nil, Text: err.Error()}
	for _, waiting := range c.unanswered {
		close(waiting)
	}
}

func (c *Client) receive(f frame) error {
	c.mutex.Lock()
	defer c.mutex.Unlock()
	if f[4] == hello|answer && len(f) > 36 {
		c.interval = time.Duration(be.Uint32(f[32:])) * time.Millisecond
	}
	id := be.Uint32(f[8:])
	if waiting := c.unanswered[id]; f[4] == ping {
		go c.send(c.conn, pong, 0, id, f[12:])
	} else if f[4] == timeoutBatch && len(f) > 68 {
		return c.receiveBatch(f[5], f[12:])
	} else if waiting != nil {
		c.up = c.up || f[4] == subscribe|answer || f[4] == hello|answer && c.Group == "" // before its first batch is taken
		waiting <- f
		if f[4] != subscribe|answer { // Its id stays in use: batches carry it.
			delete(c.unanswered, id)
		}
	} else if f[4] == errorType { // It is about the connection, and ends it.
		return f.refusal()
	}
	return nil
}

func (c *Client) receiveBatch(flags uint8, body []byte) error {
	count := (len(body) - 56) / 17
	b := &TimeoutBatch{Last: flags&1 != 0, Storm: flags&2 != 0, Drained: flags&4 != 0,
		MsgIDs: make([]uint64, count), Clients: make([]uint64, count), Attempts: make([]uint8, count)}
	err := unpack(body, &b.ID, &b.DeliveryCount, &b.AgeMs, &b.Added, &b.Acked, new(uint32), b.MsgIDs, b.Clients, b.Attempts)
	c.waiting = c.waiting[len(c.waiting)-len(c.Batches):]
	leave := len(c.waiting) == cap(c.Batches) // As many wait as there is credit for: it will come again.
	for _, id := range c.waiting {
		leave = leave || id == b.ID // A slow consumer gets it once.
	}
	if !leave && err == nil {
		c.waiting = append(c.waiting, b.ID)
		c.Batches <- b
	}
	return err
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
