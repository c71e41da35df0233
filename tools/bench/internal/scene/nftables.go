// SPDX-License-Identifier: Apache-2.0

package scene

import (
	"errors"
	"fmt"

	"golang.org/x/sys/unix"

	"github.com/ip-masq/ip-masq-cni/pkg/netfilter/nfnetlink"
)

// dropAll drops every incoming IPv4 packet in the network namespace of the thread, before connection
// tracking.
func dropAll() error {
	const table, chain = "drop", "prerouting"
	var b nfnetlink.Batch
	b.AddTable(nfnetlink.IPv4, table)
	b.AddChain(nfnetlink.IPv4, table, chain, &nfnetlink.Base{Type: "filter", Hook: unix.NF_INET_PRE_ROUTING, Priority: -400, Policy: nfnetlink.Drop})
	return commit(&b)
}

func commit(b *nfnetlink.Batch) error {
	var c nfnetlink.Conn
	if err := errors.Join(c.Commit(b), c.Close()); err != nil {
		return fmt.Errorf("write rules: %w", err)
	}
	return nil
}

// Commit adds a rule to a third-party table.
func (n *Node) Commit() error {
	const table, chain = "kproxy", "rules"
	var b nfnetlink.Batch
	b.AddTable(nfnetlink.IPv4, table)
	b.AddChain(nfnetlink.IPv4, table, chain, nil)
	b.AddRule(nfnetlink.IPv4, table, chain, nil, "")
	return n.Node.Do(func() error { return commit(&b) })
}
