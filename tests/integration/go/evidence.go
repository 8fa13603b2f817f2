package main

import (
	"fmt"
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
	source := strings.Fields(message.Headers().Get("Nats-Stream-Source"))
	if len(source) < 2 {
		return fmt.Errorf("message on %q does not say which sequence of the source stream it is", message.Subject())
	}
	p.mutex.Lock()
	defer p.mutex.Unlock()
	var now unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_MONOTONIC, &now); err != nil {
		return err
	}
	if _, err := fmt.Fprintln(p.out, now.Nano(), message.Subject(), source[1], member); err != nil {
		return err
	}
	return p.out.Flush()
}
