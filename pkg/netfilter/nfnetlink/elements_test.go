// SPDX-License-Identifier: Apache-2.0

package nfnetlink

import (
	"errors"
	"os"
	"slices"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/ip-masq/ip-masq-cni/e2e/assert"
	"github.com/ip-masq/ip-masq-cni/e2e/sandbox"
)

// TestContents reads sets and maps of all forms from a kernel.
func TestContents(t *testing.T) {
	sandbox.NetworkNamespace(t)
	sandbox.Feed(t, `table ip t {
	chain d { }
	set plain { type ipv4_addr; elements = { 10.0.0.1 } }
	set ranges { type ipv4_addr; flags interval; elements = { 10.0.0.0/8 } }
	set pairs { type ipv4_addr . ipv4_addr; flags interval; elements = { 10.1.0.0/16 . 10.0.0.1 } }
	set counted { type ipv4_addr; counter; elements = { 10.0.0.1 } }
	set passing { type ipv4_addr; flags timeout; elements = { 10.0.0.1 timeout 1h comment "c" } }
	quota q { over 1 mbytes }
	map objects { type ipv4_addr : quota; elements = { 10.0.0.1 : "q" } }
	map verdicts { type ifname : verdict; elements = { "eth0" : jump d } }
	map values { type ipv4_addr : mark; elements = { 10.0.0.1 : 7, * : 8 } }
}
`, "nft", "-f", "-")
	var c Conn
	t.Cleanup(func() { _ = c.Close() })
	read := func(name string) Contents { return assert.Must(c.Contents(IPv4, "t", name))(t) }
	assert.Equal(t, "plain", read("plain").Elements, []Element{{Key: []byte{10, 0, 0, 1}}})
	ranges := read("ranges").Elements
	slices.SortFunc(ranges, func(a, b Element) int { return slices.Compare(a.Key, b.Key) })
	last := len(ranges) - 1
	assert.Equal(t, "ranges", ranges[last-1:], []Element{{Key: []byte{10, 0, 0, 0}}, {Key: []byte{11, 0, 0, 0}, End: true}})
	pairs := read("pairs")
	assert.Equal(t, "pairs", pairs.Elements, []Element{{Key: []byte{10, 1, 0, 0, 10, 0, 0, 1}, KeyEnd: []byte{10, 1, 255, 255, 10, 0, 0, 1}}})
	assert.Equal(t, "fields of pairs", pairs.Fields, []int{4, 4})
	assert.Equal(t, "counted", read("counted").Elements, []Element{{Key: []byte{10, 0, 0, 1}}})
	assert.Equal(t, "passing", read("passing").Elements, []Element{{Key: []byte{10, 0, 0, 1}}})
	assert.Equal(t, "objects", read("objects").Elements, []Element{{Key: []byte{10, 0, 0, 1}}})
	verdicts := read("verdicts").Elements
	assert.Equal(t, "verdict", *verdicts[0].Verdict, Verdict{Code: Jump, Chain: "d"})
	assert.Equal(t, "key of a verdict", verdicts[0].Key, []byte("eth0\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00"))
	var values, others int
	for _, e := range read("values").Elements {
		if e.CatchAll {
			others++
		} else {
			values++
		}
		assert.Equal(t, "size of a value", len(e.Data), 4)
	}
	assert.Equal(t, "elements of values", [2]int{values, others}, [2]int{1, 1})
	if _, err := c.Contents(IPv4, "t", "none"); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("a set that does not exist: %v", err)
	}
}

// TestUnknownElement: an element with something that is not known, and not zero, may stand for other keys.
func TestUnknownElement(t *testing.T) {
	for name, tt := range map[string]struct {
		number uint16
		value  uint32
		ok     bool
	}{
		"attribute of 0":     {12, 0, true},
		"attribute":          {12, 1, false},
		"flag of catch-all":  {unix.NFTA_SET_ELEM_FLAGS, elemCatchAll, true},
		"flag":               {unix.NFTA_SET_ELEM_FLAGS, 4, false},
		"timeout of 4 bytes": {unix.NFTA_SET_ELEM_TIMEOUT, 1, true},
	} {
		var w attrWriter
		w.value(unix.NFTA_SET_ELEM_KEY, []byte{10, 0, 0, 1})
		w.u32(tt.number, tt.value)
		_, ok := decodeContentElement(w.b)
		assert.Equal(t, name, ok, tt.ok)
	}
}
