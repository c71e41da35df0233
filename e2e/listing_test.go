// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"errors"
	"io/fs"
	"os"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// TestListingMatchesAgent compares `iptables -L IP-MASQ-AGENT` with the listing in the Kubernetes
// documentation (Administer a Cluster, "IP Masquerade Agent User Guide"): the targets, sources and
// destinations are the same, in the same order.
func TestListingMatchesAgent(t *testing.T) {
	const (
		heading   = "Chain IP-MASQ-AGENT (1 references)"
		linkLocal = "RETURN anywhere 169.254.0.0/16"
		pods      = "RETURN anywhere 10.0.0.0/8"
		last      = "MASQUERADE anywhere anywhere"
	)
	// Without these files iptables prints names from /etc/networks ("link-local") or waits for DNS.
	replaceFile(t, "/etc/networks", "")
	replaceFile(t, "/etc/nsswitch.conf", "hosts: files\nnetworks: files\n")
	for _, f := range backends()[1:] {
		t.Run(f.name, func(t *testing.T) {
			n := newNode(t, f)
			for _, c := range []struct {
				keys object
				want []string
			}{
				{object{"nonMasqueradeCIDRs": []string{"10.0.0.0/8"}}, []string{heading, linkLocal, pods, last}},
				{object{"nonMasqueradeCIDRs": []string{"10.0.0.0/8"}, "masqLinkLocal": true}, []string{heading, pods, last}},
			} {
				n.conflist(t, "podnet", c.keys)
				n.pod(t, "podnet")
				listing := n.tool(t, "iptables", "-t", "nat", "-L", "IP-MASQ-AGENT")
				if diff := cmp.Diff(c.want, listingColumns(t, listing)); diff != "" {
					t.Errorf("%v (-want +got):\n%s\n%s", c.keys, diff, listing)
				}
			}
		})
	}
}

// listingColumns returns the heading of a listing, then the target, source and destination of
// each rule.
func listingColumns(t *testing.T, listing string) []string {
	t.Helper()
	heading, rest, _ := strings.Cut(listing, "\n")
	columns, rest, _ := strings.Cut(rest, "\n")
	if got := strings.Fields(columns); !cmp.Equal(got, []string{"target", "prot", "opt", "source", "destination"}) {
		t.Fatalf("listing has columns %q", got)
	}
	lines := []string{heading}
	for line := range strings.Lines(rest) {
		if cells := strings.Fields(line); len(cells) >= 5 {
			lines = append(lines, strings.Join([]string{cells[0], cells[3], cells[4]}, " "))
		}
	}
	return lines
}

// replaceFile replaces the content of a file in the sandbox until the test ends.
func replaceFile(t *testing.T, path, text string) {
	t.Helper()
	before, err := os.ReadFile(path)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		t.Fatal(err)
	}
	// In a user namespace the file may belong to nobody; the renamed file belongs to the test.
	write := func(text []byte) error {
		next := path + ".e2e"
		return errors.Join(os.WriteFile(next, text, 0o644), os.Rename(next, path))
	}
	existed := err == nil
	t.Cleanup(func() {
		restore := func() error { return os.Remove(path) }
		if existed {
			restore = func() error { return write(before) }
		}
		if err := restore(); err != nil {
			t.Error(err)
		}
	})
	if err := write([]byte(text)); err != nil {
		t.Fatal(err)
	}
}
