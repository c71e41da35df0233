// SPDX-License-Identifier: Apache-2.0

package iptables

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/ip-masq/ip-masq-cni/pkg/netfilter"
	"github.com/ip-masq/ip-masq-cni/pkg/netfilter/nfnetlink"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
)

// Able implements netfilter.Backend: rules are read without a program, but not
// written. Rules that would have no effect are not written either.
func (b *backend) Able(ctx context.Context, f policy.Family) error {
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

// Lacks implements netfilter.Backend. iptables-nft makes table nat and its base
// chains as it needs them and never takes them away. Those of iptables-legacy
// are the kernel's, which keeps them as long as the module is loaded.
func (b *backend) Lacks(_ context.Context, f policy.Family) (netfilter.Site, error) {
	if b.choice.Variant != netfilter.VariantNFT {
		return netfilter.SiteThere, nil
	}
	var base *nfnetlink.Chain
	err := b.link.use(func(c *nfnetlink.Conn) (err error) {
		_, base, err = c.TableAndChain(nflinkFamily(f), natTable, postrouting)
		return err
	})
	switch {
	case errors.Is(err, fs.ErrNotExist) || notInKernel(err):
		return netfilter.SiteTable, nil
	case err != nil:
		return netfilter.SiteThere, fmt.Errorf("see whether %s has a table %s (%s): %w", b.choice, natTable, f, err)
	case base == nil:
		return netfilter.SiteChain, nil
	}
	return netfilter.SiteThere, nil
}

// Vacate implements netfilter.Backend. It runs no program. What others add
// between the reading and the deletion makes it read again.
func (b *backend) Vacate(ctx context.Context, f policy.Family, made netfilter.Site) error {
	const tries = 10
	if b.choice.Variant != netfilter.VariantNFT || made == netfilter.SiteThere {
		return nil
	}
	var err error
	for range tries {
		err = b.link.use(func(c *nfnetlink.Conn) error { return vacate(c, nflinkFamily(f), made) })
		if err == nil || errors.Is(err, fs.ErrNotExist) || notInKernel(err) {
			return nil
		}
		if !errors.Is(err, nfnetlink.ErrStale) && !errors.Is(err, nfnetlink.ErrInterrupted) || ctx.Err() != nil {
			break
		}
	}
	return fmt.Errorf("remove the %s that was made in %s (%s): %w", made, b.choice, f, err)
}

// vacate deletes table nat or its POSTROUTING, if nothing is in it.
func vacate(c *nfnetlink.Conn, family nfnetlink.Family, made netfilter.Site) error {
	var batch nfnetlink.Batch
	generation, err := c.Snapshot(func() error {
		batch = nfnetlink.Batch{}
		table, err := c.Table(family, natTable)
		if err != nil {
			return err
		}
		chains, err := c.Chains(family, natTable)
		if err != nil {
			return err
		}
		used := slices.ContainsFunc(chains, func(c nfnetlink.Chain) bool { return !vacant(c) })
		switch {
		case made == netfilter.SiteTable && !used && table.Flags == 0 && int(table.Use) == len(chains): // no sets either
			batch.DeleteTable(family, natTable)
		case made == netfilter.SiteChain && slices.ContainsFunc(chains, func(c nfnetlink.Chain) bool { return c.Name == postrouting && vacant(c) }):
			batch.DeleteChain(family, natTable, postrouting)
		}
		return nil
	})
	if err != nil {
		return err
	}
	batch.Generation = generation
	return c.Commit(&batch)
}

// vacant reports whether a chain is a base chain as iptables makes it, without a
// rule in it.
func vacant(c nfnetlink.Chain) bool {
	return c.Base != nil && *c.Base == builtIn(c.Name) && c.Use == 0
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
