// SPDX-License-Identifier: Apache-2.0

package nftables

import (
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/ip-masq/ip-masq-cni/e2e/assert"
	"github.com/ip-masq/ip-masq-cni/e2e/timelimit"
	"github.com/ip-masq/ip-masq-cni/pkg/netfilter"
	"github.com/ip-masq/ip-masq-cni/pkg/netfilter/nfnetlink"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
)

// TestCommitBeforeWrite: another program commits between the reading of the tables and a write. The write
// succeeds unless that commit changed the rules of the owned tables; then its error is ErrChanged, also if
// the kernel refused a write before.
func TestCommitBeforeWrite(t *testing.T) {
	const refused = "add map ip ip-masq mine { type ipv4_addr : verdict; elements = { 1.2.3.4 : jump masq-B }; }"
	for name, tc := range map[string]struct {
		before, commit string
		attempt        int // during which the commit is made
		want           error
	}{
		"another table":                  {"", "add table ip other", 1, nil},
		"owned table":                    {"", "add rule ip ip-masq masq-A accept", 1, netfilter.ErrChanged},
		"owned table of IPv6":            {"", "add rule ip6 ip-masq masq-A accept", 1, netfilter.ErrChanged},
		"element":                        {"", "delete element ip ip-masq exempt-A { 10.0.0.0/8 }", 1, netfilter.ErrChanged},
		"owned tables deleted":           {"", "delete table ip ip-masq; delete table ip6 ip-masq", 1, netfilter.ErrChanged},
		"another table, after a refusal": {refused, "add table ip other", 2, nil},
		"owned table, after a refusal":   {refused, "add rule ip ip-masq masq-A accept", 2, netfilter.ErrChanged},
	} {
		t.Run(name, func(t *testing.T) {
			n := newNode(t)
			n.apply(desired(sourcePolicy("A"), sourcePolicy("B")))
			n.nft(tc.before)
			b := n.backend.(*backend)
			observed, err := b.driver.read(tableName)
			assert.NoError(t, err)
			want, calls := desired(sourcePolicy("A", func(s *policy.SourcePolicy) { s.SourceCIDRs = prefixes("10.9.0.0/16") })), 0
			err = b.write(observed, false, func(w *tableWriter) {
				if calls++; calls == tc.attempt*len(policy.Families()) {
					n.nft(tc.commit)
				}
				w.update(masqTable(w.family, netfilter.ChainsOf(want, w.family), w.have))
			})
			if !errors.Is(err, tc.want) {
				t.Fatalf("got error %v, want %v", err, tc.want)
			}
			if d := n.compare(want); err == nil && len(d) > 0 {
				t.Errorf("differs:\n%s", d)
			}
			if err != nil && strings.Contains(n.list(), "set scope-") {
				t.Errorf("a new set is left:\n%s", n.list())
			}
		})
	}
}

// TestApplyBesideCommits: the first write of 10,000 prefixes takes two batches, and another program commits
// more often than the prefixes can be read.
func TestApplyBesideCommits(t *testing.T) {
	want := desired(sourcePolicy("A", func(s *policy.SourcePolicy) { s.NonMasqueradeCIDRs = manyPrefixes() }))
	n := newNode(t)
	var other nfnetlink.Conn
	if _, err := other.Generation(); err != nil { // opens it in the namespace of this thread
		t.Fatal(err)
	}
	interval := timelimit.Scale(10 * time.Millisecond)
	stop, stopped := make(chan struct{}), make(chan error)
	go func() {
		var b nfnetlink.Batch
		b.AddTable(nfnetlink.IPv4, "other")
		b.AddChain(nfnetlink.IPv4, "other", "c", nil)
		b.AddRule(nfnetlink.IPv4, "other", "c", nil, "")
		err := other.Commit(&b)
		for ; err == nil; err = other.Commit(&b) {
			select {
			case <-stop:
				stopped <- other.Close()
				return
			case <-time.After(interval):
			}
		}
		stopped <- errors.Join(err, other.Close())
	}()
	for range 3 {
		n.nft("add table ip ip-masq; delete table ip ip-masq")
		observed := assert.Must(n.backend.Observe(t.Context(), nil))(t)
		assert.NoError(t, n.backend.Apply(t.Context(), want, observed, nil))
	}
	close(stop)
	assert.NoError(t, <-stopped)
}

