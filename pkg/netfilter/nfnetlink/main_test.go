// SPDX-License-Identifier: Apache-2.0

package nfnetlink

import (
	"net/netip"
	"os"
	"testing"

	"go4.org/netipx"

	"github.com/ip-masq/ip-masq-cni/e2e/assert"
	"github.com/ip-masq/ip-masq-cni/e2e/sandbox"
)

func TestMain(m *testing.M) { os.Exit(sandbox.Run(m)) }

var namespace = sandbox.NetworkNamespace

// dial opens a connection in the thread's namespace, to be closed at the end.
func dial(t testing.TB) *Conn {
	t.Helper()
	c := &Conn{}
	assert.NoError(t, c.open())
	t.Cleanup(func() {
		assert.NoError(t, c.Close())
	})
	return c
}

// decodeAttrs decodes attributes as Conn decodes those of an answer.
func decodeAttrs[T any](b []byte, decode func(*attrTable) T) (decoded T, err error) {
	var t attrTable
	err = t.decode(b, func(t *attrTable) { decoded = decode(t) })
	return decoded, err
}

func decodeRule(b []byte) (Rule, error) { return decodeAttrs(b, ruleDecoder{}.decode) }

func decodeElems(b []byte) ([]element, error) {
	return decodeAttrs(b, func(t *attrTable) []element { return decodeElements(nil, t) })
}

func commit(t testing.TB, c *Conn, b *Batch) {
	t.Helper()
	assert.NoError(t, c.Commit(b))
}

func span(first, last string) netipx.IPRange {
	return netipx.IPRangeFrom(netip.MustParseAddr(first), netip.MustParseAddr(last))
}

// many returns n ranges of three addresses that do not touch.
func many(family Family, n int) []netipx.IPRange {
	ranges := make([]netipx.IPRange, 0, n)
	for i := range n {
		b := [16]byte{0: 0xfd, 12: 10, 13: byte(i >> 12), 14: byte(i >> 4), 15: byte(i<<4) + 1}
		first := netip.AddrFrom16(b)
		b[15] += 2
		last := netip.AddrFrom16(b)
		if family == IPv4 {
			f, l := first.As16(), last.As16()
			first, last = netip.AddrFrom4([4]byte(f[12:])), netip.AddrFrom4([4]byte(l[12:]))
		}
		ranges = append(ranges, netipx.IPRangeFrom(first, last))
	}
	return ranges
}
