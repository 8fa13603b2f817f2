package main

import (
	"bufio"
	"context"
	"encoding/json"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"github.com/nats-io/nats.go/jetstream"
	"github.com/synadia-io/orbit.go/pcgroups"
)

// line is what a test sees of one message. Sequence is that of the stream the member reads: for an elastic
// group the group's own stream.
type line struct {
	Subject   string `json:"subject"`
	Sequence  uint64 `json:"sequence"`
	Consumer  uint64 `json:"consumer_sequence"`
	Delivered uint64 `json:"delivered"`
	Pin       string `json:"pin"`
	Data      string `json:"data"`
	Member    string `json:"member"`
	Time      string `json:"time"`
}

type printer struct {
	mutex sync.Mutex
	out   *bufio.Writer
}

func (p *printer) print(l line) error {
	p.mutex.Lock()
	defer p.mutex.Unlock()
	if err := json.NewEncoder(p.out).Encode(l); err != nil {
		return err
	}
	return p.out.Flush()
}

func consume(ctx context.Context, o *options) error {
	connection, js, err := connect(o)
	if err != nil {
		return err
	}
	defer connection.Close()

	printer := &printer{out: bufio.NewWriter(os.Stdout)}
	failed := make(chan error, 1)
	enough := make(chan struct{})
	var seen atomic.Int64 // a membership change may let two callbacks overlap
	wantedCount := int64(o.count)
	handle := func(message jetstream.Msg) {
		if wantedCount > 0 && seen.Load() >= wantedCount {
			return
		}
		if err := take(printer, o, message); err != nil {
			select {
			case failed <- err:
			default:
			}
			return
		}
		if seen.Add(1) == wantedCount {
			close(enough)
		}
	}

	wanted := jetstream.ConsumerConfig{
		AckPolicy: jetstream.AckExplicitPolicy, AckWait: o.ackWait, MaxAckPending: o.maxAckPending,
	}
	join := pcgroups.ElasticConsume
	if o.kind == "static" {
		join = pcgroups.StaticConsume
	}
	member, err := join(ctx, js, o.stream, o.group, o.member, handle, wanted)
	if err != nil {
		return err
	}
	if o.evidence {
		if err := printer.ready(); err != nil {
			return err
		}
	}

	select {
	case err = <-failed:
	case err = <-member.Done():
		return err
	case <-enough:
	case <-ctx.Done():
	}
	member.Stop()
	<-member.Done()
	if flushErr := connection.FlushTimeout(apiTimeout); err == nil {
		err = flushErr
	}
	return err
}

func take(printer *printer, o *options, message jetstream.Msg) error {
	facts, err := message.Metadata()
	if err != nil {
		return err
	}
	time.Sleep(o.sleep)
	if o.evidence {
		if err := printer.testify(o.member, message); err != nil {
			return err
		}
		return message.Ack()
	}
	err = printer.print(line{
		Subject: message.Subject(), Sequence: facts.Sequence.Stream, Consumer: facts.Sequence.Consumer,
		Delivered: facts.NumDelivered, Pin: message.Headers().Get("Nats-Pin-Id"), Data: string(message.Data()),
		Member: o.member, Time: time.Now().UTC().Format(time.RFC3339Nano),
	})
	if err != nil {
		return err
	}
	return message.Ack()
}
