// SPDX-License-Identifier: Apache-2.0

package thirdparty

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"runtime"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/ip-masq/ip-masq-cni/pkg/netfilter"
	"github.com/ip-masq/ip-masq-cni/pkg/netfilter/iptables"
	"github.com/ip-masq/ip-masq-cni/pkg/netfilter/nfnetlink"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
)

const (
	natTable    = "nat"
	postrouting = "POSTROUTING"
	// iptablesPriority is that of iptables' nat at the hook (NF_IP_PRI_NAT_SRC).
	iptablesPriority = 100
)

// Scan returns the third-party rules that change the source of packets, in the
// network namespace of the calling thread. Owned tells which chains are none of
// theirs; what these lead to is not looked at.
//
// An error is about what could not be read; what could is returned with it. (To
// be asked for its tables makes a kernel load nf_tables itself, and no more.)
func Scan(ctx context.Context, owned func(Place) bool) ([]Rule, error) {
	var s scan
	err := withHooks(ctx, func(hooks []hook) error {
		s = scan{}
		var errs []error
		for i, h := range hooks {
			w := walk{chains: h.chains, place: h.Place, owned: owned, at: position{h.Family, h.priority, i, 0}}
			if err := w.chain(h.Chain, condition{}, nil, nil); err != nil {
				errs = append(errs, h.failed(err))
				continue
			}
			s.found, s.founds, s.met = append(s.found, w.found...), append(s.founds, w.founds...), append(s.met, w.met...)
		}
		return errors.Join(errs...)
	})
	for i := range s.found {
		s.found[i].Order = s.order(s.founds[i])
	}
	return s.found, err
}

// hook is a base chain of type nat at the hook postrouting.
type hook struct {
	chains
	Place
	priority int32
	drops    bool // what comes to its end
}

func (h hook) failed(err error) error {
	return fmt.Errorf("read the NAT rules of table %s (%s): %w", plain(h.Table), h.Family, err)
}

// withHooks runs the function with all base chains, those of nf_tables being of one
// moment: for that it may be run again. What could not be read is not among
// them, and in the error.
func withHooks(ctx context.Context, body func([]hook) error) error {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	if err := ctx.Err(); err != nil {
		return err
	}
	legacy, errLegacy := legacyHooks()
	read := false
	err := withTables(func(c *nfnetlink.Conn) error {
		read = true
		_, err := c.ConsistentRead(func() error {
			hooks, err := tableHooks(c)
			return errors.Join(err, body(append(slices.Clip(legacy), hooks...)))
		})
		return err
	})
	if !read { // a kernel without nf_tables
		err = errors.Join(err, body(legacy))
	}
	return errors.Join(err, errLegacy)
}

// withTables runs the function with a connection to nf_tables, if the kernel has
// it.
func withTables(body func(*nfnetlink.Conn) error) error {
	c, err := nfnetlink.Dial()
	if err == nil {
		err = errors.Join(body(c), c.Close())
	}
	if nfnetlink.Unsupported(err) {
		return nil
	}
	return err
}

type scan struct {
	found  []Rule
	founds []position
	met    []position
}

// order compares a rule with all places where ours begin.
func (s *scan) order(p position) Order {
	var found Order
	for i, q := range slices.DeleteFunc(slices.Clone(s.met), func(q position) bool { return q.family != p.family }) {
		o := p.before(q)
		if i > 0 && o != found {
			return UnknownOrder
		}
		found = o
	}
	return found
}

// tableHooks returns the base chains in nf_tables.
func tableHooks(c *nfnetlink.Conn) ([]hook, error) {
	var hooks []hook
	for _, link := range []nfnetlink.Family{nfnetlink.IPv4, nfnetlink.IPv6, nfnetlink.Inet} {
		tables, err := c.Tables(link)
		if err != nil {
			return hooks, err
		}
		for _, t := range tables {
			if t.Dormant() {
				continue
			}
			chains, err := c.Chains(link, t.Name)
			if err != nil {
				return hooks, err
			}
			for _, chain := range chains {
				b := chain.Base
				if b == nil || b.Type != "nat" || b.Hook != unix.NF_INET_POST_ROUTING {
					continue
				}
				at := Place{Backend: policy.NFTables, Table: t.Name, Chain: chain.Name}
				if link != nfnetlink.Inet && t.Name == natTable && chain.Name == postrouting {
					at.Backend, at.Variant = policy.IPTables, netfilter.VariantNFT
				}
				for _, f := range familiesOf(link) {
					at.Family = f
					hooks = append(hooks, hook{&linkTable{conn: c, family: link, table: t.Name}, at, b.Priority, b.Policy == nfnetlink.Drop})
				}
			}
		}
	}
	return hooks, nil
}

func familiesOf(link nfnetlink.Family) []policy.Family {
	switch link {
	case nfnetlink.IPv4:
		return []policy.Family{policy.IPv4}
	case nfnetlink.IPv6:
		return []policy.Family{policy.IPv6}
	}
	return policy.Families()
}

// linkTable is a table of nf_tables, whose chains are read when they are met.
type linkTable struct {
	conn   *nfnetlink.Conn
	family nfnetlink.Family
	table  string
	known  map[string][]nfnetlink.Rule
}

func (t *linkTable) rules(chain string) ([]nfnetlink.Rule, error) {
	if rules, there := t.known[chain]; there {
		return rules, nil
	}
	rules, err := t.conn.Rules(t.family, t.table, chain)
	if err != nil {
		return nil, err
	}
	if t.known == nil {
		t.known = map[string][]nfnetlink.Rule{}
	}
	t.known[chain] = rules
	return rules, nil
}

func (t *linkTable) set(name string) (policy.Ranges, error) {
	_, ranges, err := t.conn.Ranges(t.family, t.table, name)
	if err != nil {
		return nil, err
	}
	return policy.Normalize(ranges), nil
}

func (*linkTable) device(index uint32) (string, error) {
	i, err := net.InterfaceByIndex(int(index))
	if err != nil {
		return "", err
	}
	return i.Name, nil
}

// legacyHooks returns POSTROUTING of iptables-legacy.
func legacyHooks() ([]hook, error) {
	var hooks []hook
	var errs []error
	for _, f := range policy.Families() {
		chains, err := iptables.Legacy(f, natTable)
		errs = append(errs, err)
		t := legacyTable{}
		for _, c := range chains {
			t[c.Name] = c.Rules
		}
		if len(t) > 0 {
			at := Place{Backend: policy.IPTables, Variant: netfilter.VariantLegacy, Family: f, Table: natTable, Chain: postrouting}
			hooks = append(hooks, hook{t, at, iptablesPriority, false})
		}
	}
	return hooks, errors.Join(errs...)
}

// legacyTable is the chains of a table of iptables-legacy.
type legacyTable map[string][]nfnetlink.Rule

func (t legacyTable) rules(chain string) ([]nfnetlink.Rule, error) { return t[chain], nil }

func (legacyTable) set(string) (policy.Ranges, error) { return nil, fs.ErrNotExist }

func (legacyTable) device(uint32) (string, error) { return "", fs.ErrNotExist }
