// Package ackwheel is a client of ackwheel in one file, for version 1 of docs/PROTOCOL.md. When its connection is lost
// it connects anew and subscribes again. Requests that were not answered by then end with an *Error that says
// OutcomeUnknown; while there is no connection they fail at once, not applied. The caller repeats what should be.
package ackwheel

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
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

	mutex   sync.Mutex // guards what follows
	link    *link      // nil without a connection
	up      bool
	down    Error // why it is not up
	lastID  uint32
	waiting []BatchID // at its end those in Batches
}

// link is one connection. What is in its queue is as good as sent; why it was lost is known when lost is closed.
type link struct {
	net.Conn
	queue      chan frame
	lost       chan struct{}
	why        *Error
	unanswered map[uint32]chan frame // guarded by the mutex of the client; closed when the connection is lost
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
	link, err := c.connect(ctx)
	if err != nil {
		c.stop()
		close(c.Batches)
		return err
	}
	go c.run(link)
	return nil
}

// Close has GoAway said, and returns when the server has closed, so that no answer is lost, or after 5 s; what was not
// answered by then has an unknown outcome. More than once is fine.
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
	link := c.link
	if link == nil || !c.up && kind != hello && kind != subscribe && kind != goAway {
		defer c.mutex.Unlock()
		return 0, &Error{c.down.Code, false, c.down.Retryable, "not connected: " + c.down.Text}
	}
	for c.lastID++; c.lastID == 0 || link.unanswered[c.lastID] != nil; c.lastID++ {
	}
	id, queue := c.lastID, link.queue
	link.unanswered[id] = answered
	c.mutex.Unlock()
	for request := frame(pack(uint32(8+len(body)), kind, flags, uint16(0), id, body)); ctx.Err() == nil; {
		select {
		case <-ctx.Done():
		case queue <- request:
			queue = nil // It is on its way: from here on it may be applied.
		case f, ok := <-answered:
			if !ok {
				return 0, &Error{link.why.Code, queue == nil, true, "the connection was lost: " + link.why.Text}
			} else if f[4] == errorType {
				return 0, f.refusal()
			} else if f[4] != kind|answer || unpack(f[12:], into...) != nil {
				link.Close()
				return 0, &Error{OutcomeUnknown: true, Text: "the server sent an answer that cannot be read"}
			}
			return f[5], nil
		}
	}
	c.mutex.Lock()
	defer c.mutex.Unlock()
	if queue != nil { // Else the id stays in use until it is answered.
		delete(link.unanswered, id)
	}
	return 0, &Error{OutcomeUnknown: queue == nil, Retryable: true, Text: ctx.Err().Error()}
}

// pass queues a frame that waits for no answer.
func (l *link) pass(f frame) {
	select {
	case <-l.lost:
	case l.queue <- f:
	}
}

// write writes what is queued, until the connection is lost. If that fails the reader notices, and learns why.
func (l *link) write() {
	for {
		select {
		case <-l.lost:
			return
		case f := <-l.queue:
			l.Write(f)
		}
	}
}

// run connects anew whenever the connection is lost, until the client is closed, or refused for good.
func (c *Client) run(link *link) {
	defer close(c.Batches)
	for pause, err := firstPause, error(nil); err == nil || err.(*Error).Retryable; link, err = c.connect(c.closing) {
		if err == nil {
			select {
			case <-link.lost:
			case <-c.closing.Done():
				c.mutex.Lock()
				c.up, c.down = false, Error{Text: "the client was closed"}
				c.mutex.Unlock()
				time.AfterFunc(patience, func() { link.Close() })
				c.do(context.Background(), goAway, 0, nil, uint16(2), uint16(0), uint32(patience.Milliseconds()))
				<-link.lost
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

// connect makes a connection, says Hello and subscribes.
func (c *Client) connect(ctx context.Context) (*link, error) {
	conn, err := (&net.Dialer{Timeout: patience}).DialContext(ctx, "tcp", c.Address)
	if err != nil {
		return nil, &Error{Retryable: true, Text: err.Error()}
	}
	l := &link{conn, make(chan frame), make(chan struct{}), nil, map[uint32]chan frame{}}
	c.mutex.Lock()
	c.link, c.interval = l, patience
	c.mutex.Unlock()
	go l.write()
	go c.read(l)
	_, err = c.do(ctx, hello, 0, nil, []byte("ACKW\x01\x01"), uint16(len(c.Token)), []byte(c.Token), uint8(len(c.Name)), []byte(c.Name))
	if err == nil && c.Group != "" {
		_, err = c.do(ctx, subscribe, c.SubscribeFlags, nil, c.Credit, uint8(len(c.Group)), []byte(c.Group))
	}
	if failure, ok := err.(*Error); ok {
		conn.Close()
		<-l.lost
		if failure.OutcomeUnknown && ctx.Err() == nil { // It was lost, and the reader knows why.
			failure = l.why
		}
		c.mutex.Lock()
		defer c.mutex.Unlock()
		c.down, err = *failure, failure
	}
	return l, err
}

// read reads until the connection is lost. After an interval without a byte it asks for a sign of life, once.
func (c *Client) read(l *link) {
	defer close(l.lost)
	received, chunk, asked, count, err := []byte{}, make([]byte, 1<<16), false, 0, error(nil)
	for err == nil {
		l.SetReadDeadline(time.Now().Add(c.interval))
		count, err = l.Read(chunk)
		if timeout, ok := err.(net.Error); ok && timeout.Timeout() && !asked {
			go c.do(c.closing, ping, 0, nil)
			err = nil
		}
		asked, received = count == 0, append(received, chunk[:count]...)
		for err == nil && len(received) >= 4 {
			end := 4 + int(be.Uint32(received))
			if end < 12 || end > 4+maxFrameLength {
				err = wrongLength(received)
			} else if end > len(received) {
				break
			} else if err = c.receive(l, received[:end]); err == nil {
				received = received[end:]
			}
		}
	}
	l.Close()
	why, said := err.(*Error)
	if c.closing.Err() != nil {
		why = &Error{Text: "the client was closed"}
	} else if !said {
		why = &Error{Retryable: true, Text: err.Error()}
	}
	c.mutex.Lock()
	defer c.mutex.Unlock()
	c.link, c.up, c.down, l.why = nil, false, *why, why
	for _, waiting := range l.unanswered {
		close(waiting)
	}
}

// wrongLength names the commonest mistakes: these are no frames at all.
func wrongLength(received []byte) error {
	switch length := be.Uint32(received); length >> 16 {
	case 0x4854:
		return errors.New("the server speaks HTTP: is this its admin port?")
	case 0x1503:
		return errors.New("the server wants TLS")
	default:
		return fmt.Errorf("the server sent a frame of length %d: is this an ackwheel port?", length)
	}
}

func (c *Client) receive(l *link, f frame) error {
	c.mutex.Lock()
	defer c.mutex.Unlock()
	if f[4] == hello|answer && len(f) > 36 {
		c.interval = time.Duration(be.Uint32(f[32:])) * time.Millisecond
	}
	id := be.Uint32(f[8:])
	if waiting := l.unanswered[id]; f[4] == ping {
		f[4] = pong
		go l.pass(f)
	} else if f[4] == timeoutBatch && len(f) > 68 {
		return c.receiveBatch(f[5], f[12:])
	} else if waiting != nil {
		c.up = c.up || f[4] == subscribe|answer || f[4] == hello|answer && c.Group == "" // before its first batch is taken
		waiting <- f
		if f[4] != subscribe|answer { // Its id stays in use: batches carry it.
			delete(l.unanswered, id)
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
