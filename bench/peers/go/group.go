package main

import (
	"context"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"github.com/synadia-io/orbit.go/pcgroups"
)

// tally is what all members of one run have seen together.
type tally struct {
	wanted           int64
	sleep            time.Duration
	begin            sync.Once
	end              sync.Once
	watch            stopwatch
	seen, outOfOrder atomic.Int64
	failure          error
	done             chan struct{}
}

// group joins every named member of an existing group in this process, checks the order of each key and acks.
func group(ctx context.Context, connection *nats.Conn, js jetstream.JetStream, o *options) (result, error) {
	join := pcgroups.ElasticConsume
	if o.kind == "static" {
		join = pcgroups.StaticConsume
	}
	all := &tally{wanted: int64(o.count), sleep: o.sleep, done: make(chan struct{})}
	wanted := jetstream.ConsumerConfig{AckPolicy: jetstream.AckExplicitPolicy, MaxAckPending: o.maxAckPending}
	for _, name := range strings.Split(o.members, ",") {
		member, err := join(ctx, js, o.stream, o.group, name, all.handler(), wanted)
		if err != nil {
			return result{}, err
		}
		defer func() {
			member.Stop()
			<-member.Done()
		}()
	}
	select {
	case <-all.done:
	case <-ctx.Done():
		return result{}, fmt.Errorf("%d of %d messages arrived within %s", all.seen.Load(), o.count, o.timeout)
	}
	if all.failure != nil {
		return result{}, all.failure
	}
	if err := connection.FlushTimeout(time.Minute); err != nil {
		return result{}, err
	}
	measured, err := all.watch.stop(o.count)
	measured.OutOfOrder = all.outOfOrder.Load()
	return measured, err
}

// handler is for one member. The library calls it for one message at a time, and no key belongs to two members.
func (t *tally) handler() func(jetstream.Msg) {
	last := map[string]uint64{}
	return func(message jetstream.Msg) {
		t.begin.Do(func() {
			var err error
			if t.watch, err = start(); err != nil {
				t.fail(err)
			}
		})
		if t.seen.Load() >= t.wanted {
			return
		}
		facts, err := message.Metadata()
		if err != nil {
			t.fail(err)
			return
		}
		if facts.Sequence.Stream <= last[message.Subject()] {
			t.outOfOrder.Add(1)
		}
		last[message.Subject()] = facts.Sequence.Stream
		if t.sleep > 0 {
			time.Sleep(t.sleep)
		}
		if err := message.Ack(); err != nil {
			t.fail(err)
			return
		}
		if t.seen.Add(1) == t.wanted {
			t.end.Do(func() { close(t.done) })
		}
	}
}

// fail ends the run; only the first failure counts.
func (t *tally) fail(err error) {
	t.end.Do(func() {
		t.failure = err
		close(t.done)
	})
}
