// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"fmt"
	"slices"

	"github.com/spf13/cobra"

	"github.com/ip-masq/ip-masq-cni/pkg/netfilter"
	"github.com/ip-masq/ip-masq-cni/pkg/netfilter/iptables"
	"github.com/ip-masq/ip-masq-cni/pkg/netfilter/nftables"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
	"github.com/ip-masq/ip-masq-cni/pkg/reconcile"
)

func (a *app) renderCommand() *cobra.Command {
	family := string(policy.IPv4)
	c := &cobra.Command{
		Use:   "render",
		Short: "Print the desired rules, for iptables-restore or nft -f",
		RunE:  func(c *cobra.Command, _ []string) error { return a.render(c, policy.Family(family)) },
	}
	c.Flags().StringVar(&family, "family", family, "address `FAMILY` to print, for iptables: ipv4 or ipv6")
	return c
}

func (a *app) render(c *cobra.Command, family policy.Family) error {
	if !slices.Contains(policy.Families(), family) {
		return usageError{fmt.Errorf("--family %s: write ipv4 or ipv6", policy.Quote(string(family)))}
	}
	// Here the flag chooses the form of the output, and is none of the settings that inspect reads.
	wanted := policy.Auto
	for _, f := range a.flags {
		if f.key == "backend" && f.given {
			wanted, f.given = policy.Backend(f.text), false
		}
	}
	node, err := a.inspect(c.Context())
	if err != nil {
		return err
	}
	node.printSettingsOrigin(a)
	r := node.DryRun(c.Context(), node.Read())
	if r.Rules == nil {
		warn(a, r.Warnings)
		return joined(r.Problems)
	}
	if err := r.Incomplete(); err != nil {
		return fmt.Errorf("render the desired rules: not all documents can be read: %w", err)
	}
	warn(a, mapped(r.Obstacles(), errOf))
	choice, err := outputForm(r, wanted)
	if err != nil {
		return err
	}
	backend, err := node.Drivers.Open(choice)
	if err != nil {
		return err
	}
	layout, owner := r.Rules.LayoutOf(backend, choice), policy.OwnedBy(node.Dir.Path())
	desired := policy.Desired(r.Rules.Policies(), layout, owner)
	if len(desired.Chains) == 0 {
		_, err := fmt.Fprintln(a.out, "# no source asks for a chain")
		return err
	}
	if choice.Backend == policy.IPTables {
		_, err = a.out.Write(renderIPTables(r, desired, family))
		return err
	}
	_, err = a.out.Write(renderNFTables(r, desired))
	return err
}

func renderIPTables(r *reconcile.Report, desired policy.Ruleset, family policy.Family) []byte {
	text := iptables.Render(desired, family)
	for _, g := range r.Rules.Guard.Desired {
		if g.Family == family {
			const elsewhere = "# guard and enforceExempt are in nftables: " +
				"ip-masq-reconciler render --backend nftables has their tables.\n"
			return append([]byte(elsewhere), text...)
		}
	}
	return text
}

func renderNFTables(r *reconcile.Report, desired policy.Ruleset) []byte {
	var managed []policy.Family // a host without IPv6 cannot load IPv6 rules
	for _, f := range policy.Families() {
		if manages(r.Rules.Policies(), f) {
			managed = append(managed, f)
		}
	}
	text := nftables.Render(desired, managed)
	if guards := r.Rules.Guard.Desired; len(guards) > 0 {
		text = append(text, nftables.RenderGuards(guards, managed)...)
	}
	return text
}

func manages(policies []policy.Policy, f policy.Family) bool {
	for _, p := range policies {
		if slices.Contains(p.Families(), f) {
			return true
		}
	}
	return false
}

// outputForm returns the wanted backend as the node uses it, else that in which the node keeps its chains.
func outputForm(r *reconcile.Report, wanted policy.Backend) (netfilter.Choice, error) {
	var found []netfilter.Choice
	for _, c := range r.Rules.Chains {
		isWanted := wanted == policy.Auto || wanted == c.Choice.Backend
		if c.Choice.Backend != "" && isWanted && !slices.Contains(found, c.Choice) {
			found = append(found, c.Choice)
		}
	}
	switch {
	case len(found) > 1 && wanted == policy.Auto:
		const format = "the node keeps its chains in %s and %s: name one with --backend"
		return netfilter.Choice{}, usageError{fmt.Errorf(format, found[0], found[1])}
	case len(found) > 0:
		return found[0], nil
	case wanted == policy.Auto:
		none := errors.New("no backend is chosen on this node yet: name one with --backend")
		return netfilter.Choice{}, usageError{none}
	case wanted == policy.IPTables:
		return netfilter.Choice{Backend: wanted, Variant: netfilter.VariantNFT}, nil
	}
	return netfilter.Choice{Backend: wanted}, nil
}
