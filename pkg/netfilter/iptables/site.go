// SPDX-License-Identifier: Apache-2.0

package iptables

import (
	"context"
	"errors"
	"fmt"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/ip-masq/ip-masq-cni/pkg/netfilter/nfnetlink"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
)

// Able implements netfilter.Backend: rules are read without a program, but not
// written. Rules that would have no effect are not written either.
func (b *backend) CanWrite(ctx context.Context, f policy.Family) error {
	if _, err := b.programs.locate(ctx, baseName(f), b.choice.Variant, "-restore"); err != nil {
		return unusable(b.choice, err)
	}
	// What cannot be read is told by whoever reads the rules.
	if t, err := b.readKernel(f, nil); err == nil && t.fault != "" {
		return errors.New(t.fault)
	}
	return nil
}

// faultOf says why the rules of POSTROUTING have no effect, or another one than
// in a base chain as iptables makes it, and what helps; "" if it is as it should
// be. ip-masq does not repair it: table nat belongs to every program on the node.
func faultOf(f policy.Family, t nfnetlink.Table, c *nfnetlink.Chain) string {
	name := "table " + nflinkFamily(f).String() + " " + natTable
	made := builtIn(postrouting)
	dropping := made
	dropping.Policy = nfnetlink.Drop
	switch {
	case t.Dormant():
		return fmt.Sprintf("%s is dormant, and none of its chains has an effect; activate it with: nft add %s", name, name)
	case c == nil || c.Base != nil && *c.Base == made: // iptables makes what is missing
		return ""
	case c.Base != nil && *c.Base == dropping:
		return policyFault(f)
	}
	has := "no hook"
	if c.Base != nil && c.Base.Hook < numHooks {
		has = fmt.Sprintf("type %s hook %s priority %d", c.Base.Type, strings.ToLower(builtInChains()[c.Base.Hook]), c.Base.Priority)
	}
	return fmt.Sprintf("chain %s of %s has %s, not type nat hook postrouting priority %d as iptables makes it; "+
		"delete the chain with nft (iptables then makes it again) and add its other rules again", postrouting, name, has, made.Priority)
}

func policyFault(f policy.Family) string {
	return fmt.Sprintf("chain %s of table %s has policy DROP, so traffic that is not masqueraded is dropped; run: %s -t %s -P %s ACCEPT",
		postrouting, natTable, baseName(f), natTable, postrouting)
}

// builtIn returns how iptables makes a base chain of table nat.
func builtIn(chain string) nfnetlink.Base {
	const sourceNAT, destinationNAT = 100, -100 // NF_IP_PRI_NAT_SRC, …_DST
	var made nfnetlink.Base
	switch chain {
	case postrouting:
		made = nfnetlink.Base{Hook: unix.NF_INET_POST_ROUTING, Priority: sourceNAT}
	case "INPUT":
		made = nfnetlink.Base{Hook: unix.NF_INET_LOCAL_IN, Priority: sourceNAT}
	case "PREROUTING":
		made = nfnetlink.Base{Hook: unix.NF_INET_PRE_ROUTING, Priority: destinationNAT}
	case "OUTPUT":
		made = nfnetlink.Base{Hook: unix.NF_INET_LOCAL_OUT, Priority: destinationNAT}
	}
	made.Type, made.Policy = "nat", nfnetlink.Accept
	return made
}
