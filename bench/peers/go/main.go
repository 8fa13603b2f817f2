// Command bench-peer is the Go client's side of the benchmarks. Each subcommand prints one JSON line.
package main

import (
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"os"
	"syscall"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
)

type options struct {
	url, stream, consumer, subject string
	group, kind, members           string
	count, pullMax, size, asyncMax int
	maxAckPending                  int
	timeout, sleep                 time.Duration
}

// result counts from the first message to the last ack (or answer) that left the client.
type result struct {
	Count      int     `json:"count"`
	Seconds    float64 `json:"seconds"`
	Rate       float64 `json:"rate"`
	CPUSeconds float64 `json:"cpu_seconds"`
	OutOfOrder int64   `json:"out_of_order"`
}

var commands = map[string]func(context.Context, *nats.Conn, jetstream.JetStream, *options) (result, error){
	"consume": consume,
	"group":   group,
	"ordered": ordered,
	"publish": publish,
}

func main() {
	if len(os.Args) < 2 || commands[os.Args[1]] == nil {
		fmt.Fprintln(os.Stderr, "usage: bench-peer consume|group|ordered|publish [options]")
		os.Exit(2)
	}
	if err := run(os.Args[1], os.Args[2:]); err != nil {
		fmt.Fprintf(os.Stderr, "bench-peer %s: %v\n", os.Args[1], err)
		os.Exit(1)
	}
}

func run(name string, arguments []string) error {
	o := &options{}
	f := flag.NewFlagSet(name, flag.ExitOnError)
	f.StringVar(&o.url, "url", nats.DefaultURL, "server")
	f.StringVar(&o.stream, "stream", "", "stream")
	f.StringVar(&o.consumer, "consumer", "", "existing durable consumer")
	f.StringVar(&o.group, "group", "", "existing group")
	f.StringVar(&o.kind, "kind", "elastic", "elastic or static")
	f.StringVar(&o.members, "members", "", "members of the group to run, as a,b")
	f.IntVar(&o.maxAckPending, "max-ack-pending", 1, "unacknowledged messages allowed to each member")
	f.DurationVar(&o.sleep, "sleep", 0, "time to hold each message of a group before the ack")
	f.StringVar(&o.subject, "subject", "", "subject to publish to")
	f.IntVar(&o.count, "count", 0, "messages")
	f.IntVar(&o.pullMax, "pull-max", 0, "messages asked for at a time; 0 leaves the client's default")
	f.IntVar(&o.size, "size", 128, "payload bytes")
	f.IntVar(&o.asyncMax, "async-max", 4000, "publishes in flight")
	f.DurationVar(&o.timeout, "timeout", 5*time.Minute, "give up after")
	_ = f.Parse(arguments) // ExitOnError
	if o.count < 1 {
		return fmt.Errorf("--count %d: give a number of messages, 1 or more", o.count)
	}

	connection, err := nats.Connect(o.url, nats.Name("bench-peer"))
	if err != nil {
		return err
	}
	defer connection.Close()
	js, err := jetstream.New(connection, jetstream.WithPublishAsyncMaxPending(o.asyncMax))
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(context.Background(), o.timeout)
	defer cancel()
	measured, err := commands[name](ctx, connection, js, o)
	if err != nil {
		return err
	}
	return json.NewEncoder(os.Stdout).Encode(measured)
}

// stopwatch measures wall time and this process's CPU from start to stop.
type stopwatch struct {
	started time.Time
	cpu     float64
}

func start() (stopwatch, error) {
	cpu, err := cpuSeconds()
	return stopwatch{time.Now(), cpu}, err
}

func (s stopwatch) stop(count int) (result, error) {
	seconds := time.Since(s.started).Seconds()
	cpu, err := cpuSeconds()
	return result{Count: count, Seconds: seconds, Rate: float64(count) / seconds, CPUSeconds: cpu - s.cpu}, err
}

func cpuSeconds() (float64, error) {
	var usage syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &usage); err != nil {
		return 0, err
	}
	return float64(usage.Utime.Nano()+usage.Stime.Nano()) / 1e9, nil
}
