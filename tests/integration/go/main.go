// Command pcgroups-peer is a member of partitioned consumer groups written with the reference library.
// The tests run it beside keylane: every subcommand prints JSON on stdout, errors go to stderr.
package main

import (
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"sort"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"github.com/synadia-io/orbit.go/pcgroups"
)

const apiTimeout = 10 * time.Second

type command struct {
	summary string
	run     func(ctx context.Context, o *options) error
}

var commands = map[string]command{
	"version":        {"print the versions of the libraries inside", version},
	"static-create":  {"create a static group", staticCreate},
	"elastic-create": {"create an elastic group", elasticCreate},
	"config":         {"print the stored configuration as Go reads it", config},
	"filters":        {"print the filters of one member, without a server", filters},
	"consume":        {"join as a member, print one line per message, ack", consume},
	"add-members":    {"add members to an elastic group", addMembers},
	"drop-members":   {"drop members from an elastic group", dropMembers},
	"set-mapping":    {"set the member mapping of an elastic group", setMapping},
	"delete":         {"delete a group", deleteGroup},
	"step-down":      {"unpin the active instance of a member", stepDown},
}

type options struct {
	url, stream, group, kind, member string
	filter, wildcards                string
	members, mapping                 string
	maxMembers                       uint
	maxBufferedMsgs, maxBufferedSize int64
	ackWait, sleep                   time.Duration
	maxAckPending, count             int
	cases, evidence                  bool
}

func main() {
	if len(os.Args) < 2 || commands[os.Args[1]].run == nil {
		usage()
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := commands[os.Args[1]].run(ctx, parse(os.Args[1], os.Args[2:])); err != nil {
		fmt.Fprintf(os.Stderr, "pcgroups-peer %s: %v\n", os.Args[1], err)
		os.Exit(1)
	}
}

func usage() {
	names := make([]string, 0, len(commands))
	for name := range commands {
		names = append(names, name)
	}
	sort.Strings(names)
	for _, name := range names {
		fmt.Fprintf(os.Stderr, "  %-15s %s\n", name, commands[name].summary)
	}
	os.Exit(2)
}

func parse(name string, arguments []string) *options {
	o := &options{}
	f := flag.NewFlagSet(name, flag.ExitOnError)
	f.StringVar(&o.url, "url", nats.DefaultURL, "server")
	f.StringVar(&o.stream, "stream", "", "source stream")
	f.StringVar(&o.group, "group", "", "group")
	f.StringVar(&o.kind, "kind", "elastic", "elastic or static")
	f.StringVar(&o.member, "member", "", "member name")
	f.StringVar(&o.filter, "filter", "", "subject filter")
	f.StringVar(&o.wildcards, "wildcards", "", "partitioning wildcards, as 1,2")
	f.StringVar(&o.members, "members", "", "member names, as a,b")
	f.StringVar(&o.mapping, "mapping", "", "partitions by member, as a:0,1;b:2")
	f.UintVar(&o.maxMembers, "max-members", 0, "number of partitions")
	f.Int64Var(&o.maxBufferedMsgs, "max-buffered-msgs", 0, "bound of the elastic stream, messages")
	f.Int64Var(&o.maxBufferedSize, "max-buffered-bytes", 0, "bound of the elastic stream, bytes")
	f.DurationVar(&o.ackWait, "ack-wait", 0, "ack wait of the member's consumer; the library may raise it")
	f.IntVar(&o.maxAckPending, "max-ack-pending", 0, "unacknowledged messages allowed; 0 leaves the server's default")
	f.DurationVar(&o.sleep, "sleep", 0, "time to hold each message before the ack")
	f.IntVar(&o.count, "count", 0, "stop after so many messages; 0 runs until SIGTERM")
	f.BoolVar(&o.cases, "cases", false, "filters: read cases from stdin, one JSON object a line")
	f.BoolVar(&o.evidence, "evidence", false, "consume: print short lines of evidence instead of JSON")
	_ = f.Parse(arguments) // ExitOnError
	return o
}

func (o *options) memberNames() []string {
	if o.members == "" {
		return nil
	}
	return strings.Split(o.members, ",")
}

func (o *options) wildcardIndexes() ([]int, error) { return numbers(o.wildcards) }

func (o *options) mappings() ([]pcgroups.MemberMapping, error) {
	if o.mapping == "" {
		return nil, nil
	}
	var mappings []pcgroups.MemberMapping
	for _, part := range strings.Split(o.mapping, ";") {
		member, list, found := strings.Cut(part, ":")
		if !found {
			return nil, fmt.Errorf("mapping %q: want member:0,1", part)
		}
		partitions, err := numbers(list)
		if err != nil {
			return nil, err
		}
		mappings = append(mappings, pcgroups.MemberMapping{Member: member, Partitions: partitions})
	}
	return mappings, nil
}

func numbers(list string) ([]int, error) {
	if list == "" {
		return nil, nil
	}
	var found []int
	for _, text := range strings.Split(list, ",") {
		number, err := strconv.Atoi(text)
		if err != nil {
			return nil, fmt.Errorf("%q is not a number", text)
		}
		found = append(found, number)
	}
	return found, nil
}

func connect(o *options) (*nats.Conn, jetstream.JetStream, error) {
	connection, err := nats.Connect(o.url, nats.Name("pcgroups-peer"))
	if err != nil {
		return nil, nil, err
	}
	js, err := jetstream.New(connection)
	return connection, js, err
}

// withServer runs one request-like action on a connection of its own.
func withServer(ctx context.Context, o *options, action func(context.Context, jetstream.JetStream) (any, error)) error {
	connection, js, err := connect(o)
	if err != nil {
		return err
	}
	defer connection.Close()
	bounded, cancel := context.WithTimeout(ctx, apiTimeout)
	defer cancel()
	result, err := action(bounded, js)
	if err != nil {
		return err
	}
	return show(result)
}

func show(value any) error {
	return json.NewEncoder(os.Stdout).Encode(value)
}
