// SPDX-License-Identifier: Apache-2.0

package iptables

import (
	"errors"
	"io/fs"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/ip-masq/ip-masq-cni/pkg/netfilter/nfnetlink"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
)

// link is a connection to nf_tables, made when it is first needed and kept: a
// socket that is closed soon after a commit takes the kernel milliseconds.
type link struct {
	mu   sync.Mutex
	conn *nfnetlink.Conn
}

// use runs the function with the connection. What fails for another reason than
// that something is not there makes it begin anew the next time.
func (l *link) use(body func(*nfnetlink.Conn) error) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.conn == nil {
		c, err := nfnetlink.Dial()
		if err != nil {
			return err
		}
		l.conn = c
	}
	err := body(l.conn)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		err = errors.Join(err, l.conn.Close())
		l.conn = nil
	}
	return err
}

// notInKernel reports whether the error is that of a kernel without nf_tables.
func notInKernel(err error) bool {
	return errors.Is(err, unix.EPROTONOSUPPORT) || errors.Is(err, unix.EOPNOTSUPP) || errors.Is(err, unix.EINVAL)
}

func nflinkFamily(f policy.Family) nfnetlink.Family {
	if f == policy.IPv6 {
		return nfnetlink.IPv6
	}
	return nfnetlink.IPv4
}

// hasChain reports whether the table of iptables-nft has the chain.
func (l *link) hasChain(f policy.Family, tableName, chain string) (bool, error) {
	err := l.use(func(c *nfnetlink.Conn) error {
		_, err := c.Chain(nflinkFamily(f), tableName, chain)
		return err
	})
	if errors.Is(err, fs.ErrNotExist) || notInKernel(err) {
		return false, nil
	}
	return err == nil, err
}

// read reads POSTROUTING and the named chains of iptables-nft.
func (l *link) read(f policy.Family, names []string) (table, error) {
	var t table
	err := l.use(func(c *nfnetlink.Conn) error {
		return c.ConsistentRead(func() error {
			t = table{entries: map[string][]entry{}}
			nat, base, err := c.TableAndChain(nflinkFamily(f), natTable, postrouting)
			if errors.Is(err, fs.ErrNotExist) {
				return nil
			}
			if err != nil {
				return err
			}
			t.fault = faultOf(f, nat, base)
			for _, name := range names {
				if err := t.add(c, f, name); err != nil {
					return err
				}
			}
			if len(t.entries) == 0 {
				return nil // no chain, no jump to it
			}
			return t.add(c, f, postrouting)
		})
	})
	if err != nil {
		return table{}, err
	}
	return t, nil
}

// add reads one chain, if it is there.
func (t table) add(c *nfnetlink.Conn, f policy.Family, name string) error {
	rules, err := c.Rules(nflinkFamily(f), natTable, name)
	if err != nil {
		return err
	}
	if len(rules) == 0 {
		_, err := c.Chain(nflinkFamily(f), natTable, name)
		if errors.Is(err, fs.ErrNotExist) {
			return nil
		}
		if err != nil {
			return err
		}
	}
	t.entries[name] = make([]entry, 0, len(rules))
	for _, r := range rules {
		t.entries[name] = append(t.entries[name], compatEntry(f, r))
	}
	return nil
}