// TestReadBesideCommits: other programs commit during each reading. The second one that finds the same is
// taken, and one that finds something else is not.
func TestReadBesideCommits(t *testing.T) {
	for name, tc := range map[string]struct {
		before, commit string // the second one during the first reading
		readings       int
	}{
		"another table": {"", "add table ip other0", 2},
		"owned rules":   {"", "add rule ip ip-masq masq-A counter return", 3},
		"another table beside a rule that is unrecognized": {"add rule ip ip-masq masq-A tcp dport 80 accept", "add table ip other0", 2},
		"a rule that is unrecognized":                      {"", "add rule ip ip-masq masq-A tcp dport 80 accept", 3},
	} {
		t.Run(name, func(t *testing.T) {
			n := newNode(t)
			n.apply(desired(sourcePolicy("A")))
			n.nft(tc.before)
			b, tables := n.backend.(*backend), 0
			s, err := b.driver.readEach(func(f policy.Family) (*table, error) {
				read, err := readTable(&b.driver.conn, f, tableName)
				if tables++; tables == len(policy.Families()) {
					n.nft(tc.commit)
				}
				n.nft(fmt.Sprint("add table ip other", tables))
				return read, err
			})
			assert.NoError(t, err)
			if readings := tables / len(policy.Families()); readings != tc.readings || s.generation != 0 {
				t.Errorf("%d readings, want %d; generation %d", readings, tc.readings, s.generation)
			}
			now, err := b.driver.read(tableName)
			if err != nil || !s.sameReading(now) {
				t.Errorf("the rules are not those in the kernel: %v", err)
			}
		})
	}
}

// TestWriteBesideCommits: other programs commit whenever the batches are being encoded. The write still ends,
// as the batches are encoded once.
func TestWriteBesideCommits(t *testing.T) {
	for name, before := range map[string]string{
		"no table":                    "delete table ip ip-masq",
		"a rule":                      "flush chain ip ip-masq masq-A",
		"a rule that is unrecognized": "add rule ip ip-masq masq-A tcp dport 80 accept",
	} {
		t.Run(name, func(t *testing.T) {
			n := newNode(t)
			want := desired(sourcePolicy("A"))
			n.apply(want)
			n.nft(before)
			b, encoded := n.backend.(*backend), 0
			observed, err := b.driver.read(tableName)
			assert.NoError(t, err)
			err = b.write(observed, false, func(w *tableWriter) {
				encoded++
				n.nft(fmt.Sprint("add table ip other", encoded))
				w.update(masqTable(w.family, netfilter.ChainsOf(want, w.family), w.have))
			})
			if err != nil {
				t.Error(err)
			}
			if d := n.compare(want); len(d) > 0 {
				t.Errorf("differs:\n%s", d)
			}
		})
	}
}

// TestSetsAreFilledOnce: after the first batch was committed and the second one was not, the next attempt does not
// send the first one again.
func TestSetsAreFilledOnce(t *testing.T) {
	n := newNode(t)
	n.apply(desired(sourcePolicy("A")))
	scoped := func(s *policy.SourcePolicy) { s.SourceCIDRs = prefixes("10.9.0.0/16") }
	want := desired(sourcePolicy("A", scoped))
	attempt := 1
	w := writer{Driver: n.driver, name: tableName, broken: map[nfnetlink.Family]bool{}}
	w.change = func(tables *tableWriter) {
		tables.update(masqTable(tables.family, netfilter.ChainsOf(want, tables.family), tables.have))
		if attempt == 1 {
			tables.rest.DeleteChain(tables.link, tableName, "none")
		}
	}
	err := w.attempt(nil)
	if err == nil || w.fill.Len() == 0 || !w.hasFilled {
		t.Fatalf("%v after %d messages that fill sets", err, w.fill.Len())
	}
	attempt = 2
	assert.NoError(t, w.attempt(nil))
	assert.Equal(t, "messages that fill sets", w.fill.Len(), 0)
	if d := n.compare(want); len(d) > 0 {
		t.Errorf("differs:\n%s", d)
	}
}
