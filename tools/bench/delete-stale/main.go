// SPDX-License-Identifier: Apache-2.0

// Command delete-stale resets stale connections as ip-masq does after a change of the policy: the
// plugin entry on stdin is in force now, and before it the prefix in PREFIX was exempt if it is not
// now, and the reverse.
package main

import (
	"context"
	"fmt"
	"io"
	"net/netip"
	"os"
	"slices"

	"github.com/ip-masq/ip-masq-cni/pkg/config"
	"github.com/ip-masq/ip-masq-cni/pkg/netfilter/conntrack"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
)

func main() {
	if err := run(); err != nil {
		fmt.Fprintln(os.Stderr, "delete-stale:", err)
		os.Exit(1)
	}
}

func run() error {
	prefix, err := netip.ParsePrefix(os.Getenv("PREFIX"))
	if err != nil {
		return err
	}
	text, err := io.ReadAll(os.Stdin)
	if err != nil {
		return err
	}
	entry, err := config.ReadNetconf(text).Entry()
	if err != nil {
		return err
	}
	merged := func(p policy.SourcePolicy) []policy.Policy {
		return policy.Merge([]policy.Source{{ID: policy.SourceID{Kind: policy.Network, Name: entry.Network}, Policy: p}})
	}
	now, before := entry.Policy, entry.Policy
	if i := slices.Index(now.NonMasqueradeCIDRs, prefix); i >= 0 {
		before.NonMasqueradeCIDRs = slices.Delete(slices.Clone(now.NonMasqueradeCIDRs), i, i+1)
	} else {
		before.NonMasqueradeCIDRs = append(slices.Clip(now.NonMasqueradeCIDRs), prefix)
	}
	_, err = conntrack.Reset(context.Background(), policy.NewConnectionJudge(merged(now), [][]policy.Policy{merged(before)}, false))
	return err
}
