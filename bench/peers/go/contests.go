package main

import (
	"context"
	"fmt"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
)

// consume acks every message of an existing durable consumer.
func consume(ctx context.Context, connection *nats.Conn, js jetstream.JetStream, o *options) (result, error) {
	consumer, err := js.Consumer(ctx, o.stream, o.consumer)
	if err != nil {
		return result{}, err
	}
	return readAll(ctx, connection, consumer, o, func(message jetstream.Msg) error { return message.Ack() })
}

// ordered reads without acks.
func ordered(ctx context.Context, connection *nats.Conn, js jetstream.JetStream, o *options) (result, error) {
	consumer, err := js.OrderedConsumer(ctx, o.stream, jetstream.OrderedConsumerConfig{})
	if err != nil {
		return result{}, err
	}
	return readAll(ctx, connection, consumer, o, func(jetstream.Msg) error { return nil })
}

func readAll(
	ctx context.Context, connection *nats.Conn, consumer jetstream.Consumer, o *options,
	take func(jetstream.Msg) error,
) (result, error) {
	var watch stopwatch
	var failure error
	seen := 0
	done := make(chan struct{})
	handle := func(message jetstream.Msg) {
		if seen >= o.count || failure != nil {
			return
		}
		if seen == 0 {
			watch, failure = start()
		}
		if failure == nil {
			failure = take(message)
		}
		if seen++; seen == o.count || failure != nil {
			close(done)
		}
	}

	var wanted []jetstream.PullConsumeOpt
	if o.pullMax > 0 {
		wanted = append(wanted, jetstream.PullMaxMessages(o.pullMax))
	}
	reading, err := consumer.Consume(handle, wanted...)
	if err != nil {
		return result{}, err
	}
	defer reading.Stop()
	select {
	case <-done:
	case <-ctx.Done():
		return result{}, fmt.Errorf("%d messages wanted, not all arrived within %s", o.count, o.timeout)
	}
	if failure != nil {
		return result{}, failure
	}
	if err := connection.FlushTimeout(time.Minute); err != nil {
		return result{}, err
	}
	return watch.stop(o.count)
}

// publish sends without waiting for each answer and ends when the last one is in.
func publish(ctx context.Context, _ *nats.Conn, js jetstream.JetStream, o *options) (result, error) {
	payload := make([]byte, o.size)
	futures := make([]jetstream.PubAckFuture, 0, o.count)
	watch, err := start()
	if err != nil {
		return result{}, err
	}
	for range o.count {
		future, err := js.PublishAsync(o.subject, payload)
		if err != nil {
			return result{}, err
		}
		futures = append(futures, future)
	}
	select {
	case <-js.PublishAsyncComplete():
	case <-ctx.Done():
		return result{}, fmt.Errorf("%d publishes still unanswered after %s", js.PublishAsyncPending(), o.timeout)
	}
	measured, err := watch.stop(o.count)
	if err != nil {
		return result{}, err
	}
	return measured, firstFailure(futures)
}

func firstFailure(futures []jetstream.PubAckFuture) error {
	for _, future := range futures {
		select {
		case <-future.Ok():
		case err := <-future.Err():
			return err
		default:
			return fmt.Errorf("a publish on %q has no answer", future.Msg().Subject)
		}
	}
	return nil
}
