// SPDX-License-Identifier: Apache-2.0

package foreign

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"runtime"
	"slices"

	"go4.org/netipx"
	"golang.org/x/sys/unix"

	"github.com/ip-masq/ip-masq-cni/pkg/netfilter"
	"github.com/ip-masq/ip-masq-cni/pkg/netfilter/iptables"
	"github.com/ip-masq/ip-masq-cni/pkg/netfilter/nflink"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
)

const (
	natTable    = "nat"
	postrouting = "POSTROUTING"
	// iptablesPriority is that of iptables' nat at the hook (NF_IP_PRI_NAT_SRC).
	iptablesPriority = 100
)

// Scan returns the rules of others that change the source of packets, in the
// network namespace of the calling thread. Ours tells by a chain's name and its
// table's that it is none of theirs; what it leads to is not looked at.
//
// An error is about what could not be read; what could is returned with it. (To
// be asked for its tables makes a kernel load nf_tables itself, and no more.)
func Scan(ctx context.Context, ours func(table, chain string) bool) ([]Rule, error) {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	s := &scan{ctx: ctx, ours: ours}
	errLegacy := s.legacy() // first: what comes of nf_tables is read once more if it changes
	fromLegacy := *s
	errTables := withTables(func(c *nflink.Conn) error {
		return c.Steadily(func() error {
			*s = fromLegacy
			s.clip()
			return s.tables(c)
		})
	})
	for i := range s.found {
		s.found[i].Order = s.order(s.founds[i])
	}
	return s.found, errors.Join(errTables, errLegacy)
}

// withTables runs the function with a connection to nf_tables, if the kernel has
// it.
func withTables(body func(*nflink.Conn) error) error {
	c, err := nflink.Dial()
	if err == nil {
		err = errors.Join(body(c), c.Close())
	}
	if errors.Is(err, unix.EPROTONOSUPPORT) || errors.Is(err, unix.EOPNOTSUPP) || errors.Is(err, unix.EAFNOSUPPORT) {
		return nil
	}
	return err
}

type scan struct {
	ctx    context.Context
	ours   func(table, chain string) bool
	bases  int
	found  []Rule
	founds []position
	met    []position
}

func (s *scan) clip() {
	s.found, s.founds, s.met = slices.Clip(s.found), slices.Clip(s.founds), slices.Clip(s.met)
}

// base follows one base chain.
func (s *scan) base(c chains, place Rule, chain string, priority int32) error {
	if err := s.ctx.Err(); err != nil {
		return err
	}
	s.bases++
	w := walk{chains: c, place: place, ours: s.ours, at: position{place.Family, priority, s.bases, 0}}
	if err := w.chain(chain, condition{}, nil, nil); err != nil {
		return fmt.Errorf("read the NAT rules of table %s (%s): %w", plain(place.Table), place.Family, err)
	}
	s.found, s.founds, s.met = append(s.found, w.found...), append(s.founds, w.founds...), append(s.met, w.met...)
	return nil
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

// tables follows the base chains of nf_tables.
func (s *scan) tables(c *nflink.Conn) error {
	for _, link := range []nflink.Family{nflink.IPv4, nflink.IPv6, nflink.Inet} {
		tables, err := c.Tables(link)
		if err != nil {
			return err
		}
		for _, t := range tables {
			if t.Dormant() {
				continue
			}
			chains, err := c.Chains(link, t.Name)
			if err != nil {
				return err
			}
			for _, chain := range chains {
				if chain.Base == nil || chain.Base.Type != "nat" || chain.Base.Hook != unix.NF_INET_POST_ROUTING {
					continue
				}
				for _, f := range familiesOf(link) {
					place := Rule{Backend: policy.NFTables, Family: f, Table: t.Name}
					if link != nflink.Inet && t.Name == natTable && chain.Name == postrouting {
						place.Backend, place.Variant = policy.IPTables, netfilter.VariantNFT
					}
					if err := s.base(&linkTable{conn: c, family: link, table: t.Name}, place, chain.Name, chain.Base.Priority); err != nil {
						return err
					}
				}
			}
		}
	}
	return nil
}

func familiesOf(link nflink.Family) []policy.Family {
	switch link {
	case nflink.IPv4:
		return []policy.Family{policy.IPv4}
	case nflink.IPv6:
		return []policy.Family{policy.IPv6}
	}
	return policy.Families()
}

// linkTable is a table of nf_tables, whose chains are read when they are met.
type linkTable struct {
	conn   *nflink.Conn
	family nflink.Family
	table  string
	known  map[string][]nflink.Rule
}

func (t *linkTable) rules(chain string) ([]nflink.Rule, error) {
	if rules, there := t.known[chain]; there {
		return rules, nil
	}
	rules, err := t.conn.Rules(t.family, t.table, chain)
	if err != nil {
		return nil, err
	}
	if t.known == nil {
		t.known = map[string][]nflink.Rule{}
	}
	t.known[chain] = rules
	return rules, nil
}

func (t *linkTable) set(name string) (policy.Ranges, error) {
	s, err := t.conn.Set(t.family, t.table, name)
	if err != nil {
		return nil, err
	}
	elements, err := t.conn.Elements(t.family, t.table, name)
	if err != nil {
		return nil, err
	}
	read, err := s.Ranges(elements)
	if err != nil {
		return nil, err
	}
	ranges := make([]netipx.IPRange, len(read))
	for i, x := range read {
		ranges[i] = netipx.IPRangeFrom(x.First, x.Last)
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

// legacy follows POSTROUTING of iptables-legacy.
func (s *scan) legacy() error {
	var errs []error
	for _, f := range policy.Families() {
		chains, err := iptables.Legacy(f, natTable)
		if err != nil {
			errs = append(errs, err)
			continue
		}
		t := legacyTable{}
		for _, c := range chains {
			t[c.Name] = c.Rules
		}
		if len(t) > 0 {
			place := Rule{Backend: policy.IPTables, Variant: netfilter.VariantLegacy, Family: f, Table: natTable}
			errs = append(errs, s.base(t, place, postrouting, iptablesPriority))
		}
	}
	return errors.Join(errs...)
}

// legacyTable is the chains of a table of iptables-legacy.
type legacyTable map[string][]nflink.Rule

func (t legacyTable) rules(chain string) ([]nflink.Rule, error) { return t[chain], nil }

func (legacyTable) set(string) (policy.Ranges, error) { return nil, fs.ErrNotExist }

func (legacyTable) device(uint32) (string, error) { return "", fs.ErrNotExist }
