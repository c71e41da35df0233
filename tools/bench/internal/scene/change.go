// SPDX-License-Identifier: Apache-2.0

package scene

import (
	"errors"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"github.com/ip-masq/ip-masq-cni/pkg/netfilter/nfnetlink"
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

// Peak runs a request and returns also the peak memory of its program in bytes. time(1) starts it, because the kernel
// includes the memory of the starting process, which is small there and large here.
func (n *Node) Peak(r Request) (took Took, peak int64, err error) {
	file := filepath.Join(n.Dir, "peak")
	r.Args = []string{"--format=%M", "--output=" + file, n.Program(r.Plugin)}
	r.Plugin = "/usr/bin/time"
	if took, err = n.Run(r); err != nil {
		return took, 0, err
	}
	text, err := os.ReadFile(file)
	if err != nil {
		return took, 0, err
	}
	peak, err = strconv.ParseInt(strings.TrimSpace(string(text)), 10, 64)
	return took, peak << 10, err
}
