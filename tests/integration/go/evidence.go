package main

import (
	"fmt"
	"strconv"
	"strings"

	"github.com/nats-io/nats.go/jetstream"
	"golang.org/x/sys/unix"
)

// ready says that the member has joined.
func (p *printer) ready() error {
	p.mutex.Lock()
	defer p.mutex.Unlock()
	if _, err := fmt.Fprintln(p.out, "ready"); err != nil {
		return err
	}
	return p.out.Flush()
}

// testify writes what chaos/worker.py writes too: time, subject, sequence in the source stream, member. The time
// is the machine's monotonic clock in nanoseconds, which every process on it shares.
func (p *printer) testify(member string, message jetstream.Msg) error {
	sequence, err := sourceSequence(message)
	if err != nil {
		return err
	}
	p.mutex.Lock()
	defer p.mutex.Unlock()
	var now unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_MONOTONIC, &now); err != nil {
		return err
	}
	if _, err := fmt.Fprintln(p.out, now.Nano(), message.Subject(), sequence, member); err != nil {
		return err
	}
	return p.out.Flush()
}

// sourceSequence is the sequence in the stream that the group was made on: of an elastic group, not its queue's.
func sourceSequence(message jetstream.Msg) (string, error) {
	if source := strings.Fields(message.Headers().Get("Nats-Stream-Source")); len(source) > 1 {
		return source[1], nil
	}
	facts, err := message.Metadata()
	if err != nil {
		return "", err
	}
	return strconv.FormatUint(facts.Sequence.Stream, 10), nil
}
