package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"runtime/debug"

	"github.com/nats-io/nats.go/jetstream"
	"github.com/synadia-io/orbit.go/pcgroups"
)

func version(context.Context, *options) error {
	versions := map[string]string{}
	if build, ok := debug.ReadBuildInfo(); ok {
		versions["go"] = build.GoVersion
		for _, module := range build.Deps {
			versions[module.Path] = module.Version
		}
	}
	return show(versions)
}

func staticCreate(ctx context.Context, o *options) error {
	mappings, err := o.mappings()
	if err != nil {
		return err
	}
	return withServer(ctx, o, func(ctx context.Context, js jetstream.JetStream) (any, error) {
		return pcgroups.CreateStatic(ctx, js, o.stream, o.group, o.maxMembers, o.filter, o.memberNames(), mappings)
	})
}

func elasticCreate(ctx context.Context, o *options) error {
	wildcards, err := o.wildcardIndexes()
	if err != nil {
		return err
	}
	return withServer(ctx, o, func(ctx context.Context, js jetstream.JetStream) (any, error) {
		return pcgroups.CreateElastic(
			ctx, js, o.stream, o.group, o.maxMembers, o.filter, wildcards, o.maxBufferedMsgs, o.maxBufferedSize)
	})
}

func config(ctx context.Context, o *options) error {
	return withServer(ctx, o, func(ctx context.Context, js jetstream.JetStream) (any, error) {
		if o.kind == "static" {
			return pcgroups.GetStaticConsumerGroupConfig(ctx, js, o.stream, o.group)
		}
		return pcgroups.GetElasticConsumerGroupConfig(ctx, js, o.stream, o.group)
	})
}

// filterCase is one question of a batch: which filters does Go give this member?
type filterCase struct {
	Members    []string                 `json:"members"`
	MaxMembers uint                     `json:"max_members"`
	Mappings   []pcgroups.MemberMapping `json:"member_mappings"`
	Member     string                   `json:"member"`
}

func filters(_ context.Context, o *options) error {
	if o.cases {
		return filterCases()
	}
	mappings, err := o.mappings()
	if err != nil {
		return err
	}
	return show(filtersOf(filterCase{o.memberNames(), o.maxMembers, mappings, o.member}))
}

// filterCases answers each line of stdin with one line.
func filterCases() error {
	questions := json.NewDecoder(os.Stdin)
	for {
		var one filterCase
		if err := questions.Decode(&one); errors.Is(err, io.EOF) {
			return nil
		} else if err != nil {
			return err
		}
		if err := show(filtersOf(one)); err != nil {
			return err
		}
	}
}

func filtersOf(one filterCase) []string {
	found := pcgroups.GeneratePartitionFilters(one.Members, one.MaxMembers, one.Mappings, one.Member)
	if found == nil {
		found = []string{}
	}
	return found
}

func addMembers(ctx context.Context, o *options) error {
	return withServer(ctx, o, func(ctx context.Context, js jetstream.JetStream) (any, error) {
		return pcgroups.AddMembers(ctx, js, o.stream, o.group, o.memberNames())
	})
}

func dropMembers(ctx context.Context, o *options) error {
	return withServer(ctx, o, func(ctx context.Context, js jetstream.JetStream) (any, error) {
		return pcgroups.DeleteMembers(ctx, js, o.stream, o.group, o.memberNames())
	})
}

func setMapping(ctx context.Context, o *options) error {
	mappings, err := o.mappings()
	if err != nil {
		return err
	}
	return withServer(ctx, o, func(ctx context.Context, js jetstream.JetStream) (any, error) {
		return mappings, pcgroups.SetMemberMappings(ctx, js, o.stream, o.group, mappings)
	})
}

func deleteGroup(ctx context.Context, o *options) error {
	return withServer(ctx, o, func(ctx context.Context, js jetstream.JetStream) (any, error) {
		if o.kind == "static" {
			return o.group, pcgroups.DeleteStatic(ctx, js, o.stream, o.group)
		}
		return o.group, pcgroups.DeleteElastic(ctx, js, o.stream, o.group)
	})
}

func stepDown(ctx context.Context, o *options) error {
	return withServer(ctx, o, func(ctx context.Context, js jetstream.JetStream) (any, error) {
		if o.member == "" {
			return nil, fmt.Errorf("--member is empty: name the member that steps down")
		}
		if o.kind == "static" {
			return o.member, pcgroups.StaticMemberStepDown(ctx, js, o.stream, o.group, o.member)
		}
		return o.member, pcgroups.ElasticMemberStepDown(ctx, js, o.stream, o.group, o.member)
	})
}
