// SPDX-License-Identifier: Apache-2.0

package iptables

import (
	"context"
	"fmt"

	"github.com/ip-masq/ip-masq-cni/pkg/netfilter"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
)

// Probe implements netfilter.Driver. Without a variant it takes the one in
// which kubelet keeps its chains in table mangle, as the tools around it do,
// and else that of the program that is called iptables. IPv6 is not looked at:
// only who writes there needs ip6tables.
func (d *Driver) Probe(ctx context.Context, variant string) (netfilter.Choice, error) {
	c := netfilter.Choice{Backend: policy.IPTables, Variant: variant}
	var err error
	if c.Variant == "" {
		if c.Variant, err = d.preferred(ctx); err != nil {
			return netfilter.Choice{}, unusable(c, err)
		}
	}
	o, err := d.programs.open(ctx, policy.IPv4, c.Variant)
	if err != nil {
		return netfilter.Choice{}, unusable(c, err)
	}
	// To list a table of iptables-legacy that is not in use would make it, and
	// who asks may not want to write at all. Whether it works then shows itself.
	used := true
	if c.Variant == netfilter.VariantLegacy {
		if used, err = legacyInUse(policy.IPv4, natTable); err != nil {
			return netfilter.Choice{}, unusable(c, err)
		}
	}
	if used {
		if _, err := o.list(ctx, postrouting, false); err != nil {
			return netfilter.Choice{}, unusable(c, err)
		}
	}
	c.PlainPorts = !o.HasRandomFully()
	return c, nil
}

func unusable(c netfilter.Choice, err error) error {
	return fmt.Errorf("%s cannot keep rules on this host: %w: %w", c, netfilter.ErrUnusable, err)
}

// preferred returns the variant that this node uses. Tables of iptables-legacy
// are looked at only where somebody has made them already.
func (d *Driver) preferred(ctx context.Context) (string, error) {
	// kubelet makes these chains for others to find out by (KEP-3178).
	hints := []string{"KUBE-IPTABLES-HINT", "KUBE-KUBELET-CANARY"}
	for _, variant := range variants() {
		hinted, err := d.has(ctx, variant, "mangle", hints...)
		if err != nil {
			return "", fmt.Errorf("look for kubelet's chains in iptables (%s): %w", variant, err)
		}
		if hinted {
			return variant, nil
		}
	}
	return d.programs.plainVariant(ctx)
}
