// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"fmt"
	"slices"

	"github.com/spf13/cobra"

	"github.com/ip-masq/ip-masq-cni/pkg/netfilter"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
	"github.com/ip-masq/ip-masq-cni/pkg/reconcile"
)

func (a *app) renderCommand() *cobra.Command {
	family := string(policy.IPv4)
	c := &cobra.Command{
		Use:   "render",
		Short: "Print the desired rules, for iptables-restore or nft -f",
		Long: `Print the rules that the sources ask for, as input of "iptables-restore --noflush"
(ip6tables-restore with --family ipv6) or of "nft -f -". Nothing is written.
--backend iptables or nftables chooses the form, by default that of the node's backend.`,
		Example: `  # Validate the rules for nftables
  ip-masq-reconciler render --backend nftables | nft -c -f -

  # Validate the IPv6 rules for iptables
  ip-masq-reconciler render --backend iptables --family ipv6 | ip6tables-restore --noflush --test`,
		Args: noArguments,
		RunE: func(c *cobra.Command, _ []string) error { return a.render(c, policy.Family(family)) },
	}
	c.Flags().StringVar(&family, "family", family, "address family to print, for iptables: ipv4 or ipv6")
	return c
}

func (a *app) render(c *cobra.Command, family policy.Family) error {
	if !slices.Contains(policy.Families(), family) {
		return usageError{fmt.Errorf("--family %s: write ipv4 or ipv6", policy.Quote(string(family)))}
	}
	// Here the flag chooses the form of the output, not the backend of the node.
	wanted := policy.Auto
	for _, f := range a.flags {
		if f.key == "backend" && f.given {
			wanted, f.given = policy.Backend(f.text), false
		}
	}
	node, err := a.node()
	if err != nil {
		return err
	}
	r := node.DryRun(c.Context(), node.Read())
	if r.Rules == nil {
		return a.problems(r, r.Problems)
	}
	if err := r.Incomplete(); err != nil {
		return fmt.Errorf("render the desired rules: not all documents can be read: %w", err)
	}
	warn(a, mapped(r.Obstacles(), func(p reconcile.Problem) error { return p.Err }))
	choice, err := outputForm(r, wanted)
	if err != nil {
		return err
	}
	backend, err := node.Drivers.Open(choice)
	if err != nil {
		return err
	}
	desired := policy.Desired(r.Rules.Policies, backend.Layout(), policy.OwnedBy(node.Dir.Path()))
	families := []policy.Family{family}
	if choice.Backend == policy.NFTables { // a host without IPv6 cannot load IPv6 rules
		families = slices.DeleteFunc(policy.Families(), func(f policy.Family) bool {
			return !slices.ContainsFunc(r.Rules.Policies, func(p policy.Policy) bool { return slices.Contains(p.Families(), f) })
		})
	}
	if len(desired.Chains) == 0 {
		_, err := fmt.Fprintln(a.out, "# no source asks for a chain")
		return err
	}
	text, err := node.Drivers.Render(choice.Backend, desired, families...)
	if err != nil {
		return err
	}
	if text, err = withGuards(node, choice.Backend, text, r.Rules.Guard.Desired, families); err != nil {
		return err
	}
	_, err = a.out.Write(text)
	return err
}

// withGuards adds the tables ip-masq-guard, which are in nftables whatever the backend of the chains.
func withGuards(node *reconcile.Node, b policy.Backend, text []byte, desired []policy.Guard, families []policy.Family) ([]byte, error) {
	switch {
	case len(desired) == 0:
		return text, nil
	case b != policy.NFTables:
		note := "# guard and enforceExempt are in nftables: ip-masq-reconciler render --backend nftables prints their tables.\n"
		return append([]byte(note), text...), nil
	}
	tables, err := node.Drivers.GuardTables()
	if err != nil {
		return nil, err
	}
	return slices.Concat(text, tables.RenderGuards(desired, families...)), nil
}

// outputForm returns the backend to render for: the wanted one as the node uses it, else the one
// in which the node keeps its chains.
func outputForm(r *reconcile.Report, wanted policy.Backend) (netfilter.Choice, error) {
	var found []netfilter.Choice
	for _, g := range r.Rules.Groups {
		if wanted == policy.Auto || wanted == g.Choice.Backend {
			found = append(found, g.Choice)
		}
	}
	switch {
	case len(found) > 1 && wanted == policy.Auto:
		return netfilter.Choice{}, usageError{fmt.Errorf("the node keeps its chains in %s and %s: name one with --backend", found[0], found[1])}
	case len(found) > 0:
		return found[0], nil
	case wanted == policy.Auto:
		return netfilter.Choice{}, usageError{errors.New("no backend is chosen on this node yet: name one with --backend")}
	case wanted == policy.IPTables:
		return netfilter.Choice{Backend: wanted, Variant: netfilter.VariantNFT}, nil
	}
	return netfilter.Choice{Backend: wanted}, nil
}
