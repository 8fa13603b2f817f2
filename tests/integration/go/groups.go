package main

import (
	"context"
	"fmt"
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

func filters(_ context.Context, o *options) error {
	mappings, err := o.mappings()
	if err != nil {
		return err
	}
	found := pcgroups.GeneratePartitionFilters(o.memberNames(), o.maxMembers, mappings, o.member)
	if found == nil {
		found = []string{}
	}
	return show(found)
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
