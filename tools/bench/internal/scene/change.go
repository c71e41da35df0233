// SPDX-License-Identifier: Apache-2.0

package scene

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"github.com/ip-masq/ip-masq-cni/pkg/config"
	"github.com/ip-masq/ip-masq-cni/pkg/netfilter"
	"github.com/ip-masq/ip-masq-cni/pkg/netfilter/nfnetlink"
	"github.com/ip-masq/ip-masq-cni/pkg/netfilter/nftables"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
)

// table is the table of ip-masq on nftables.
const table = "ip-masq"

// Wipe deletes all NAT rules of the backend and waits until the kernel has freed them.
func (n *Node) Wipe() error {
	const settled = 20 * time.Millisecond
	defer time.Sleep(settled)
	if n.Backend.Kind == "iptables" {
		return n.Feed("*nat\nCOMMIT\n", "iptables-restore")
	}
	return n.Node.Do(func() error {
		var b nfnetlink.Batch
		b.AddTable(nfnetlink.IPv4, table) // deleting a missing table fails
		b.DeleteTable(nfnetlink.IPv4, table)
		return commit(&b)
	})
}

// Forget deletes the rules and the state, as before the first pod.
func (n *Node) Forget() error { return errors.Join(n.Wipe(), os.RemoveAll(n.DataDir)) }

// Rebuilder writes the rules of a policy in this process, as a reconciler with an open socket does.
// The backend is nftables.
type Rebuilder struct {
	node    *Node
	driver  *nftables.Driver
	backend netfilter.Backend
	desired policy.Ruleset
}

// Rebuilder returns a Rebuilder of a policy.
func (n *Node) Rebuilder(p Policy) (*Rebuilder, error) {
	text, err := n.Entry(p)
	if err != nil {
		return nil, err
	}
	entry, err := config.ReadNetconf(text).Entry()
	if err != nil {
		return nil, err
	}
	merged := policy.Merge([]policy.Source{{ID: policy.SourceID{Kind: policy.Network, Name: entry.Network}, Policy: entry.Policy}})
	r := &Rebuilder{node: n, driver: nftables.New()}
	if r.backend, err = r.driver.Open(netfilter.Choice{Backend: policy.NFTables}); err != nil {
		return nil, err
	}
	r.desired = policy.Desired(merged, r.backend.Layout(), policy.OwnedBy(n.DataDir))
	return r, nil
}

// Apply writes the rules and returns the time that this takes.
func (r *Rebuilder) Apply() (took time.Duration, err error) {
	err = r.node.Node.Do(func() error {
		start := time.Now()
		err := r.backend.Apply(context.Background(), r.desired, netfilter.Observation{}, nil)
		took = time.Since(start)
		return err
	})
	return took, err
}

// Close closes the socket.
func (r *Rebuilder) Close() error { return r.driver.Close() }

// Script returns the policy as input of `nft -f`.
func (r *Rebuilder) Script() string { return string(nftables.Render(r.desired)) }

// Peak runs a request and returns the peak memory of its program in bytes. time(1) starts it, because the kernel
// includes the memory of the starting process, which is small there and large here.
func (n *Node) Peak(r Request) (int64, error) {
	file := filepath.Join(n.Dir, "peak")
	r.Args = append([]string{"--format=%M", "--output=" + file, n.Program(r.Plugin)}, r.Args...)
	r.Plugin = "/usr/bin/time"
	if _, err := n.Run(r); err != nil {
		return 0, err
	}
	text, err := os.ReadFile(file)
	if err != nil {
		return 0, err
	}
	peak, err := strconv.ParseInt(strings.TrimSpace(string(text)), 10, 64)
	return peak << 10, err
}
